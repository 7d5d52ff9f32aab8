"""MAT's window attention with abstract tokens."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers import AbstractTokenAttention
from ...layers.kernels.dispatch import untouched
from . import lowers
from .operations import attention, crop_to, free, minus_infinity, pad_to, split_heads


@lowers(AbstractTokenAttention)
class LoweredAbstractTokenAttention(AbstractTokenAttention):
    """(B, H, W, C) -> (B, H, W, C). The abstract token is one more query of each window."""

    scaled = False  # whether the projections give queries that are scaled already

    @torch.no_grad()
    def settle(self) -> None:
        """Scale queries in the projections that make them, and let one product follow the mixing instead of two."""
        layers = (self.qkv, self.mix_qkv, self.mix_proj, self.fuse_kv) if self.mixing else (self.qkv,)
        if not all(untouched(layer, nn.Linear) for layer in layers):
            return
        self.scaled, C = True, self.dim
        for layer in layers[:2]:
            scale = torch.ones_like(layer.bias)
            scale[:C] = (C // self.heads) ** -0.5
            layer.weight = nn.Parameter(layer.weight * scale[:, None], requires_grad=False)
            layer.bias = nn.Parameter(layer.bias * scale, requires_grad=False)
        if self.mixing:
            then, first = self.fuse_kv, cast(nn.Linear, self.mix_proj)
            then.bias = nn.Parameter(then(first.bias), requires_grad=False)
            then.weight = nn.Parameter(then.weight @ first.weight, requires_grad=False)
            self.mix_proj = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        open_sizes = free(H, W)
        h, w = (self.window, self.window) if open_sizes else (min(self.window, H), min(self.window, W))
        p, q = (H + h - 1) // h, (W + w - 1) // w
        if open_sizes:
            p, q = p + 1, q + 1  # torch takes a size of 1 for a constant: with spare windows no count is ever 1
        hidden, unreal = None, None
        if open_sizes or (p * h, q * w) != (H, W):
            row, column = torch.arange(h, device=x.device), torch.arange(w, device=x.device)
            rows = torch.arange(p, device=x.device)[:, None] * h + row < H  # p h
            columns = torch.arange(q, device=x.device)[:, None] * w + column < W  # q w
            valid = (rows[:, None, :, None] & columns[:, None]).flatten(2).flatten(0, 1)[:, None, None]  # Nw 1 1 P
            if open_sizes:
                unreal = minus_infinity(~valid.any(-1).view(1, 1, 1, -1), x)
                valid = valid | ~valid.any(-1, keepdim=True)  # a spare window attends to its padding; nobody listens
            hidden = minus_infinity(~valid, x)
        x = pad_to(self.qkv(x), p * h, q * w)
        # A view of symbolic size would have to prove that it divides.
        windows = (
            self.to_windows(x) if open_sizes else x.view(B, p, h, q, w, -1).transpose(2, 3).reshape(-1, h * w, 3 * C)
        )
        y = self.attend_windows(windows, hidden, unreal, B)
        y = y.unflatten(1, (h, w)).unflatten(0, (B, p, q)).transpose(2, 3).reshape(B, p * h, q * w, C)
        return self.proj(crop_to(y, H, W))

    def attend_windows(self, qkv: Tensor, hidden: Tensor | None, unreal: Tensor | None, B: int) -> Tensor:
        """Projected windows (B*Nw, P, 3C) -> attended windows (B*Nw, P, C)."""
        windows, P, _ = qkv.shape
        h, C = self.heads, self.dim
        q, k, v = (one.unflatten(-1, (h, -1)) for one in qkv.chunk(3, -1))  # each B*Nw P h d
        if hidden is not None:
            hidden = hidden.repeat(B, 1, 1, 1)
        if not self.mixing:
            return self.attend_tokens(q, k, v, hidden)
        token = self.token
        row = (self.qkv(token.view(1, C)) if self.token_projected else token.view(1, C).repeat(1, 3)).view(
            3, 1, 1, h, -1
        )
        row = row.expand(-1, windows, -1, -1, -1)  # 3 B*Nw 1 h d
        if self.token_is_key:
            k, v = torch.cat([k, row[1]], 1), torch.cat([v, row[2]], 1)
            hidden = None if hidden is None else F.pad(hidden, [0, 1])
        query = row[0] * (C // h) ** -0.5 if self.scaled and not self.token_projected else row[0]
        found = self.attend_tokens(torch.cat([q, query], 1), k, v, hidden)  # B*Nw P+1 C
        local, summary = found[:, :P], found[:, P:].reshape(B, -1, C)
        Nw = summary.shape[1]
        if not free(Nw) and Nw == 1:  # one window alone has one summary, and nothing to choose from
            mixed = self.mix_proj(F.linear(summary, self.mix_qkv.weight[2 * C :], self.mix_qkv.bias[2 * C :]))
            return local + F.linear(mixed, self.fuse_kv.weight[C:], self.fuse_kv.bias[C:])
        mixed = attention(*split_heads(self.mix_qkv(summary), 3, h), unreal, scaled=self.scaled)  # B h Nw d
        mixed = self.mix_proj(mixed.transpose(1, 2).reshape(B, Nw, C))
        keys, values = (one.unflatten(-1, (h, -1)) for one in self.fuse_kv(mixed).chunk(2, -1))  # B Nw h d
        fused = self.attend_tokens(q.reshape(B, -1, h, C // h), keys, values, unreal)  # B Nw*P C
        return local + fused.reshape(local.shape)

    def attend_tokens(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        """(B, N, h, d), (B, M, h, d), (B, M, h, d) -> (B, N, C); runtimes transpose as they multiply."""
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return attention(q, k, v, hidden, scaled=self.scaled).transpose(1, 2).flatten(2)
