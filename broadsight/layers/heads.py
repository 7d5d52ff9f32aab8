"""Channels to attention heads and back."""

from torch import Tensor


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys, ... side by side in the last axis, each by head. (B, N, parts*C) -> parts of (B, heads, N, d)."""
    B, N, C = x.shape
    return x.view(B, N, parts * heads, C // (parts * heads)).transpose(1, 2).chunk(parts, 1)


def join_heads(x: Tensor) -> Tensor:
    """(B, heads, N, d) -> (B, N, heads*d)."""
    return x.transpose(1, 2).flatten(2)
