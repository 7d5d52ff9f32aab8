"""Folds what inference allows: norms, scales and identities into the layers beside them."""

import torch
from timm.utils import reparameterize_model
from torch import nn

from ..layers import ContextBroadcast
from .description import undescribe


def fuse(model: nn.Module) -> nn.Module:
    """A copy of the model in eval mode with everything folded that inference allows; outputs are equal up to rounding.

    BatchNorms go into the convolutions and linear layers beside them, residual depth-wise convolutions and layer scales
    into their weights. Works on any timm model through timm's own mechanism: a module that can be folded says so by its
    `reparameterize` method. The result is for inference; it does not load the original's checkpoints.
    """
    fused = reparameterize_model(model).eval()
    if _broadcasts(fused) != _broadcasts(model):
        raise ValueError(
            f"folding {type(model).__name__} would lose its context broadcasting, which lies inside a layer that is "
            "replaced; broadcast at the branches' 'end', or do without folding"
        )
    for parameter in fused.parameters():
        parameter.requires_grad_(False)
    if _folded(model, fused):
        undescribe(fused, "it was folded for inference (fuse); save the model that was folded, and fold what is loaded")
    return fused


def _folded(model: nn.Module, fused: nn.Module) -> bool:
    """Whether the weights of a model are others after folding."""
    before, after = model.state_dict(), fused.state_dict()
    return before.keys() != after.keys() or not all(torch.equal(before[name], after[name]) for name in before)


def _broadcasts(model: nn.Module) -> int:
    return sum(isinstance(module, ContextBroadcast) for module in model.modules())
