"""Uniform attention with a backward pass of its own."""

from typing import Any

import torch
from torch import Tensor


def learns(x: Tensor, scale: Tensor | None, *_: Any) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (scale is not None and scale.requires_grad))


def add_context(x: Tensor, mean: Tensor, scale: Tensor | None, channel_axis: int, inplace: bool) -> Tensor:
    """(x + mean) / 2, or x + scale * mean."""
    if scale is None:
        return x.lerp_(mean, 0.5) if inplace else torch.lerp(x, mean, 0.5)
    shape = [1] * x.ndim
    shape[channel_axis] = -1
    added = mean * scale.to(x.dtype).view(shape)
    return x.add_(added) if inplace else x + added


class Uniform(torch.autograd.Function):
    """Uniform attention is its own transpose: its gradient takes two passes over the tokens, and autograd four."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, channel_axis: int, axes: list[int], inplace: bool) -> Tensor:
        mean = x.mean(axes, keepdim=True)
        ctx.axes, ctx.channel_axis = axes, channel_axis
        if scale is not None:
            ctx.save_for_backward(mean, scale)
        if inplace:
            ctx.mark_dirty(x)
        return add_context(x, mean, scale, channel_axis, inplace)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        (grad,) = gradients
        mean_grad = grad.mean(ctx.axes, keepdim=True)
        if saved := ctx.saved_tensors:  # once: gradient checkpointing gives them away
            return _scaled_backward(ctx, grad, mean_grad, *saved)
        return add_context(grad, mean_grad, None, ctx.channel_axis, False), None, None, None, None


@torch.autograd.function.once_differentiable
def _scaled_backward(ctx: Any, grad: Tensor, mean_grad: Tensor, mean: Tensor, scale: Tensor) -> tuple:
    tokens = grad.numel() // mean_grad.numel()
    others = [axis for axis in range(grad.ndim) if axis != ctx.channel_axis]
    grad_scale = ((mean_grad * mean).sum(others) * tokens).to(scale.dtype)
    return add_context(grad, mean_grad, scale, ctx.channel_axis, False), grad_scale, None, None, None
