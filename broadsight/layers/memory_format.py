"""Channels-last in memory: the format that all our layers run in."""

import torch
from timm.layers import register_notrace_function
from torch import Tensor


@register_notrace_function
def channels_last(x: Tensor) -> Tensor:
    """(B, C, H, W) with its channels side by side in memory; a copy if they are not. vmap knows no memory formats."""
    return x if torch._C._are_functorch_transforms_active() else x.contiguous(memory_format=torch.channels_last)
