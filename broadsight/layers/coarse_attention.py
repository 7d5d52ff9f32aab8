"""The two attentions of EMSNet, among coarse cells: within overlapping windows, and among all of them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .any_size import attention, join_heads, split_heads
from .patches import ChannelConv, Propagate, average_pool


class CMHSA(nn.Module):
    """Convolution-like multi-head attention over 3x3 windows at stride 2. (B, h, w, C) -> (B, h, w, C).

    The 9x9 weights by which a window re-mixes its values are predicted from its centre; overlapping windows are summed.
    Values beyond the border are zero and keep their share of the soft-max. Heads are 32 wide.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.heads, self.dw = heads_of_32(dim), ChannelConv(dim, (3, 3), stride=2)
        self.mix = nn.Linear(dim, 81 * self.heads, bias=False)
        self.value, self.proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.attend(x, self.value(x)))

    def attend(self, x: Tensor, value: Tensor) -> Tensor:
        """Windows of the values (B, h, w, C), mixed as x (B, h, w, C) predicts. -> (B, h, w, C)."""
        B, h, w, C = value.shape
        rows, columns = (h + 1) // 2, (w + 1) // 2
        weights = self.mix(self.dw(x)).view(B, rows, columns, self.heads, 9, 9).permute(3, 0, 1, 2, 4, 5).softmax(-1)
        padded = F.pad(value, [0, 0, 1, 2 * columns - w, 1, 2 * rows - h])
        windows = padded.unfold(1, 3, 2).unfold(2, 3, 2)  # B rows columns C 3 3
        windows = windows.unflatten(3, (self.heads, -1)).permute(3, 0, 1, 2, 5, 6, 4).contiguous().flatten(4, 5)
        mixed = (weights @ windows).unflatten(4, (3, 3))  # heads B rows columns 3 3 d
        mixed = mixed.permute(1, 2, 4, 3, 5, 0, 6).contiguous().flatten(5)  # B rows 3 columns 3 C
        # Overlapping windows are summed on a map padded by one, along the rows and then along the columns.
        return overlap_add(overlap_add(mixed, 1), 2)[:, 1 : h + 1, 1 : w + 1]


class GMHSA(nn.Module):
    """Plain multi-head self-attention among all cells, with heads of 32. (B, h, w, C) -> (B, h, w, C)."""

    def __init__(self, dim: int):
        super().__init__()
        self.heads = heads_of_32(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.attend(self.qkv(x)))

    def attend(self, qkv: Tensor) -> Tensor:
        """Projected cells (B, h, w, 3C) -> (B, h, w, C)."""
        queries, keys, values = split_heads(qkv.flatten(1, 2), 3, self.heads)  # each B heads N d
        return join_heads(attention(queries, keys, values)).unflatten(1, qkv.shape[1:3])


class AttentionPath(nn.Module):
    """Average-pool, widen, attend, and back to full size. (B, H, W, C) -> (B, H, W, C')."""

    def __init__(self, dim: int, width: int, patch: int, attn: nn.Module):
        super().__init__()
        self.patch, self.expand = patch, nn.Linear(dim, width, bias=False)
        self.attn, self.prop = attn, Propagate(width, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.prop(self.attn(self.expand(average_pool(x, self.patch))), *x.shape[1:3])


def overlap_add(parts: Tensor, axis: int) -> Tensor:
    """Sum windows of three at stride two along an axis: (..., n, 3, ...) -> (..., 2n + 2, ...), the last empty."""
    # Odd places belong to one window; even ones to the last of one window and the first of the next.
    first, middle, last = parts.unbind(axis + 1)
    other_axes = [0, 0] * (first.ndim - axis - 1)
    even = F.pad(first, [*other_axes, 0, 1]) + F.pad(last, [*other_axes, 1, 0])
    return torch.stack([even, F.pad(middle, [*other_axes, 0, 1])], axis + 1).flatten(axis, axis + 1)


def heads_of_32(width: int) -> int:
    """32 channels a head, at least one head."""
    heads = max(1, width // 32)
    if width % heads:
        raise ValueError(f"an attention of width {width} does not split into {heads} heads; choose a multiple of 32")
    return heads
