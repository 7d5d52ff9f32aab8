"""STViT's block on channels-first maps: runtimes lay out convolutions as they like best, if all is convolutions."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...layers import ChannelMlp, DepthwiseConv
from ...layers.kernels.dispatch import untouched
from ...models.stvit import Block
from .registry import lowers


@lowers(Block)
class LoweredBlock(Block):
    """(B, H, W, C) -> (B, H, W, C)."""

    @staticmethod
    def fits(block: Any) -> bool:
        """Whether all that works on pixels alone is as it was built, but for norms and scales that were folded."""
        mlp = block.mlp
        plain = (mlp, ChannelMlp), (mlp.fc1, nn.Linear), (mlp.fc2, nn.Linear), (mlp.act, nn.GELU)
        dw = isinstance(mlp.dw, nn.Identity) or untouched(mlp.dw, DepthwiseConv)
        return not block.apart and dw and all(untouched(*pair) for pair in plain)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cpe(x)
        x = self.attn(self.norm1(x).permute(0, 3, 1, 2), x.permute(0, 3, 1, 2))
        mlp = self.mlp
        y = mlp.act(F.conv2d(self.norm2(x), mlp.fc1.weight[:, :, None, None], mlp.fc1.bias))
        if isinstance(mlp.dw, DepthwiseConv):
            y = mlp.dw(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (x + F.conv2d(y, mlp.fc2.weight[:, :, None, None], mlp.fc2.bias)).permute(0, 2, 3, 1)
