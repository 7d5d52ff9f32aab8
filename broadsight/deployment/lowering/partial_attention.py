"""Partial attention without a stable sort and without writes by index, which other runtimes lack or are slow at."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layers import PartialAttention
from . import lowers
from .operations import free, split_heads


@lowers(PartialAttention)
class LoweredPartialAttention(PartialAttention):
    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        B, N, C = x.shape
        n = self.foreground_count(N)
        first = N * torch.arange(B, device=x.device)[:, None]  # of each image, among the rows of all
        # Torch takes a size of 1 for a constant. So where sizes are symbols the abstract token joins the others, as the
        # one with the highest score: then there are two foreground tokens at least.
        if free(N):
            index, rank = rank_foreground(F.pad(scores, [1, 0], value=float("inf")), n + 1)
            chosen = F.embedding((index - 1).clamp(min=0) + first, x.flatten(0, 1))  # B 1+n C
            chosen = torch.where(index[..., None] == 0, self.token, chosen)
            rank = (rank[:, 1:] - 1).clamp(min=0)
        else:
            index, rank = rank_foreground(scores, n)
            token = self.token.expand(B, -1, -1).to(x.dtype)
            chosen = torch.cat([token, F.embedding(index + first, x.flatten(0, 1))], 1)
        attended = self.attend(chosen)  # B 1+n C: what ranks 1 to n become
        if not self.project_all:
            attended = self.proj(attended)
        table, background = attended, rank == 0  # B N
        left = free(N) or not self.all_foreground(N, n)
        if left:
            hidden = torch.where(background, 0.0, float("-inf"))[:, None]  # B 1 N
            update = self.channel_mlp(self.query_background(attended[:, 0], x, hidden.to(x.dtype)))  # B 1 C
            place = torch.arange(table.shape[1], device=x.device)[:, None]
            table = torch.where(place == 0, update, attended)  # what rank 0 becomes is the same for all
        first = table.shape[1] * torch.arange(B, device=x.device)[:, None]
        out = F.embedding(rank + first, table.flatten(0, 1))  # B N C
        if self.background_identity and left:
            out = x * background.to(x.dtype)[..., None] + out
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

    def query_background(self, query: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
        B, _, C = x.shape
        h = self.heads
        _, key, value = self.qkv.weight.view(3, h, C // h, C).unbind(0)  # each h d C
        probes = (query.view(B, h, 1, C // h) @ (key * self.scale)).view(B, h, C)
        means = (probes @ x.transpose(1, 2) + hidden).softmax(-1) @ x  # B h C
        return (means[:, :, None] @ value.transpose(1, 2)).view(B, 1, C) + self.v_bias


def rank_foreground(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n highest scores of each row (B, N) without a stable sort; of equals the lower index wins. -> where they are,
    ascending (B, n); and of all (B, N) 1 for the first of them, 2 for the second, ...; 0 for the others."""
    N = scores.shape[1]
    least = scores.topk(n, 1).values.amin(1, keepdim=True)  # B 1
    # Above the least, equal to it, below it, each of them by position: no two are equal, and whole numbers are exact.
    order = torch.sign(scores - least) * N - torch.arange(N, dtype=scores.dtype, device=scores.device)  # B N
    highest = order.topk(n, 1)
    chosen = (order >= highest.values.amin(1, keepdim=True)).long()
    return highest.indices.topk(n, 1, largest=False).values, chosen.cumsum(1) * chosen
