"""Multi-scale interaction: unfolding, which runtimes do not know, as slices of pairs of cells; pooling to open sizes.

Torch takes a size of 1 for a constant. So where sizes are open, every coarse map gets spare rows and columns at the
bottom and the right, which keep every count above it, that of the stride-two windows included.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layers import CMHSA, GMHSA, patches
from ...layers.coarse_attention import AttentionPath
from ...layers.kernels.folded_interaction import FoldedInteraction
from ...layers.patches import ChannelConv, PooledBranch, Propagate
from . import lowers
from .operations import attention, crop_to, free, minus_infinity, split_heads

SPARE = 2  # rows and columns of a coarse map of open size


@lowers(PooledBranch)
class LoweredPooledBranch(PooledBranch):
    def forward(self, x: Tensor) -> Tensor:
        return self.prop(self.conv_v(self.conv_h(self.expand(max_pool(x, self.patch)))), x.shape[1], x.shape[2])


@lowers(AttentionPath)
class LoweredAttentionPath(AttentionPath):
    def forward(self, x: Tensor) -> Tensor:
        H, W = x.shape[1], x.shape[2]
        return self.prop(self.attn(self.expand(average_pool(x, self.patch)), SPARE if free(H, W) else 0), H, W)


@lowers(FoldedInteraction)
class LoweredFoldedInteraction(FoldedInteraction):
    def forward(self, x: Tensor) -> Tensor:
        H, W = x.shape[1], x.shape[2]
        spare = SPARE if free(H, W) else 0
        gated = self.gate(x) * self.static.mix(self.whiten(x)).sigmoid()
        cells = self.local_in(average_pool(x, self.local.patch))
        if spare:  # a bias reaches spare cells too, but they have to be zero
            h, w = cells.shape[1], cells.shape[2]
            cells = cells * real_cells(h, w, h - spare, w - spare, x)[:, :, None].to(cells.dtype)
        keys, values = cells.chunk(2, -1)
        near = self.local.prop(self.local.attn.proj(self.local.attn.attend(keys, values, spare)), H, W)
        far = self.global_.attn.attend(self.global_in(average_pool(x, self.global_.patch)), spare)
        far = self.global_.prop(self.global_.attn.proj(far), H, W)
        return self.out_static(gated) + self.out_dynamic(torch.cat([near, far], -1))


@lowers(CMHSA)
class LoweredCMHSA(CMHSA):
    """(B, h, w, C) -> (B, h, w, C); the last `spare` rows and columns are zero and not part of the map."""

    def forward(self, x: Tensor, spare: int = 0) -> Tensor:
        return self.proj(self.attend(x, self.value(x), spare))

    def attend(self, x: Tensor, value: Tensor, spare: int = 0) -> Tensor:
        B, h, w, C = value.shape
        rows, columns = (h + 1) // 2, (w + 1) // 2
        # Images and rows stay one dimension: with both, tensors would have more than the six that XNNPACK knows.
        weights = self.mix(self.dw(x)).view(B * rows, columns, self.heads, 9, 9).softmax(-1)
        padded = F.pad(value, [0, 0, 1, 2 * columns + 1 - w, 1, 2 * rows + 1 - h])
        windows = windows_of_three(windows_of_three(padded, 1, rows), 3, columns)  # B rows 3 columns 3 C
        windows = windows.view(B * rows, 3, columns, 3, self.heads, C // self.heads).permute(0, 2, 4, 1, 3, 5)
        mixed = weights @ windows.reshape(B * rows, columns, self.heads, 9, C // self.heads)
        if spare:  # windows around spare cells would reach back into the map
            inside = real_cells(rows, columns, (h - spare + 1) // 2, (w - spare + 1) // 2, x)
            mixed = mixed * inside.repeat(B, 1)[:, :, None, None, None].to(mixed.dtype)
        mixed = mixed.view(B * rows, columns, self.heads, 3, 3, C // self.heads).permute(0, 3, 1, 4, 2, 5)
        mixed = overlap_add(overlap_add(mixed.reshape(B, rows, 3, columns, 3, C), 3), 1)
        return crop_to(mixed, h, w, start=1)


@lowers(GMHSA)
class LoweredGMHSA(GMHSA):
    """(B, h, w, C) -> (B, h, w, C); the last `spare` rows and columns are not part of the map."""

    def forward(self, x: Tensor, spare: int = 0) -> Tensor:
        return self.proj(self.attend(self.qkv(x), spare))

    def attend(self, qkv: Tensor, spare: int = 0) -> Tensor:
        B, h, w, C = qkv.shape[0], qkv.shape[1], qkv.shape[2], qkv.shape[3] // 3
        hidden = None
        if spare:
            real = real_cells(h, w, h - spare, w - spare, qkv).view(1, 1, 1, h * w)
            hidden = minus_infinity(~real, qkv)
        y = attention(*split_heads(qkv.view(B, h * w, 3 * C), 3, self.heads), hidden)
        return y.transpose(1, 2).reshape(B, h, w, C)


@lowers(ChannelConv)
class LoweredChannelConv(ChannelConv):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        x = F.conv2d(x.permute(0, 3, 1, 2), weight, stride=self.stride, padding=self.padding, groups=weight.shape[0])
        return x.permute(0, 2, 3, 1)


@lowers(Propagate)
class LoweredPropagate(Propagate):
    def crop(self, x: Tensor, H: int, W: int) -> Tensor:
        return crop_to(x, H, W)


def average_pool(x: Tensor, patch: int) -> Tensor:
    """Means of the valid pixels of each patch. (B, H, W, C) -> (B, h, w, C), spare cells included."""
    if not free(x.shape[1], x.shape[2]):
        return patches.average_pool(x, patch)
    valid = whole_patches(torch.ones_like(x[:1, :, :, :1]), patch, 0.0).mean((2, 4))  # shares of the patches
    return whole_patches(x, patch, 0.0).mean((2, 4)) / valid.clamp(min=patch**-2)


def max_pool(x: Tensor, patch: int) -> Tensor:
    """The largest valid pixel of each patch, 0 in spare cells. (B, H, W, C) -> (B, h, w, C)."""
    if not free(x.shape[1], x.shape[2]):
        return patches.max_pool(x, patch)
    lowest = -3.4e38  # some runtimes begin with the lowest number, and never come to minus infinity
    largest = whole_patches(x, patch, lowest).amax((2, 4))
    return torch.where(largest <= lowest, 0, largest)


def whole_patches(x: Tensor, patch: int, fill: float) -> Tensor:
    """(B, H, W, C) -> (B, h, patch, w, patch, C), spare cells included; pixels beyond the map are `fill`.

    An axis for every side instead of a pooling, into which ONNX Runtime would take the padding and then refuse it.
    """
    H, W = x.shape[1], x.shape[2]
    h, w = (H + patch - 1) // patch + SPARE, (W + patch - 1) // patch + SPARE
    x = F.pad(x, [0, 0, 0, w * patch - W, 0, h * patch - H], value=fill)
    return x.unflatten(2, (w, patch)).unflatten(1, (h, patch))


def real_cells(h: int, w: int, rows: int, columns: int, like: Tensor) -> Tensor:
    """(h, w), true for the first so many rows and columns."""
    inside = torch.arange(h, device=like.device)[:, None] < rows
    return inside & (torch.arange(w, device=like.device) < columns)


def windows_of_three(x: Tensor, axis: int, count: int) -> Tensor:
    """Windows of three at stride two along an axis: (..., 2n + 2, ...) -> (..., n, 3, ...), with n = count."""
    if free(count):  # torch cannot prove that such a size splits into pairs
        before = [slice(None)] * axis
        return torch.stack([x[(*before, slice(i, i + 2 * count, 2))] for i in range(3)], axis + 1)
    pairs = x.unflatten(axis, (count + 1, 2))
    return torch.cat([pairs.narrow(axis, 0, count), pairs.narrow(axis, 1, count).narrow(axis + 1, 0, 1)], axis + 1)


def overlap_add(parts: Tensor, axis: int) -> Tensor:
    """As `coarse_attention.overlap_add`, with the pairs of places that it fills taken together."""
    behind = [0, 0] * (parts.ndim - axis - 2)
    pairs = F.pad(parts.narrow(axis + 1, 0, 2), [*behind, 0, 0, 0, 1])
    last = F.pad(parts.narrow(axis + 1, 2, 1), [*behind, 0, 1, 1, 0])
    return (pairs + last).flatten(axis, axis + 1)
