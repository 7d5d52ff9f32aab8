"""What lowered layers are built from: operations that all runtimes do well, on sizes that may be left open.

Runtimes know matrix products, soft-max, transposition and gathering; strided views, fused attention, stable sorts and
writes by index become chains of small operations, or nothing. A branch on an open size, or a slice whose end cannot
be proven to lie inside, would pin a program to its example: maps of open size are always padded, and cropped by
index.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layers.any_size import split_heads as split_heads


def free(*sizes: int) -> bool:
    """Whether one of the sizes is left open: a symbol, and no number."""
    return not all(isinstance(size, int) for size in sizes)


def pointwise(x: Tensor, linear: Any) -> Tensor:
    """A linear layer over the channels of a map, as a convolution. (B, C, H, W) -> (B, C', H, W)."""
    return F.conv2d(x, linear.weight[:, :, None, None], linear.bias)


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None = None, *, scaled: bool = False
) -> Tensor:
    """Soft-max attention. (..., N, d), (..., M, d), (..., M, d) -> (..., N, d); leading axes are broadcast. hidden is
    added to the logits: minus infinity for keys that nobody may see. scaled: the queries already are, by d ** -0.5."""
    logits = queries @ keys.transpose(-2, -1)
    logits = logits if scaled else logits * keys.shape[-1] ** -0.5
    return (logits if hidden is None else logits + hidden).softmax(-1) @ values


def minus_infinity(where: Tensor, like: Tensor) -> Tensor:
    """Zeros of the dtype of `like`, and minus infinity where the mask says so."""
    return torch.zeros(where.shape, dtype=like.dtype, device=like.device).masked_fill(where, float("-inf"))


def pad_to(x: Tensor, height: int, width: int) -> Tensor:
    """Zeros at the bottom and the right. (B, H, W, C) -> (B, height, width, C)."""
    H, W = x.shape[1], x.shape[2]
    return F.pad(x, [0, 0, 0, width - W, 0, height - H]) if free(H, W) or (height, width) != (H, W) else x


def crop_to(x: Tensor, height: int, width: int, start: int = 0) -> Tensor:
    """A part of a map, by default the top left. (B, H, W, C) -> (B, height, width, C)."""
    if free(height, width):
        x = x.index_select(1, torch.arange(start, start + height, device=x.device))
        return x.index_select(2, torch.arange(start, start + width, device=x.device))
    if (height, width) == tuple(x.shape[1:3]):
        return x
    return x[:, start : start + height, start : start + width]


def average_to(x: Tensor, height: int, width: int) -> Tensor:
    """F.adaptive_avg_pool2d, (B, C, H, W) -> (B, C, height, width).

    Of open sizes exporters would take the lengths of its cells from the example, and the program would be wrong for
    others.
    """
    if free(height, width, x.shape[-2], x.shape[-1]):
        return average_by_products(x, height, width)
    return F.adaptive_avg_pool2d(x, (height, width))


def average_by_products(x: Tensor, height: int, width: int) -> Tensor:
    """The same as two products with matrices, which all runtimes do well."""
    return _means(x, x.shape[-2], height) @ x @ _means(x, x.shape[-1], width).mT


def _means(x: Tensor, side: int, cells: int) -> Tensor:
    """What each place contributes to each cell, (cells, side)."""
    cell = torch.arange(cells, device=x.device)[:, None]
    first, end = cell * side // cells, ((cell + 1) * side + cells - 1) // cells
    place = torch.arange(side, device=x.device)
    return ((place >= first) & (place < end)).to(x.dtype) / (end - first).to(x.dtype)
