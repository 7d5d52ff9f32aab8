"""Folds a norm with its inference statistics, or a scale, into the layer beside it, unless a hook is between."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from .kernels.dispatch import hooked


def fold_norm(module: nn.Module, first: str, second: str) -> None:
    """Fold a BatchNorm of the module into the layer beside it, which is a linear one if it follows the norm."""
    before, after = cast(Any, module.get_submodule(first)), cast(Any, module.get_submodule(second))
    norm_first = isinstance(before, nn.BatchNorm2d)
    norm, layer = (before, after) if norm_first else (after, before)
    statistics = _inference_statistics(norm) if isinstance(norm, nn.BatchNorm2d) else None
    # A hook may see what the first gives or the second takes, on the way through the modules that hold them.
    paths = first.split("."), second.split(".")
    gives, takes = ([module.get_submodule(".".join(path[: i + 1])) for i in range(len(path))] for path in paths)
    seen = any(m._forward_hooks for m in gives) or any(m._forward_pre_hooks for m in takes)
    if statistics is None or seen:
        return
    scale, shift = statistics
    if norm_first:
        bias = layer.weight @ shift
        _replace(layer, layer.weight * scale, bias if layer.bias is None else layer.bias + bias)
    else:
        bias = shift if layer.bias is None else layer.bias * scale + shift
        _replace(layer, layer.weight * scale.view(-1, *[1] * (layer.weight.ndim - 1)), bias)
    setattr(module, first if norm_first else second, nn.Identity())


def fold_scale_after(module: nn.Module, branch: str, layer: str, scale: str) -> bool:
    """Fold module.scale into branch.layer, the last one before it; whether then no scale or hook follows the branch."""
    inner, last = module.get_submodule(branch), module.get_submodule(f"{branch}.{layer}")
    found: Any = module.get_submodule(scale)
    if hasattr(found, "gamma") and not (hooked(inner) or hooked(last)):
        _replace(last, last.weight * found.gamma[:, None], last.bias * found.gamma)
        setattr(module, scale, nn.Identity())
    return not (hasattr(getattr(module, scale), "gamma") or hooked(inner))


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
    """The weight (out, in) of a product and the shift (out) that replace product and norm in inference, or None."""
    if isinstance(norm, Shift):
        return weight, norm.shift
    statistics = None if norm.training else _inference_statistics(norm)
    return None if statistics is None else (weight * statistics[0][:, None], statistics[1])


def fold_product(module: Any, weight: str, norm: str) -> None:
    """Fold a norm into the weight (out, in) of the product before it, for inference."""
    folded = inference_form(getattr(module, weight), getattr(module, norm))
    if folded is not None:
        setattr(module, weight, nn.Parameter(folded[0].detach(), requires_grad=False))
        setattr(module, norm, Shift(folded[1]))


def _inference_statistics(norm: Any) -> tuple[Tensor, Tensor] | None:
    """The scale and shift of each channel that a norm with running statistics applies."""
    mean, variance = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    if mean is None or variance is None:
        return None
    scale = torch.rsqrt(variance + norm.eps) * norm.weight
    return scale, torch.addcmul(norm.bias, mean, scale, value=-1)
