"""Maps of any size as cells, and channels as heads: views of channels-last memory, as all our layers run."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function
from torch import Tensor

from .kernels.attention import is_bfloat16_on_cpu, written_out
from .kernels.dispatch import accelerated, runs_eagerly


@register_notrace_function
def channels_last(x: Tensor) -> Tensor:
    """(B, C, H, W) with its channels side by side in memory; a copy if they are not. vmap knows no memory formats."""
    return x if torch._C._are_functorch_transforms_active() else x.contiguous(memory_format=torch.channels_last)


@register_notrace_function
def pooled_next(x: Tensor) -> Tensor:
    """The same map (B, C, H, W), whose gradient has its channels side by side too: a pool gives them one by one."""
    if x.ndim == 4 and x.requires_grad and runs_eagerly():
        x.register_hook(channels_last)
    return x


def pad_to(x: Tensor, height: int, width: int) -> Tensor:
    """Zeros at the bottom and the right. (B, H, W, C) -> (B, height, width, C)."""
    H, W = x.shape[1], x.shape[2]
    return x if (height, width) == (H, W) else F.pad(x, [0, 0, 0, width - W, 0, height - H])


def split_cells(x: Tensor, height: int, width: int) -> Tensor:
    """(B, p*height, q*width, C) -> (B, p, q, height, width, C), a view."""
    return x.unfold(1, height, height).unfold(2, width, width).permute(0, 1, 2, 4, 5, 3)


def join_cells(x: Tensor) -> Tensor:
    """(B, p, q, height, width, C) -> (B, p*height, q*width, C)."""
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys, ... side by side in the last axis, each by head. (B, N, parts*C) -> parts of (B, heads, N, d)."""
    B, N, C = x.shape
    return x.view(B, N, parts * heads, C // (parts * heads)).transpose(1, 2).chunk(parts, 1)


def join_heads(x: Tensor) -> Tensor:
    """(B, heads, N, d) -> (B, N, heads*d)."""
    return x.transpose(1, 2).flatten(2)


@accelerated(written_out, is_bfloat16_on_cpu)
def attention(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k' / sqrt(d) + bias) v by head. (B, heads, N, d), (B, heads, M, d) twice -> (B, heads, N, d)."""
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
