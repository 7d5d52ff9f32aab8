"""Images with values from 0 to 1 -> what a backbone was trained on."""

import torch
from torch import Tensor, nn

from .stages import Stages


class Normalise(nn.Module):
    """(B, C, H, W) or (C, H, W) with values from 0 to 1 -> the same, less the mean and over the deviation."""

    mean: Tensor
    std: Tensor

    def __init__(self, stages: Stages):
        super().__init__()
        # Not in the state dict: they belong to the backbone's description, as its weights do not.
        self.register_buffer("mean", torch.tensor(stages.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(stages.std).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std
