"""Layers of several groups that share no weights, each computed for all groups in one product."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.products import group_product


class GroupLinear(nn.Module):
    """A linear layer for each group. (G, N, in_features) -> (G, N, out_features).

    The bias is one row of G * out_features numbers, so that whoever exempts vectors from weight decay exempts it.
    """

    def __init__(self, groups: int, in_features: int, out_features: int):
        super().__init__()
        self.groups, self.out_features = groups, out_features
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(groups * out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return group_product(x, self.weight, self.bias.view(self.groups, 1, self.out_features), scale)

    @torch.no_grad()
    def take_in(self, scale: Tensor, shift: Tensor) -> None:
        """Absorb `x * scale + shift`, which preceded this layer; scale and shift are (G, 1, in_features)."""
        self.bias += torch.bmm(self.weight, shift.mT).flatten()
        self.weight *= scale


class GroupLayerNorm(nn.Module):
    """LayerNorm over the last axis with a scale and shift for each group. (G, ..., dim) -> (G, ..., dim)."""

    def __init__(self, groups: int, dim: int, eps: float):
        super().__init__()
        self.groups, self.dim, self.eps = groups, dim, eps
        self.weight, self.bias = nn.Parameter(torch.empty(groups * dim)), nn.Parameter(torch.empty(groups * dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Each (G, 1, dim)."""
        return self.weight.view(self.groups, 1, self.dim), self.bias.view(self.groups, 1, self.dim)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.scale_and_shift()
        normed = F.layer_norm(x, (self.dim,), eps=self.eps)
        return torch.addcmul(shift, normed.flatten(1, -2), scale).view(normed.shape)


class LeanDropout(nn.Dropout):
    """nn.Dropout. On the CPU torch keeps the noise as numbers there, though it has an operator that keeps a mask."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.native_dropout(input, self.p, True)[0] if self.training and self.p else input


class GroupMlp(nn.Module):
    """Two linear layers with ReLU between them, each cut into channel groups. (G, N, dim) -> (G, N, dim).

    In between, channel e is dealt to block e mod channel_groups: every block then sees every one of the first layer.
    """

    def __init__(self, groups: int, dim: int, hidden: int, channel_groups: int = 1, drop: float = 0.0):
        super().__init__()
        self.channel_groups = channel_groups
        self.fc1 = GroupLinear(groups * channel_groups, dim // channel_groups, hidden // channel_groups)
        self.fc2 = GroupLinear(groups * channel_groups, hidden // channel_groups, dim // channel_groups)
        self.drop = LeanDropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        (G, N, D), K = x.shape, self.channel_groups
        x = x.view(G, N, K, D // K).transpose(1, 2).reshape(G * K, N, D // K)
        x = self.drop(F.relu(self.fc1(x)))  # GK N hidden/K
        if K > 1:
            x = x.view(G, K, N, -1)
            if x.shape[-1] % K == 0:  # the last axis deals the cards
                x = x.unflatten(-1, (-1, K)).permute(0, 4, 2, 1, 3)  # G K N K' hidden/K/K
            else:
                x = x.transpose(1, 2).reshape(G, N, -1, K).permute(0, 3, 1, 2)
            x = x.reshape(G * K, N, -1)
        return self.fc2(x).view(G, K, N, D // K).transpose(1, 2).reshape(G, N, D)
