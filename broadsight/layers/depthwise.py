"""Depth-wise convolutions on channels-last maps, with the residual identity inside the kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DepthwiseConv(nn.Conv2d):
    """One k x k filter per channel, k odd, same size out. (B, H, W, C) -> (B, H, W, C).

    With `residual` it is x + conv(x): the identity is added to the kernel's centre, which is exact and saves a pass.
    """

    def __init__(self, dim: int, kernel_size: int = 3, *, bias: bool = True, residual: bool = False):
        super().__init__(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim, bias=bias)
        self.residual = residual

    def kernel(self) -> Tensor:
        """The filter that is applied: (C, 1, k, k), with the identity where the layer is residual."""
        if not self.residual:
            return self.weight
        half = self.kernel_size[0] // 2
        one = torch.ones((1, 1, 1, 1), dtype=self.weight.dtype, device=self.weight.device)
        return self.weight + F.pad(one, [half, half, half, half])

    def forward(self, input: Tensor) -> Tensor:
        x = F.conv2d(input.permute(0, 3, 1, 2), self.kernel(), self.bias, padding=self.padding, groups=self.groups)
        return x.permute(0, 2, 3, 1)

    def reparameterize(self) -> None:
        self.weight, self.residual = nn.Parameter(self.kernel().detach(), requires_grad=False), False
