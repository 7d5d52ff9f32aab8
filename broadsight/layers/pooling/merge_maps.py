"""Brings a pyramid of feature maps to one grid and one width."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from ...errors import check_choice
from ..folding import fold_product, inference_form
from ..kernels.products import map_product, shrink_bilinearly


@register_notrace_module
class MergeMaps(nn.Module):
    """All maps at the grid of one of them, concatenated, projected, normed. Maps (B, C_i, H_i, W_i) -> (B, dim, h, w).

    The concatenation is never formed: the projection of each map is added up instead. A map that must grow is projected
    before, one that must shrink after, so that the product is always taken on the smaller of the two. The result is
    channels-last in memory.

    Args:
        channels, dim: Channels of each map, and of the result.
        level: Position of the map that fixes the grid. 0 or less: only the last map is used, without the others.
        resize: "release": shrink bilinearly, grow by averaging, as the released weights were; "ga": the reverse.
    """

    def __init__(self, channels: Sequence[int], dim: int, level: int, resize: str = "release"):
        super().__init__()
        check_choice("resize", resize, ("release", "ga"))
        if level >= len(channels):
            raise ValueError(f"level={level} of {len(channels)} feature maps; choose at most {len(channels) - 1}")
        self.channels, self.level, self.resize = tuple(channels), level, resize
        self.used = self.channels if level > 0 else self.channels[-1:]
        self.weight = nn.Parameter(torch.empty(dim, sum(self.used)))
        self.norm: nn.Module = nn.BatchNorm1d(dim)
        # The release projects a single map with ReLU and a merged one with GELU.
        self.act: nn.Module = nn.GELU() if level > 0 else nn.ReLU()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        check_features(features, self.channels)
        maps = list(features) if self.level > 0 else [features[-1]]
        grid = features[self.level if self.level > 0 else -1].shape[-2:]
        folded = inference_form(self.weight, self.norm)
        weight, merged = (self.weight, None) if folded is None else folded
        growing = []
        for x, part in zip(maps, weight.split(self.used, 1), strict=True):
            if self.grows(x, grid):
                growing.append(map_product(x.flatten(2), part).unflatten(1, x.shape[-2:]))  # B H W dim
            else:
                merged = map_product(self.shrink(x, grid).flatten(2), part, merged)  # B n dim
        assert merged is not None  # the map that fixes the grid never grows
        merged = merged.unflatten(1, grid)  # B h w dim
        for x in growing:
            merged = self.add_grown(merged, x)
        if isinstance(self.norm, nn.GroupNorm):  # which norms each image by itself
            merged = self.norm(merged.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        elif folded is None:
            merged = self.norm(merged.flatten(0, 2)).view(merged.shape)
        return self.act(merged).permute(0, 3, 1, 2)

    def grows(self, x: Tensor, grid: Sequence[int]) -> bool:
        """Whether a map (B, C, H, W) is smaller than the grid."""
        return grows(x.shape[-2:], grid)

    def shrink(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        """(B, C, H, W) -> (B, C, h, w)."""
        if tuple(x.shape[-2:]) == tuple(grid):
            return x
        return F.adaptive_avg_pool2d(x, (grid[0], grid[1])) if self.resize == "ga" else shrink_bilinearly(x, grid)

    def add_grown(self, merged: Tensor, x: Tensor) -> Tensor:
        """Add a smaller map, enlarged. (B, h, w, dim), (B, H, W, dim) -> (B, h, w, dim)."""
        (h, w), (H, W) = merged.shape[1:3], x.shape[1:3]
        if self.resize == "ga":
            x = F.interpolate(x.permute(0, 3, 1, 2), (h, w), mode="bilinear", align_corners=False)
            return merged + x.permute(0, 2, 3, 1)
        if h % H == 0 and w % W == 0:
            cells = merged.unflatten(2, (W, w // W)).unflatten(1, (H, h // H))  # B H h/H W w/W dim
            return (cells + x[:, :, None, :, None]).view(merged.shape)
        return merged + F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), (h, w)).permute(0, 2, 3, 1)

    def reparameterize(self) -> None:
        fold_product(self, "weight", "norm")


def grows(size: Sequence[int], grid: Sequence[int]) -> bool:
    """The release looks at the height; the width decides where the heights are equal."""
    return size[0] < grid[0] or (size[0] == grid[0] and size[1] < grid[1])


def check_features(features: Sequence[Tensor], channels: Sequence[int]) -> None:
    """Refuse what is not the expected list of maps, lowest level first."""
    if any(isinstance(x, torch.fx.Proxy) for x in features):  # a tracer's stand-in
        return
    if isinstance(features, Tensor) or len(features) != len(channels):
        came = "one tensor" if isinstance(features, Tensor) else f"{len(features)} feature maps"
        raise ValueError(f"{came}; expected a list of {len(channels)} maps with {tuple(channels)} channels")
    came = tuple(x.shape[1] if x.ndim == 4 else None for x in features)
    if came != tuple(channels):
        shapes = ", ".join(str(tuple(x.shape)) for x in features)
        raise ValueError(f"feature maps of shapes {shapes}; expected (B, C, H, W) with C = {tuple(channels)}")


def rows_of(x: Tensor) -> Tensor:
    """(B, D, h, w) -> (B, h*w, D), contiguous; a view of what MergeMaps gives."""
    return x.flatten(2).mT.contiguous()
