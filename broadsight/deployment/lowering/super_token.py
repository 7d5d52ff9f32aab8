"""STViT: its block on channels-first maps; super-token attention in few nodes, of no shape that depends on the batch.

Tokens are handed to their neighbours, and collected from them, by one gather each with indices of the grid alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers import ChannelMlp, DepthwiseConv, SuperTokenAttention
from ...layers.kernels.dispatch import untouched
from ...models.stvit import Block
from . import lowers
from .operations import attention, crop_to, pad_to, pointwise, split_heads


@lowers(Block)
class LoweredBlock(Block):
    """(B, H, W, C) -> (B, H, W, C). Runtimes lay out convolutions as they like best, if all is convolutions."""

    @staticmethod
    def fits(block: Any) -> bool:
        """Whether all that works on pixels alone is as it was built, but for norms and scales that were folded."""
        mlp = block.mlp
        plain = (mlp, ChannelMlp), (mlp.fc1, nn.Linear), (mlp.fc2, nn.Linear), (mlp.act, nn.GELU)
        dw = isinstance(mlp.dw, nn.Identity) or untouched(mlp.dw, DepthwiseConv)
        return not block.separate and dw and all(untouched(*pair) for pair in plain)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cpe(x)
        x = self.attn(self.norm1(x).permute(0, 3, 1, 2), x.permute(0, 3, 1, 2))
        mlp = self.mlp
        y = mlp.act(pointwise(self.norm2(x), mlp.fc1))
        if isinstance(mlp.dw, DepthwiseConv):
            y = mlp.dw(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (x + pointwise(y, mlp.fc2)).permute(0, 2, 3, 1)


@lowers(SuperTokenAttention)
class LoweredSuperTokenAttention(SuperTokenAttention):
    """(B, C, H, W) -> (B, C, H, W), added to the residual if there is one."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        _, C, H, W = x.shape
        x = x.permute(0, 2, 3, 1)
        if self.cell == (1, 1):
            y = self.attend_by_head(x.reshape(-1, H * W, C), H, W).transpose(2, 3).reshape(-1, C, H, W)
            if untouched(self.proj, nn.Linear):  # as a convolution, the layout of those around it
                y = pointwise(y, self.proj)
            else:
                y = self.proj(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        else:
            tokens, share, around = sample(x, self.cell, self.iterations, self.scale)
            _, p, q, _ = tokens.shape
            tokens = self.attend_by_head(tokens.flatten(1, 2), p, q).transpose(1, 2).reshape(-1, p, q, C)
            y = spread(self.proj(tokens), share, around, self.cell, H, W).permute(0, 3, 1, 2)
        return y if residual is None else residual + y

    def attend_by_head(self, x: Tensor, p: int, q: int) -> Tensor:
        """Attention among the tokens of a p x q grid, by head and not yet projected. (B, N, C) -> (B, heads, N, d)."""
        qkv = self.qkv(x)
        if self.by_head:
            C = x.shape[2]
            qkv = qkv.view(-1, p * q, self.heads, 3, C // self.heads).transpose(2, 3).reshape(-1, p * q, 3 * C)
        queries, keys, values = split_heads(qkv, 3, self.heads)
        return attention(queries, keys, values, None if self.position is None else self.position(p, q))


def sample(x: Tensor, cell: tuple[int, int], iterations: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, W, C) -> tokens (B, p, q, C), each pixel's share (B*p*q, P, 9) in its nine, where these are (p*q*9)."""
    (h, w), (_, H, W, C) = cell, x.shape
    p, q = (H + h - 1) // h, (W + w - 1) // w
    x = pad_to(x, p * h, q * w)
    pixels = x.unflatten(2, (q, w)).unflatten(1, (p, h)).transpose(2, 3).reshape(-1, h * w, C)  # B*p*q P C
    around = neighbour_index(p, q, x.device)
    back = fold_index(around)
    tokens, share = pixels.mean(1).view(-1, p, q, C), pixels
    for _ in range(iterations):
        nine = gather_neighbours(tokens * scale, around)  # B*p*q 9 C
        share = torch.bmm(pixels, nine.transpose(1, 2)).softmax(2)  # B*p*q P 9
        held = torch.cat([torch.bmm(share.transpose(1, 2), pixels), share.sum(1)[:, :, None]], 2)  # B*p*q 9 C+1
        # Every cell's nine parts, with empty cells around them; each token collects what nine cells hold for it.
        held = F.pad(held.view(-1, p, q, 9 * (C + 1)), [0, 0, 1, 1, 1, 1]).view(-1, (p + 2) * (q + 2) * 9, C + 1)
        folded = held.index_select(1, back).view(-1, 9, C + 1).sum(1)  # B*p*q C+1
        tokens = (folded[:, :C] / (folded[:, C:] + 1e-12)).view(-1, p, q, C)
    return tokens, share, around


def spread(tokens: Tensor, share: Tensor, around: Tensor, cell: tuple[int, int], H: int, W: int) -> Tensor:
    """Every pixel gets the mixture of its nine tokens. (B, p, q, C), (B*p*q, P, 9), (p*q*9) -> (B, H, W, C)."""
    _, p, q, C = tokens.shape
    h, w = cell
    y = torch.bmm(share, gather_neighbours(tokens, around)).view(-1, p, q, h, w, C)
    return crop_to(y.transpose(2, 3).reshape(-1, p * h, q * w, C), H, W)


def gather_neighbours(tokens: Tensor, around: Tensor) -> Tensor:
    """The 3 x 3 tokens around each, zero beyond the border. (B, p, q, C) -> (B*p*q, 9, C)."""
    C = tokens.shape[3]
    return F.pad(tokens, [0, 0, 1, 1, 1, 1]).flatten(1, 2).index_select(1, around).view(-1, 9, C)


def neighbour_index(p: int, q: int, device: torch.device) -> Tensor:
    """Where the 3 x 3 places around each of p x q are, in raster order of a grid with a border. -> (p*q*9)."""
    near = torch.arange(3, device=device)
    rows, columns = (torch.arange(count, device=device)[:, None] + near for count in (p, q))  # p 3, q 3
    return (rows[:, None, :, None] * (q + 2) + columns[:, None]).reshape(-1)


def fold_index(around: Tensor) -> Tensor:
    """Where those nine keep what is meant for the one in their middle, which is to them the opposite neighbour."""
    return (around.view(-1, 9) * 9 + torch.arange(8, -1, -1, device=around.device)).reshape(-1)
