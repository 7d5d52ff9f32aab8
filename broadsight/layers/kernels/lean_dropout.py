"""Dropout that keeps a byte for each element until the backward pass, not a number."""

import torch
from torch import Tensor, nn


class LeanDropout(nn.Dropout):
    """nn.Dropout. On the CPU torch keeps the noise as numbers there, though it has an operator that keeps a mask."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.p:
            return input
        return torch.native_dropout(input, self.p, True)[0]
