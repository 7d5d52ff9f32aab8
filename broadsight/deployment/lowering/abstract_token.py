"""MAT's window attention with abstract tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layers import AbstractTokenAttention
from . import lowers
from .operations import attention, crop_to, free, minus_infinity, pad_to, split_heads


@lowers(AbstractTokenAttention)
class LoweredAbstractTokenAttention(AbstractTokenAttention):
    """(B, H, W, C) -> (B, H, W, C), every tensor in the order of its next product: by window, head, pixel."""

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        w = self.window
        p, q = (H + w - 1) // w, (W + w - 1) // w
        open_sizes = free(H, W)
        if open_sizes:
            p, q = p + 1, q + 1  # torch takes a size of 1 for a constant: with spare windows no count is ever 1
        padded = open_sizes or p * w != H or q * w != W
        hidden, unreal = None, None
        if padded:
            valid = self.valid_keys(H, W, p, q, x)  # Nw 1 1 P
            if open_sizes:
                unreal = minus_infinity(~valid.any(-1).view(1, 1, 1, -1), x)
                valid = valid | ~valid.any(-1, keepdim=True)  # a spare window attends to its padding; nobody listens
            hidden = minus_infinity(~valid, x)  # Nw 1 1 P
        x = pad_to(self.qkv(x), p * w, q * w) if padded else x
        # A view of symbolic size would have to prove that it divides.
        whole = not open_sizes
        windows = x.view(B, p, w, q, w, -1).transpose(2, 3).flatten(3, 4).flatten(0, 2) if whole else self.to_windows(x)
        y = self.attend_windows(windows if padded else self.qkv(windows), hidden, unreal, B)
        y = y if padded else self.proj(y)
        y = y.unflatten(1, (w, w)).unflatten(0, (B, p, q)).transpose(2, 3).reshape(B, p * w, q * w, C)
        return self.proj(crop_to(y, H, W)) if padded else y

    def attend_windows(self, qkv: Tensor, hidden: Tensor | None, unreal: Tensor | None, B: int) -> Tensor:
        """Projected windows (B*Nw, P, 3C) -> attended windows (B*Nw, P, C)."""
        windows, P, _ = qkv.shape
        h, C = self.heads, self.dim
        q, k, v = split_heads(qkv, 3, h)  # each B*Nw h P d
        if hidden is not None:
            hidden = hidden.repeat(B, 1, 1, 1)
        if not self.mixing:
            return attention(q, k, v, hidden).transpose(1, 2).reshape(windows, P, C)
        token = self.token
        row = self.qkv(token.reshape(1, C)).view(3, h, 1, -1) if self.token_projected else torch.stack([token] * 3)
        if self.token_is_key:
            k = torch.cat([k, row[1].expand(windows, -1, -1, -1)], 2)
            v = torch.cat([v, row[2].expand(windows, -1, -1, -1)], 2)
            hidden = None if hidden is None else F.pad(hidden, [0, 1])
        local = attention(q, k, v, hidden)  # B*Nw h P d
        summary = attention(row[0], k, v, hidden).reshape(B, -1, C)  # B Nw C
        Nw = summary.shape[1]
        if not free(Nw) and Nw == 1:  # one window alone has one summary, and nothing to choose from
            mixed = self.mix_proj(F.linear(summary, self.mix_qkv.weight[2 * C :], self.mix_qkv.bias[2 * C :]))
            fused = F.linear(mixed, self.fuse_kv.weight[C:], self.fuse_kv.bias[C:])  # B 1 C
            return local.transpose(1, 2).reshape(windows, P, C) + fused
        mixed = attention(*split_heads(self.mix_qkv(summary), 3, h), unreal)  # B h Nw d
        mixed = self.mix_proj(mixed.transpose(1, 2).reshape(B, Nw, C))
        keys, values = split_heads(self.fuse_kv(mixed), 2, h)  # B h Nw d
        fused = attention(q.view(B, Nw, h, P, -1), keys[:, None], values[:, None], unreal)  # B Nw h P d
        return (local + fused.view(local.shape)).transpose(1, 2).reshape(windows, P, C)
