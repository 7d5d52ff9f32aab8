"""Partial attention without a stable sort, on rows of tokens, which runtimes hold in one layout only."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers import ChannelMlp, PartialAttention
from ...layers.kernels.dispatch import untouched
from ...models.partialformer import Block
from . import lowers
from .operations import free, split_heads

VECTOR = 16  # numbers that a processor takes at once


@lowers(Block)
class LoweredBlock(Block):
    """(B, H, W, C) -> (B, H, W, C). Of maps runtimes would change the layout between convolutions, norms and sums."""

    @staticmethod
    def fits(block: Any) -> bool:
        """Whether the score is the mean of the tokens, and the MLP works on them alone."""
        mlp = untouched(block.mlp, ChannelMlp) and isinstance(block.mlp.dw, nn.Identity)
        return block.reading == "fitted" and mlp

    def forward(self, x: Tensor) -> Tensor:
        x = self.peg(x)
        B, H, W, C = x.shape
        x = x.reshape(B, H * W, C)
        x = x + self.attn(self.norm1(x), x.mean(-1))
        return self.mlp(self.norm2(x), x).view(B, H, W, C)


@lowers(PartialAttention)
class LoweredPartialAttention(PartialAttention):
    @staticmethod
    def fits(attn: Any) -> bool:
        return untouched(attn.channel_mlp, nn.Sequential) and untouched(attn.channel_mlp[0], nn.Linear)

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        B, N, C = x.shape
        n = self.foreground_count(N)
        token = self.token.expand(B, -1, -1).to(x.dtype)
        # Torch takes a size of 1 for a constant. So where sizes are symbols the abstract token joins the others, as the
        # one with the highest score: then there are two foreground tokens at least.
        joins = free(N)
        if joins:
            x, scores, n = torch.cat([token, x], 1), F.pad(scores, [1, 0], value=float("inf")), n + 1
        index, chosen = choose_foreground(scores, n)
        index = index + x.shape[1] * torch.arange(B, device=x.device)[:, None]  # among the rows of all images
        rows = F.embedding(index, x.flatten(0, 1))
        attended = self.attend(rows if joins else torch.cat([token, rows], 1))  # B 1+n C
        if not self.project_all:
            attended = self.proj(attended)
        out = torch.zeros_like(x)
        if joins or not self.all_foreground(N, n):
            hidden = torch.where(chosen, float("-inf"), 0.0)[:, None]  # B 1 N
            update = self.update_background(self.query_background(attended[:, 0], x, hidden.to(x.dtype)))  # B 1 C
            out = (x if self.background_identity else out) + update
        rows = attended if joins else attended[:, 1:]
        out = out.flatten(0, 1).index_put((index.flatten(),), rows.flatten(0, 1)).view(B, -1, C)
        out = out[:, 1:] if joins else out
        return self.proj(out) if self.project_all else out

    def foreground_count(self, N: int) -> int:
        """How many of N tokens, which may be a symbol, are foreground."""
        n = N * self.foreground[0] // self.foreground[1] if self.foreground[1] else self.foreground[0]
        n = torch.sym_min(n, self.foreground_limit) if self.foreground_limit else n
        return cast(int, torch.sym_max(1, torch.sym_min(n, N - 1 if self.background_required else N)))

    def attend(self, x: Tensor) -> Tensor:
        B, F_, C = x.shape
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        queries, keys, values = split_heads(F.linear(x, self.qkv.weight, bias), 3, self.heads)
        return self.mix_heads(queries, keys.transpose(-2, -1), values).transpose(1, 2).reshape(B, F_, C)

    def mix_heads(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        logits = F.conv2d(queries @ keys, (self.head_up * self.scale)[:, :, None, None])  # B e*h R F
        # Runtimes have the heads side by side there: whole vectors of them are faster than rows of a few tokens.
        if logits.shape[1] % VECTOR == 0:
            weights = logits.permute(0, 2, 3, 1).softmax(2).permute(0, 3, 1, 2)
        else:
            weights = logits.softmax(-1)
        return F.conv2d(weights, self.head_down[:, :, None, None]) @ values

    def query_background(self, query: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
        """Weighted means of x, one for each head, before they become values. -> (B, h, C)."""
        B, _, C = x.shape
        key = self.qkv.weight.view(3, self.heads, -1, C)[1]  # h d C
        probes = (query.view(B, self.heads, 1, -1) @ (key * self.scale)).view(B, self.heads, C)
        return (probes @ x.transpose(1, 2) + hidden).softmax(-1) @ x

    def update_background(self, means: Tensor) -> Tensor:
        """The MLP of the values, of which the first layer and the values are one product. (B, h, C) -> (B, 1, C)."""
        first, C = cast(Any, self.channel_mlp[0]), means.shape[2]
        value = self.qkv.weight.view(3, self.heads, -1, C)[2]  # h d C
        weight = first.weight.view(-1, self.heads, 1, C // self.heads) @ value  # hidden h 1 C
        bias = first.bias + first.weight @ self.v_bias
        return self.channel_mlp[1:](F.linear(means.flatten(1), weight.flatten(1), bias))[:, None]


def choose_foreground(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n highest scores of each row (B, N) without a stable sort; of equals the lower index wins. -> where they are,
    the highest first and equals in any order (B, n); and which of all they are (B, N)."""
    N = scores.shape[1]
    least = scores.topk(n, 1).values.amin(1, keepdim=True)  # B 1
    # Above the least, equal to it, below it, each of them by position: no two whole numbers are equal in any precision.
    place = torch.arange(N, device=scores.device)
    order = torch.where(scores > least, N, torch.where(scores == least, 0, -N)) - place  # B N
    highest = order.topk(n, 1)
    return highest.indices, order >= highest.values.amin(1, keepdim=True)
