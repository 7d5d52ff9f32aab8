"""Folds a BatchNorm with its inference statistics into the layer beside it."""

from torch import nn


def fold_norm_after(layer: nn.Linear | nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    """Fold a BatchNorm that follows a layer into it (inference statistics)."""
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    bias = 0.0 if layer.bias is None else layer.bias
    layer.bias = nn.Parameter(((bias - norm.running_mean) * scale + norm.bias).detach(), requires_grad=False)
    weight = layer.weight * scale.view(-1, *[1] * (layer.weight.ndim - 1))
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)


def fold_norm_before(layer: nn.Linear, norm: nn.BatchNorm2d) -> None:
    """Fold a BatchNorm that precedes a linear layer into it; exact because a linear layer pads nothing."""
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    shift = layer.weight @ (norm.bias - norm.running_mean * scale)
    bias = shift if layer.bias is None else layer.bias + shift
    layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    layer.weight = nn.Parameter((layer.weight * scale).detach(), requires_grad=False)
