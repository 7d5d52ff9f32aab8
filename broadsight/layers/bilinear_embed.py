"""Down-sampling by bilinear samples at learned positions."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .any_size import channels_last
from .folding import fold_norm
from .kernels.depthwise import learns_offsets_in_bfloat16, offsets_of_every_place
from .kernels.dispatch import accelerated


@register_notrace_module
class BilinearPatchEmbed(nn.Module):
    """Sample once per 2 x 2 patch, then a separable convolution. (B, C, H, W) -> (B, C', H/2, W/2), sizes rounded up.

    A depth-wise convolution predicts the offset from the patch's centre in pixels, for all channels; none: 2 x 2 means.
    """

    def __init__(self, dim: int, out_dim: int):
        super().__init__()
        self.offset_dw = nn.Conv2d(dim, dim, 3, stride=2, padding=1, groups=dim)
        self.offset_proj = nn.Linear(dim, 2, bias=False)
        self.dw = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        self.proj, self.norm = nn.Linear(dim, out_dim), nn.BatchNorm2d(out_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dw(channels_last(self.sample(x, self.offsets(x))))
        return self.norm(self.proj(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))

    @accelerated(offsets_of_every_place, learns_offsets_in_bfloat16)
    def offsets(self, x: Tensor) -> Tensor:
        """(dx, dy) in pixels for every output cell. (B, C, H, W) -> (B, H/2, W/2, 2)."""
        return self.offset_proj(self.offset_dw(x).permute(0, 2, 3, 1))

    def sample(self, x: Tensor, offsets: Tensor) -> Tensor:
        """(B, C, H, W) at the patch centres moved by the offsets (B, H/2, W/2, 2). -> (B, C, H/2, W/2)."""
        # Half precision would lose sub-pixel positions on wide maps.
        wide = offsets if offsets.dtype == torch.float64 else offsets.float()
        grid = self.positions(wide, x.shape[-2], x.shape[-1])
        return F.grid_sample(x.to(wide.dtype), grid, "bilinear", "border", align_corners=False).to(x.dtype)

    def positions(self, offsets: Tensor, H: int, W: int) -> Tensor:
        """Where to sample a map of H x W pixels, in [-1, 1] as F.grid_sample has it. (B, h, w, 2) -> (B, h, w, 2)."""
        row, column = (torch.arange(n, device=offsets.device, dtype=offsets.dtype) for n in offsets.shape[1:3])
        grid_x = (4 * column + 2 * offsets[..., 0] + 2) / W - 1  # pixel 2j + 0.5 + dx, in [-1, 1] of the true width
        grid_y = (4 * row[:, None] + 2 * offsets[..., 1] + 2) / H - 1
        return torch.stack([grid_x, grid_y], -1)

    def reparameterize(self) -> None:
        fold_norm(self, "proj", "norm")
