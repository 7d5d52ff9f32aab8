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
        self.values = tuple(stages.mean), tuple(stages.std)
        # Not in the state dict: they belong to the backbone's description, as its weights do not.
        for name, values in zip(("mean", "std"), self.values, strict=True):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def init_non_persistent_buffers(self) -> None:
        """Fill mean and deviation again; see `layers.buffers`."""
        for buffer, values in zip((self.mean, self.std), self.values, strict=True):
            buffer.copy_(torch.tensor(values).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std
