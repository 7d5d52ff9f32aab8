"""Context broadcasting (CB): every token is handed the average of all (Hyeon-Woo et al., ICCV 2023)."""

from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from ..errors import check_choice
from .kernels.dispatch import accelerated, per_image
from .kernels.uniform import Uniform, add_context, learns

# Operations for each element of the tokens, as the paper counts them: the average is free.
OPERATIONS = {"cb": 1, "scaled": 1, "gate": 1, "hybrid": 2}
KINDS = tuple(OPERATIONS)


def context_broadcast(
    x: Tensor,
    kind: str = "cb",
    scale: Tensor | None = None,
    channel_axis: int = -1,
    class_token: bool = False,
    inplace: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """The tokens of each image with their context; the shape stays.

    With m the mean of all tokens of an image, and x0 its class token or, without one, m:
    "cb" is (x + m) / 2, "scaled" is x + scale * m, "gate" is x * (x0 + 1), "hybrid" is x * x0 + (x + m) / 2.
    All kinds but "scaled" can be differentiated twice; that can under torch.func.

    Args:
        x: (B, ..., C), or with the channels elsewhere. All axes but these two count tokens.
        scale: (C,), for "scaled".
        inplace: Overwrite x, unless autograd needs it: "gate" and "hybrid" are products with it.
        mask: (B, N), true for the tokens (B, N, C) that m is the mean of, for padded sequences.
    """
    channel_axis = channel_axis % x.ndim
    axes = [axis for axis in range(1, x.ndim) if axis != channel_axis]
    if kind == "scaled" and scale is None:
        raise ValueError("kind='scaled' without a scale; expected one for each channel")
    if mask is None and kind in ("cb", "scaled"):
        return uniform(x, None if kind == "cb" else scale, channel_axis, axes, inplace)
    if class_token and len(axes) > 1:
        raise ValueError(f"a class token in shape {list(x.shape)}; only tokens (B, N, C) have one")
    if mask is not None:
        mean = _mean_of(x, mask)
        if kind in ("cb", "scaled"):
            return add_context(x, mean, scale, channel_axis, False)
    else:
        mean = x.mean(axes, keepdim=True) if kind == "hybrid" or not class_token else x
    first = x.narrow(axes[0], 0, 1) if class_token else mean
    if kind == "hybrid":
        return torch.addcmul(mean * 0.5, x, first + 0.5)
    factor = first + 1
    if inplace and not (torch.is_grad_enabled() and (x.requires_grad or factor.requires_grad)):
        return x.mul_(factor)
    return x * factor


def _mean_of(x: Tensor, mask: Tensor) -> Tensor:
    """The mean of some tokens of each image. (B, N, C), (B, N) -> (B, 1, C)."""
    if x.ndim != 3 or mask.shape[-1] != x.shape[1]:
        raise ValueError(f"a mask of shape {list(mask.shape)} for tokens of {list(x.shape)}; expected (B, N)")
    mask = mask[:, :, None]
    return (x.masked_fill(~mask, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)


@accelerated(lambda _, *given: Uniform.apply(*given), learns)
def uniform(x: Tensor, scale: Tensor | None, channel_axis: int, axes: list[int], inplace: bool) -> Tensor:
    """(x + m) / 2, or x + scale * m, with m the mean over some axes."""
    return add_context(x, x.mean(axes, keepdim=True), scale, channel_axis, inplace)


@register_notrace_module
class ContextBroadcast(nn.Module):
    """One of the four kinds of context broadcasting. Tokens (B, N, C), maps (B, C, H, W) or (B, H, W, C) -> the same.

    Args:
        kind: "cb", "scaled" (a learned scale for each channel, zero at first), "gate" or "hybrid": `context_broadcast`.
        dim: Channels; needed for "scaled".
        channels_last: Whether maps are (B, H, W, C); by default only if `dim` fits the last axis and not the second.
        class_token: Whether the first token is the class token of "gate" and "hybrid", and not the mean; by default
            tokens (B, N, C) have one and maps have none.
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
        check_choice("kind", kind, KINDS)
        if dim is not None and dim < 1:
            raise ValueError(f"dim={dim}; expected the number of channels")
        self.kind, self.dim, self.inplace = kind, dim, inplace
        self.channels_last, self.class_token = channels_last, class_token
        if kind == "scaled" and dim is None:
            raise ValueError("kind='scaled' learns a scale for each channel; pass dim, the number of channels")
        self.scale = nn.Parameter(torch.zeros(dim or 0)) if kind == "scaled" else None

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 3:
            raise ValueError(f"got shape {list(x.shape)}; expected tokens (B, N, C) or maps of four axes")
        return self.broadcast(x, self.channel_axis(x), x.ndim == 3 if self.class_token is None else self.class_token)

    def broadcast(self, x: Tensor, channel_axis: int, class_token: bool) -> Tensor:
        return context_broadcast(x, self.kind, self.scale, channel_axis, class_token, self.inplace)

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


@per_image
def broadcast_input(module: Any, inputs: tuple) -> tuple:
    """A forward pre-hook: the tokens that the module takes first, with context, wherever it takes them."""
    tokens = module.context_broadcast(inputs[0])
    return tuple(tokens if x is inputs[0] else x for x in inputs)


@per_image
def broadcast_output(module: Any, inputs: tuple, output: Any) -> Any:
    """A forward hook: the tokens that the module gives, with context; further outputs stay."""
    broadcast = module.context_broadcast
    return (broadcast(output[0]), *output[1:]) if isinstance(output, tuple) else broadcast(output)
