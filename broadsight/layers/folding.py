"""Folds a BatchNorm with its inference statistics into the layer beside it.

What is no BatchNorm is left alone, and what has something in between: a hook may change what passes there.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .kernels.dispatch import hooked


def fold_norm_after(module: nn.Module, layer: str, norm: str) -> None:
    """Fold module.norm, which follows the convolution or linear layer module.layer, into it."""
    target, statistics = _pair(module, layer, norm)
    if statistics is not None and not _hooked_between(module, layer, norm):
        scale, shift = statistics
        bias = shift if target.bias is None else target.bias * scale + shift
        _replace(target, target.weight * scale.view(-1, *[1] * (target.weight.ndim - 1)), bias)
        setattr(module, norm, nn.Identity())


def fold_norm_before(module: nn.Module, norm: str, layer: str) -> None:
    """Fold module.norm, which precedes the linear layer module.layer, into it; exact as a linear layer pads nothing."""
    target, statistics = _pair(module, layer, norm)
    if statistics is not None and not _hooked_between(module, norm, layer):
        scale, shift = statistics
        bias = target.weight @ shift
        _replace(target, target.weight * scale, bias if target.bias is None else target.bias + bias)
        setattr(module, norm, nn.Identity())


def fold_scale_after(module: nn.Module, branch: str, layer: str, scale: str) -> bool:
    """Fold the layer scale module.scale, which follows the branch whose last layer is branch.layer, into that layer.

    Returns whether no scale is left between the branch and the residual, and no hook sees what the branch gives.
    """
    inner, last = module.get_submodule(branch), module.get_submodule(f"{branch}.{layer}")
    found: Any = module.get_submodule(scale)
    if hasattr(found, "gamma") and not (hooked(inner) or hooked(last)):
        _replace(last, last.weight * found.gamma[:, None], last.bias * found.gamma)
        setattr(module, scale, nn.Identity())
    return not (hasattr(getattr(module, scale), "gamma") or hooked(inner))


def as_built(module: nn.Module) -> bool:
    """Whether no module inside has a hook, so that a folded form may take its place."""
    return not any(hooked(inner) for inner in module.modules())


def _pair(module: nn.Module, layer: str, norm: str) -> tuple[Any, tuple[Tensor, Tensor] | None]:
    """The layer, and the scale and shift that the norm applies to each channel."""
    found = module.get_submodule(norm)
    return module.get_submodule(layer), _inference_statistics(found) if isinstance(found, nn.BatchNorm2d) else None


def _hooked_between(module: nn.Module, first: str, second: str) -> bool:
    """Whether a hook sees what the first gives or the second takes, on the way through the modules that hold them."""
    paths = first.split("."), second.split(".")
    gives, takes = ([module.get_submodule(".".join(path[: i + 1])) for i in range(len(path))] for path in paths)
    return any(m._forward_hooks for m in gives) or any(m._forward_pre_hooks for m in takes)


def _replace(layer: Any, weight: Tensor, bias: Tensor) -> None:
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    layer.bias = nn.Parameter(bias.detach(), requires_grad=False)


class Shift(nn.Module):
    """What is left of a BatchNorm whose scale went into the layer before it."""

    def __init__(self, shift: Tensor):
        super().__init__()
        self.shift = nn.Parameter(shift.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def inference_form(weight: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor] | None:
    """The weight (out, in) of a product and the shift (out) that replace product and norm together in inference.

    None if the norm must be run, in training above all.
    """
    if isinstance(norm, Shift):
        return weight, norm.shift
    statistics = None if norm.training else _inference_statistics(norm)
    return None if statistics is None else (weight * statistics[0][:, None], statistics[1])


def _inference_statistics(norm: Any) -> tuple[Tensor, Tensor] | None:
    """The scale and shift of each channel that a norm with running statistics applies."""
    mean, variance = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    if mean is None or variance is None:
        return None
    scale = torch.rsqrt(variance + norm.eps) * norm.weight
    return scale, torch.addcmul(norm.bias, mean, scale, value=-1)
