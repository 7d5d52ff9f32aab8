"""Folds what inference allows: norms, scales and identities into the layers beside them."""

from timm.utils import reparameterize_model
from torch import nn


def fuse(model: nn.Module) -> nn.Module:
    """A copy of the model in eval mode with everything folded that inference allows; outputs are equal up to rounding.

    BatchNorms go into the convolutions and linear layers beside them, residual depth-wise convolutions and layer scales
    into their weights. Works on any timm model through timm's own mechanism: a module that can be folded says so by its
    `reparameterize` method. The result is for inference; it does not load the original's checkpoints.
    """
    fused = reparameterize_model(model).eval()
    for parameter in fused.parameters():
        parameter.requires_grad_(False)
    return fused
