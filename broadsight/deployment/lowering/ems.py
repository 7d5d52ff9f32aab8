"""Multi-scale interaction: unfolding, which runtimes do not know, as slices of pairs of cells; pooling to open sizes.

Torch takes a size of 1 for a constant. So where sizes are open, every coarse map gets spare rows and columns at the
bottom and the right, which keep every count above it, that of the stride-two windows included.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers import CMHSA, GMHSA, ChannelMlp, patches
from ...layers.coarse_attention import AttentionPath
from ...layers.kernels.dispatch import untouched
from ...layers.kernels.folded_interaction import FoldedInteraction
from ...layers.patches import ChannelConv, PooledBranch, Propagate
from ...models.emsnet import EMSBlock
from . import lowers
from .operations import attention, crop_to, free, minus_infinity, pointwise, split_heads

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


@lowers(EMSBlock)
class LoweredEMSBlock(EMSBlock):
    """(B, H, W, C) -> (B, H, W, C). Runtimes lay out convolutions as they like best, if all is convolutions."""

    @staticmethod
    def fits(block: Any) -> bool:
        """Whether the block was folded, and its MLP is as it was built but for the norm in it."""
        mlp = block.mlp
        plain = (mlp, ChannelMlp), (mlp.fc1, nn.Linear), (mlp.fc2, nn.Linear), (mlp.act, nn.GELU), (mlp.dw, nn.Identity)
        return all(untouched(*pair) for pair in (*plain, (block.mixer, FoldedInteraction)))

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 3, 1, 2)
        x = cast(LoweredFoldedInteraction, self.mixer).mix(self.norm1(x), x)
        mlp = self.mlp
        return (x + pointwise(mlp.act(pointwise(self.norm2(x), mlp.fc1)), mlp.fc2)).permute(0, 2, 3, 1)


@lowers(FoldedInteraction)
class LoweredFoldedInteraction(FoldedInteraction):
    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    def mix(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Maps (B, C, H, W) -> (B, C, H, W), added to the residual if there is one."""
        H, W = x.shape[2], x.shape[3]
        spare = SPARE if free(H, W) else 0
        static, pixels = self.static, x.permute(0, 2, 3, 1)
        whitened = static.dw(pointwise(x, self.whiten).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        fine, kept, coarse = whitened.split(static.slices, 1)
        fine, coarse = static.pool2(fine.permute(0, 2, 3, 1)), static.pool4(coarse.permute(0, 2, 3, 1))
        mixed = torch.cat([fine.permute(0, 3, 1, 2), kept, coarse.permute(0, 3, 1, 2)], 1)
        gated = pointwise(x, self.gate) * pointwise(mixed, static.merge).sigmoid()
        out = pointwise(gated, self.out_static)
        out = out if residual is None else residual + out
        cells = self.local_in(average_pool(pixels, self.local.patch))
        if spare:  # a bias reaches spare cells too, but they have to be zero
            h, w = cells.shape[1], cells.shape[2]
            cells = cells * real_cells(h, w, h - spare, w - spare, x)[:, :, None].to(cells.dtype)
        keys, values = cells.chunk(2, -1)
        near = self.local.prop(self.local.attn.proj(self.local.attn.attend(keys, values, spare)), H, W)
        far = self.global_.attn.attend(self.global_in(average_pool(pixels, self.global_.patch)), spare)
        far = self.global_.prop(self.global_.attn.proj(far), H, W)
        return out + pointwise(torch.cat([near.permute(0, 3, 1, 2), far.permute(0, 3, 1, 2)], 1), self.out_dynamic)


@lowers(CMHSA)
class LoweredCMHSA(CMHSA):
    """(B, h, w, C) -> (B, h, w, C); the last `spare` rows and columns are zero and not part of the map."""

    def forward(self, x: Tensor, spare: int = 0) -> Tensor:
        return self.proj(self.attend(x, self.value(x), spare))

    def attend(self, x: Tensor, value: Tensor, spare: int = 0) -> Tensor:
        B, h, w, C = value.shape
        rows, columns, heads = (h + 1) // 2, (w + 1) // 2, self.heads
        inside, around = windows_and_back(h, w, spare, heads, x.device)
        weights = self.mix(self.dw(x)).view(B, rows * columns, heads, 9, 9).softmax(-1)
        cells = F.pad(value.reshape(B, h * w * heads, C // heads), [0, 0, 0, 1])
        windows = cells.index_select(1, inside).view(B, rows * columns, heads, 9, C // heads)
        mixed = F.pad((weights @ windows).view(B, rows * columns * heads * 9, C // heads), [0, 0, 0, 1])
        return mixed.index_select(1, around).view(B, 4, h * w, C).sum(1).view(B, h, w, C)


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


def windows_and_back(h: int, w: int, spare: int, heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where windows of three by three at stride two find their cells among (h*w*heads), in the order of windows, heads
    and the nine; and where cells find the at most four that they get of these, in the order of the four, cells and
    heads. What is none is one behind the last; no cell gets anything from windows around spare ones."""
    lines = torch.arange(3, device=device), torch.arange(2, device=device)
    head = torch.arange(heads, device=device)
    places, sources = [], []
    for side in (h, w):
        centre = 2 * torch.arange((side + 1) // 2, device=device)[:, None] - 1 + lines[0]  # n 3
        places.append(torch.where((centre >= 0) & (centre < side), centre, -1))
        # Even cells are the middle of one window; odd ones the first of one window and the last of that before.
        behind = torch.arange(1, side + 1, device=device)
        window, tap = behind // 2 - lines[1][:, None], behind % 2 + 2 * lines[1][:, None]  # 2 side
        sources.append((window, tap, (window >= 0) & (window < (side - spare + 1) // 2) & (tap < 3)))
    row, column = places[0][:, None, None, :, None], places[1][:, None, None, :]  # p 1 1 3 1, q 1 1 3
    inside = (row * w + column) * heads + head[:, None, None]  # p q heads 3 3
    inside = torch.where((row < 0) | (column < 0), h * w * heads, inside)
    (r, i, some), (c, j, others) = sources
    r, i, some = (one[:, None, :, None, None] for one in (r, i, some))  # 2 1 h 1 1
    c, j, others = (one[:, None, :, None] for one in (c, j, others))  # 2 1 w 1
    columns = (w + 1) // 2
    around = (((r * columns + c) * heads + head) * 3 + i) * 3 + j  # 2 2 h w heads
    around = torch.where(some & others, around, (h + 1) // 2 * columns * heads * 9)
    return inside.flatten(), around.flatten()
