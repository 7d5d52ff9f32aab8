"""Context broadcasting (CB): every token is handed the average of all, so that attention need not learn to be uniform.

From "Scratching Visual Transformer's Back with Uniform Attention" (Hyeon-Woo et al., ICCV 2023). Readings:
docs/context-broadcasting.md.
"""

from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .exported import exporting
from .kernels.slices import runs_eagerly

# Operations for each element of the tokens, as the paper counts them: sums and products there, the average is free.
OPERATIONS = {"cb": 1, "scaled": 1, "gate": 1, "hybrid": 2}
KINDS = tuple(OPERATIONS)


def context_broadcast(
    x: Tensor,
    kind: str = "cb",
    scale: Tensor | None = None,
    channel_axis: int = -1,
    class_token: bool = False,
    inplace: bool = False,
) -> Tensor:
    """The tokens of each image with their context; the shape stays.

    With m the mean of all tokens of an image, and x0 its class token or, without one, m:
    "cb" is (x + m) / 2, "scaled" is x + scale * m, "gate" is x * (x0 + 1), "hybrid" is x * x0 + (x + m) / 2.

    Args:
        x: (B, ..., C), or with the channels elsewhere. All axes but these two count tokens.
        scale: (C,), for "scaled".
        channel_axis: Where the channels are.
        class_token: Whether the first token is the class token.
        inplace: Overwrite x, unless autograd needs it: "gate" and "hybrid" are products with it.

    All kinds but "scaled" can be differentiated twice; that can under torch.func.
    """
    channel_axis = channel_axis % x.ndim
    axes: list[int] = []
    for axis in range(1, x.ndim):
        if axis != channel_axis:
            axes.append(axis)
    if kind != "scaled":
        scale = None
    elif scale is None:
        raise ValueError("kind='scaled' without a scale; expected one for each channel")
    if kind == "cb" or kind == "scaled":
        if not torch.jit.is_scripting() and _learns_eagerly(x, scale):
            return Uniform.apply(x, scale, channel_axis, axes, inplace)
        return _uniform(x, x.mean(axes, keepdim=True), scale, channel_axis, inplace)
    if class_token and len(axes) > 1:
        raise ValueError(f"a class token in shape {list(x.shape)}; only tokens (B, N, C) have one")
    mean = x.mean(axes, keepdim=True) if kind == "hybrid" or not class_token else x
    first = x.narrow(axes[0], 0, 1) if class_token else mean
    if kind == "hybrid":
        return torch.addcmul(mean * 0.5, x, first + 0.5)
    factor = first + 1
    if inplace and not (torch.is_grad_enabled() and (x.requires_grad or factor.requires_grad)):
        return x.mul_(factor)
    return x * factor


def _uniform(x: Tensor, mean: Tensor, scale: Tensor | None, channel_axis: int, inplace: bool) -> Tensor:
    """(x + mean) / 2, or x + scale * mean."""
    if scale is None:
        if exporting():  # a lerp is translated into seven operations
            return (x + mean) * 0.5
        return x.lerp_(mean, 0.5) if inplace else torch.lerp(x, mean, 0.5)
    shape = [1] * x.ndim
    shape[channel_axis] = -1
    added = mean * scale.to(x.dtype).view(shape)
    return x.add_(added) if inplace else x + added


@torch.jit.unused
def _learns_eagerly(x: Tensor, scale: Tensor | None) -> bool:
    learns = x.requires_grad or (scale is not None and scale.requires_grad)
    return torch.is_grad_enabled() and learns and runs_eagerly()


class Uniform(torch.autograd.Function):
    """Uniform attention is its own transpose, so that the gradient takes the same way; autograd would go four times
    over the tokens where two passes will do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, channel_axis: int, axes: list[int], inplace: bool) -> Tensor:
        mean = x.mean(axes, keepdim=True)
        ctx.axes, ctx.channel_axis = axes, channel_axis
        if scale is not None:
            ctx.save_for_backward(mean, scale)
        if inplace:
            ctx.mark_dirty(x)
        return _uniform(x, mean, scale, channel_axis, inplace)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        (grad,) = gradients
        mean_grad = grad.mean(ctx.axes, keepdim=True)
        saved = ctx.saved_tensors  # once: gradient checkpointing gives them away
        if not saved:
            return _uniform(grad, mean_grad, None, ctx.channel_axis, False), None, None, None, None
        return _scaled_backward(ctx, grad, mean_grad, *saved)


@torch.autograd.function.once_differentiable
def _scaled_backward(ctx: Any, grad: Tensor, mean_grad: Tensor, mean: Tensor, scale: Tensor) -> tuple:
    tokens = grad.numel() // mean_grad.numel()
    others = [axis for axis in range(grad.ndim) if axis != ctx.channel_axis]
    grad_scale = ((mean_grad * mean).sum(others) * tokens).to(scale.dtype)
    return _uniform(grad, mean_grad, scale, ctx.channel_axis, False), grad_scale, None, None, None


@register_notrace_module
class ContextBroadcast(nn.Module):
    """One of the four kinds of context broadcasting, for tokens and maps alike; the shape stays.

    Tokens are (B, N, C), maps (B, C, H, W) or (B, H, W, C). A map's channels are found by `dim`, or by `channels_last`
    where that does not tell.

    Args:
        kind: "cb": (x + m) / 2, m the mean token; "scaled": x + scale * m with a learned scale for each channel that is
            zero at first; "gate": x * (x0 + 1), x0 the class token; "hybrid": x * x0 + (x + m) / 2.
        dim: Channels; needed for "scaled".
        channels_last: Whether maps are (B, H, W, C); by default only if `dim` fits the last axis and not the second.
        class_token: Whether the first token is the class token, which "gate" and "hybrid" use; the mean token stands in
            for it otherwise. By default tokens (B, N, C) have one and maps have none.
        inplace: Overwrite the input where autograd allows it.
    """

    def __init__(
        self,
        kind: str = "cb",
        dim: int | None = None,
        *,
        channels_last: bool | None = None,
        class_token: bool | None = None,
        inplace: bool = False,
    ):
        super().__init__()
        if kind not in OPERATIONS:
            raise ValueError(f"kind={kind!r} is not known; choose one of {', '.join(map(repr, KINDS))}")
        if dim is not None and dim < 1:
            raise ValueError(f"dim={dim}; expected the number of channels")
        self.kind, self.dim, self.channels_last, self.class_token = kind, dim, channels_last, class_token
        self.inplace = inplace
        if kind == "scaled":
            if dim is None:
                raise ValueError("kind='scaled' learns a scale for each channel; pass dim, the number of channels")
            self.scale = nn.Parameter(torch.zeros(dim))
        else:
            self.register_parameter("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 3:
            raise ValueError(f"got shape {list(x.shape)}; expected tokens (B, N, C) or maps of four axes")
        axis = self.channel_axis(x)
        class_token = self.class_token
        if class_token is None:
            class_token = x.ndim == 3
        return context_broadcast(x, self.kind, self.scale, axis, class_token, self.inplace)

    def channel_axis(self, x: Tensor) -> int:
        dim, channels_last = self.dim, self.channels_last
        if channels_last is None:
            channels_last = x.ndim == 3 or (dim is not None and x.shape[1] != dim and x.shape[-1] == dim)
        axis = x.ndim - 1 if channels_last else 1
        if dim is not None and x.shape[axis] != dim:
            raise ValueError(f"got shape {list(x.shape)}; expected {dim} channels on axis {axis}")
        return axis

    def extra_repr(self) -> str:
        return repr(self.kind) if self.dim is None else f"{self.kind!r}, dim={self.dim}"
