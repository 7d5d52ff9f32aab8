"""Feature maps merged and pooled, as convolutions where sizes are known, by products where open, and tokens of them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layers import FlattenPool, MergeMaps
from ...layers.folding import inference_form
from ...layers.kernels.products import gram_triangle
from ...layers.pooling.gram_tokens import GramTokens
from ...layers.pooling.merge_maps import check_features, grows
from . import lowers
from .operations import average_to, free


@lowers(MergeMaps)
class LoweredMergeMaps(MergeMaps):
    """Maps (B, C_i, H_i, W_i) -> (B, dim, h, w)."""

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        grid = features[self.level if self.level > 0 else -1].shape[-2:]
        folded = inference_form(self.weight, self.norm)
        if folded is None or self.resize != "release" or free(*grid):
            return super().forward(features)
        check_features(features, self.channels)
        maps = list(features) if self.level > 0 else [features[-1]]
        weight, shift = folded
        # Convolutions leave the maps in the layout that runtimes have chosen for those before.
        merged: Any = None
        for x, part in zip(maps, weight.split(self.used, 1), strict=True):
            bias = shift.flatten() if merged is None else None
            if self.grows(x, grid):
                x = enlarge(F.conv2d(x, part[:, :, None, None], bias), grid)
            else:
                x = F.conv2d(self.take_middles(x, grid), part[:, :, None, None], bias)
            merged = x if merged is None else merged + x
        return self.act(merged)

    def grows(self, x: Tensor, grid: Sequence[int]) -> bool:
        return x.shape[-2] < grid[0] if free(*x.shape[-2:]) else grows(x.shape[-2:], grid)

    def shrink(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        if not free(*x.shape[-2:], *grid):
            return super().shrink(x, grid)
        if self.resize == "ga":
            return average_to(x, grid[0], grid[1])
        return F.interpolate(x, tuple(grid), mode="bilinear", align_corners=False)

    def add_grown(self, merged: Tensor, x: Tensor) -> Tensor:
        h, w = merged.shape[1:3]
        if self.resize == "ga" or not free(h, w):
            return super().add_grown(merged, x)
        return merged + average_to(x.permute(0, 3, 1, 2), h, w).permute(0, 2, 3, 1)

    def take_middles(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        """Shrink where sizes are known: the mean of the four pixels in the middle of every cell."""
        ratio, size = x.shape[-2] // grid[0], tuple(x.shape[-2:])
        if size == tuple(grid) or ratio % 2 or size != (grid[0] * ratio, grid[1] * ratio):
            return self.shrink(x, grid)
        if ratio == 2:
            return F.avg_pool2d(x, 2)
        # Neither slices nor a pooling of which most is thrown away; of listed values, a constant to every runtime.
        middle = torch.tensor([[[[0.25, 0.25], [0.25, 0.25]]]], dtype=x.dtype, device=x.device)
        kernel = F.pad(middle, [ratio // 2 - 1] * 4)
        return F.conv2d(x, kernel.expand(x.shape[1], -1, -1, -1), stride=ratio, groups=x.shape[1])


@lowers(GramTokens)
class LoweredGramTokens(GramTokens):
    """(B, n, dim) -> (G, B, tokens, dim)."""

    def statistics(self, r: Tensor, G: int) -> tuple[Tensor, Tensor]:
        square = r.shape[1] * r.shape[1]
        if not free(square):
            return super().statistics(r, G)
        # Of a free size, programs hold whole numbers alone
        entries = gram_triangle(r, self.order, self.mirror, G)
        length = torch.linalg.vector_norm(entries, dim=-1, keepdim=True)
        return entries, (length / square).clamp_min(1e-12) * square


@lowers(FlattenPool)
class LoweredFlattenPool(FlattenPool):
    """[(B, C_i, H_i, W_i)] -> (B, num_classes)."""

    def to_grid(self, x: Tensor) -> Tensor:
        return average_to(x, *self.grid)


def enlarge(x: Tensor, grid: Sequence[int]) -> Tensor:
    """(B, C, H, W) -> (B, C, h, w): every pixel repeated, or where that does not come out averages."""
    (H, W), (h, w) = x.shape[-2:], grid
    if h % H == 0 and w % W == 0:
        return F.interpolate(x, scale_factor=(h // H, w // W), mode="nearest")
    return F.adaptive_avg_pool2d(x, (h, w))
