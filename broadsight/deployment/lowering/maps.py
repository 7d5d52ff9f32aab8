"""Blocks of maps (B, H, W, C) whose depth-wise convolutions and linear layers share one layout: MAT's, and its head."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...layers import ChannelMlp, DepthwiseConv
from ...layers.kernels.dispatch import untouched
from ...models._backbone import ProjectedHead
from ...models.mat import Block
from . import lowers
from .operations import free, pointwise


@lowers(ChannelMlp)
class LoweredChannelMlp(ChannelMlp):
    """(B, H, W, C) -> (B, H, W, C), as convolutions alone."""

    @staticmethod
    def fits(mlp: ChannelMlp) -> bool:
        kinds = (mlp.fc1, nn.Linear), (mlp.dw, DepthwiseConv), (mlp.fc2, nn.Linear)
        return mlp.depthwise == "before" and all(untouched(layer, kind) for layer, kind in kinds)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = pointwise(x.permute(0, 3, 1, 2), self.fc1)
        dw: Any = self.dw
        x = F.conv2d(x, dw.kernel(), dw.bias, padding=dw.padding, groups=dw.groups)
        x = pointwise(self.act(x), self.fc2).permute(0, 2, 3, 1)
        return x if residual is None else add_tokens(residual, x)


@lowers(Block)
class LoweredBlock(Block):
    """(B, H, W, C) -> (B, H, W, C). Norms and sums are of tokens (B, N, C): those of maps OpenVINO takes apart, in a
    layout that no neighbour has."""

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        if free(*shape[1:3]):
            return super().forward(x)
        if self.mixes:
            x = self.cpe(x)
            x = add_tokens(x, self.attn(self.norm1(x.flatten(1, 2)).view(shape)))
        return self.mlp(self.norm2(x.flatten(1, 2)).view(shape), x)


@lowers(ProjectedHead)
class LoweredProjectedHead(ProjectedHead):
    """A classifier whose norm is folded: the mean over all positions as it meets them, channels last."""

    @staticmethod
    def fits(head: ProjectedHead) -> bool:
        return head.global_pool.pool_type == "avg" and type(head.norm) is nn.Identity and not head.pool_first

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.drop(self.act(self.proj(x.permute(0, 2, 3, 1))).mean((1, 2)))
        return x if pre_logits else self.fc(x)


def add_tokens(x: Tensor, y: Tensor) -> Tensor:
    """The sum of two maps (B, H, W, C), as tokens where it is known how many."""
    return x + y if free(*x.shape[1:3]) else (x.flatten(1, 2) + y.flatten(1, 2)).view(x.shape)
