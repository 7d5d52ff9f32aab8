"""Brings a pyramid of feature maps to one grid and one width."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from ..any_size import average_to, symbolic
from ..exported import exporting
from ..folding import Shift, inference_form
from ..kernels.products import MiddleSample, map_product

RESIZES = ("release", "ga")


@register_notrace_module
class MergeMaps(nn.Module):
    """All maps at the grid of one of them, concatenated, projected, normed. Maps (B, C_i, H_i, W_i) -> (B, dim, h, w).

    The concatenation is never formed: the projection of each map is added up instead. A map that must grow is projected
    before, one that must shrink after, so that the product is always taken on the smaller of the two. The result is
    channels-last in memory.

    Args:
        channels: Channels of each map.
        dim: Channels of the result.
        level: Position of the map that fixes the grid. 0 or less: only the last map is used, without the others.
        resize: "release": shrink bilinearly, grow by averaging, as the released weights were trained; "ga": shrink by
            averaging, grow bilinearly.
    """

    def __init__(self, channels: Sequence[int], dim: int, level: int, resize: str = "release"):
        super().__init__()
        if resize not in RESIZES:
            raise ValueError(f"resize={resize!r} is not known; choose one of {', '.join(map(repr, RESIZES))}")
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
        if exporting() and folded is not None and self.resize == "release" and not symbolic(*grid):
            return self._exported(maps, grid, *folded)
        weight, merged = (self.weight, None) if folded is None else folded
        growing = []
        for x, part in zip(maps, weight.split(self.used, 1), strict=True):
            if grows(x.shape[-2:], grid):
                growing.append(map_product(x.flatten(2), part).unflatten(1, x.shape[-2:]))  # B H W dim
            else:
                merged = map_product(self.shrink(x, grid).flatten(2), part, merged)  # B n dim
        assert merged is not None  # the map that fixes the grid never grows
        merged = merged.unflatten(1, grid)  # B h w dim
        for x in growing:
            merged = self.add_grown(merged, x)
        if folded is None:
            merged = self.run_norm(merged)
        return self.act(merged).permute(0, 3, 1, 2)

    def _exported(self, maps: list[Tensor], grid: Sequence[int], weight: Tensor, shift: Tensor) -> Tensor:
        """The same as convolutions, which leave the maps in the layout that runtimes have chosen for those before."""
        merged: Tensor | None = None
        for x, part in zip(maps, weight.split(self.used, 1), strict=True):
            bias = shift.flatten() if merged is None else None
            if grows(x.shape[-2:], grid):
                x = enlarge(F.conv2d(x, part[:, :, None, None], bias), grid)
            else:
                x = F.conv2d(self._shrink_exported(x, grid), part[:, :, None, None], bias)
            merged = x if merged is None else merged + x
        assert merged is not None
        return self.act(merged)

    def _shrink_exported(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        ratio, size = x.shape[-2] // grid[0], tuple(x.shape[-2:])
        if size == tuple(grid) or ratio % 2 or size != (grid[0] * ratio, grid[1] * ratio):
            return self.shrink(x, grid)
        if ratio == 2:
            return F.avg_pool2d(x, 2)
        # The four pixels in the middle of every cell: neither slices nor a pooling of which most is thrown away
        kernel = F.pad(x.new_full((1, 1, 2, 2), 0.25), [ratio // 2 - 1] * 4)
        return F.conv2d(x, kernel.expand(x.shape[1], -1, -1, -1), stride=ratio, groups=x.shape[1])

    def run_norm(self, x: Tensor) -> Tensor:
        """(B, h, w, dim) -> (B, h, w, dim)."""
        if isinstance(self.norm, nn.GroupNorm):  # which norms each image by itself
            return self.norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.norm(x.flatten(0, 2)).view(x.shape)

    def shrink(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        """(B, C, H, W) -> (B, C, h, w)."""
        size, (h, w) = tuple(x.shape[-2:]), grid
        known = not symbolic(*size)
        if known and size == (h, w):
            return x
        if self.resize == "ga":
            return average_to(x, h, w)
        ratio = size[0] // h if known else 0
        if known and ratio % 2 == 0 and size == (h * ratio, w * ratio) and x.is_contiguous():
            return MiddleSample.apply(x, ratio)
        return F.interpolate(x, (h, w), mode="bilinear", align_corners=False)

    def add_grown(self, merged: Tensor, x: Tensor) -> Tensor:
        """Add a smaller map, enlarged. (B, h, w, dim), (B, H, W, dim) -> (B, h, w, dim)."""
        (h, w), (H, W) = merged.shape[1:3], x.shape[1:3]
        if self.resize == "ga":
            x = F.interpolate(x.permute(0, 3, 1, 2), (h, w), mode="bilinear", align_corners=False)
            return merged + x.permute(0, 2, 3, 1)
        if not symbolic(h, w) and h % H == 0 and w % W == 0:
            cells = merged.unflatten(2, (W, w // W)).unflatten(1, (H, h // H))  # B H h/H W w/W dim
            return (cells + x[:, :, None, :, None]).view(merged.shape)
        return merged + average_to(x.permute(0, 3, 1, 2), h, w).permute(0, 2, 3, 1)

    def reparameterize(self) -> None:
        """Fold the norm into the projection, for inference."""
        folded = inference_form(self.weight, self.norm)
        if folded is not None:
            self.weight = nn.Parameter(folded[0].detach(), requires_grad=False)
            self.norm = Shift(folded[1])


def enlarge(x: Tensor, grid: Sequence[int]) -> Tensor:
    """(B, C, H, W) -> (B, C, h, w): every pixel repeated, or where that does not come out averages."""
    (H, W), (h, w) = x.shape[-2:], grid
    if h % H == 0 and w % W == 0:
        return F.interpolate(x, scale_factor=(h // H, w // W), mode="nearest")
    return F.adaptive_avg_pool2d(x, (h, w))


def grows(size: Sequence[int], grid: Sequence[int]) -> bool:
    """The release looks at the height; the width decides where the heights are equal."""
    return size[0] < grid[0] or (not symbolic(*size) and size[0] == grid[0] and size[1] < grid[1])


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
