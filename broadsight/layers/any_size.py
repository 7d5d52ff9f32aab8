"""Padding, cropping and averaging of maps that also work when an exporter hands in symbols for sizes.

A branch on a symbolic size, or a slice whose end cannot be proven to lie inside, would pin the exported program to the
sizes it was traced with. So maps of symbolic size are always padded, if by nothing, and cropped by index.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def symbolic(height: int, width: int) -> bool:
    """Whether torch.export is tracing with dynamic sizes."""
    if torch.jit.is_scripting():
        return False
    else:
        return torch.compiler.is_exporting() and not (isinstance(height, int) and isinstance(width, int))


def pad_to(x: Tensor, height: int, width: int) -> Tensor:
    """Zeros at the bottom and the right. (B, H, W, C) -> (B, height, width, C)."""
    H, W = x.shape[1], x.shape[2]
    if symbolic(H, W) or height != H or width != W:
        x = F.pad(x, [0, 0, 0, width - W, 0, height - H])
    return x


def crop_to(x: Tensor, height: int, width: int, start: int = 0) -> Tensor:
    """A part of a map, by default the top left. (B, H, W, C) -> (B, height, width, C)."""
    if symbolic(height, width):
        x = x.index_select(1, torch.arange(start, start + height, device=x.device))
        return x.index_select(2, torch.arange(start, start + width, device=x.device))
    else:
        return x[:, start : start + height, start : start + width]


def average_to(x: Tensor, height: int, width: int) -> Tensor:
    """The cells' means as F.adaptive_avg_pool2d has them. (B, C, H, W) -> (B, C, height, width).

    Where sizes are open, exporters take lengths of that function's cells from the example, and the program is wrong for
    other sizes: so there it is two products with matrices.
    """
    if symbolic(height, width) or symbolic(x.shape[-2], x.shape[-1]):
        return average_by_products(x, height, width)
    else:
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


def split_cells(x: Tensor, height: int, width: int) -> Tensor:
    """(B, p*height, q*width, C) -> (B, p, q, height, width, C), a view."""
    return x.unfold(1, height, height).unfold(2, width, width).permute(0, 1, 2, 4, 5, 3)


def join_cells(x: Tensor) -> Tensor:
    """(B, p, q, height, width, C) -> (B, p*height, q*width, C)."""
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)
