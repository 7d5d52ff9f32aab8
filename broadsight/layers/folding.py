"""Folds a BatchNorm with its inference statistics into the layer beside it; what is no BatchNorm is left alone."""

from typing import Any

import torch
from torch import Tensor, nn


def fold_norm_after(module: nn.Module, layer: str, norm: str) -> None:
    """Fold module.norm, which follows the convolution or linear layer module.layer, into it."""
    target, statistics = _pair(module, layer, norm)
    if statistics is not None:
        scale, shift = statistics
        bias = shift if target.bias is None else target.bias * scale + shift
        _replace(target, target.weight * scale.view(-1, *[1] * (target.weight.ndim - 1)), bias)
        setattr(module, norm, nn.Identity())


def fold_norm_before(module: nn.Module, norm: str, layer: str) -> None:
    """Fold module.norm, which precedes the linear layer module.layer, into it; exact as a linear layer pads nothing."""
    target, statistics = _pair(module, layer, norm)
    if statistics is not None:
        scale, shift = statistics
        bias = target.weight @ shift
        _replace(target, target.weight * scale, bias if target.bias is None else target.bias + bias)
        setattr(module, norm, nn.Identity())


def _pair(module: nn.Module, layer: str, norm: str) -> tuple[Any, tuple[Tensor, Tensor] | None]:
    """The layer, and the scale and shift that the norm applies to each channel."""
    statistics = module.get_submodule(norm)
    if not isinstance(statistics, nn.BatchNorm2d):
        return module.get_submodule(layer), None
    mean, variance = statistics.running_mean, statistics.running_var
    assert mean is not None and variance is not None
    scale = statistics.weight * torch.rsqrt(variance + statistics.eps)
    return module.get_submodule(layer), (scale, statistics.bias - mean * scale)


def _replace(layer: Any, weight: Tensor, bias: Tensor) -> None:
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
