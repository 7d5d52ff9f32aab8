"""Folds what inference allows: norms, scales and identities into the layers beside them."""

import torch
from timm.utils import reparameterize_model
from torch import nn

from ..layers import ContextBroadcast
from .description import undescribe


def fuse(model: nn.Module) -> nn.Module:
    """A copy of the model in eval mode with everything folded that inference allows; outputs are equal up to rounding.

    BatchNorms and layer scales go into the layers beside them, and so on for all that has timm's `reparameterize`. The
    result does not load the original's checkpoints.
    """
    fused = reparameterize_model(model).eval()
    before, after = (sum(isinstance(part, ContextBroadcast) for part in one.modules()) for one in (model, fused))
    if before != after:
        lost = f"folding {type(model).__name__} would lose its context broadcasting, which lies inside a layer that is"
        raise ValueError(f"{lost} replaced; broadcast at the branches' 'end', or do without folding")
    fused.requires_grad_(False)
    old, new = model.state_dict(), fused.state_dict()
    if old.keys() != new.keys() or not all(torch.equal(old[name], new[name]) for name in old):
        undescribe(fused, "it was folded for inference (fuse); save the model that was folded, and fold what is loaded")
    return fused
