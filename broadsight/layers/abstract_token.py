"""Window attention with abstract tokens: a learned query sums up each window, the summaries are mixed globally."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .any_size import crop_to, join_cells, pad_to, split_cells


@register_notrace_module
class AbstractTokenAttention(nn.Module):
    """Mixing abstract tokens (MAT), or plain window attention. (B, H, W, C) -> (B, H, W, C).

    Inside each window every pixel attends to the window's pixels, and so does one learned query, the abstract token,
    whose result sums up the window. The summaries attend to each other, and every pixel then attends to all of them
    with the query it already has. Any H and W: partial windows are padded and the padding is masked as keys.

    Args:
        dim: Channels in and out.
        heads: Attention heads, the same in all three attentions.
        window: Side of a window in pixels.
        mixing: False leaves the abstract tokens out: plain window attention.
        token_is_key: The abstract token is also a key and a value of its window.
        token_projected: The abstract token passes through the query, key and value projections like a pixel.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int = 7,
        *,
        mixing: bool = True,
        token_is_key: bool = False,
        token_projected: bool = False,
    ):
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} does not split into heads={heads}; choose a divisor of dim")
        if window < 1:
            raise ValueError(f"window={window} is not a side of at least 1 pixel")
        self.dim, self.heads, self.window, self.mixing = dim, heads, window, mixing
        self.token_is_key, self.token_projected = token_is_key, token_projected
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        if mixing:
            self.token = nn.Parameter(torch.zeros(heads, 1, dim // heads))
            self.mix_qkv = nn.Linear(dim, 3 * dim)
            self.mix_proj = nn.Linear(dim, dim)
            self.fuse_kv = nn.Linear(dim, 2 * dim)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.mixing:
            nn.init.trunc_normal_(self.token, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        w = self.window
        p, q = (H + w - 1) // w, (W + w - 1) // w
        if p * w != H or q * w != W:
            # Padding after the projection spares the padded pixels two matrix products.
            qkv = self.to_windows(pad_to(self.qkv(x), p * w, q * w))
            keys = self.valid_keys(H, W, p, q, x)  # Nw 1 1 P
            return self.proj(crop_to(self.from_windows(self.attend(qkv, keys.repeat(B, 1, 1, 1), B), B, p, q), H, W))
        y = self.attend(self.qkv(self.to_windows(x)), None, B)
        return self.from_windows(self.proj(y), B, p, q)

    def attend(self, qkv: Tensor, mask: Tensor | None, B: int) -> Tensor:
        """Projected windows (B*Nw, P, 3C) -> attended windows (B*Nw, P, C).

        Every attention runs on strided views of the projections: 4-D, nothing permuted in memory. mask (B*Nw, 1, 1, P)
        says which keys lie inside the map.
        """
        windows, P, _ = qkv.shape
        h, d = self.heads, self.dim // self.heads
        parts = qkv.view(windows, P, 3, h, d).permute(2, 0, 3, 1, 4)  # 3 B*Nw h P d
        q, k, v = parts[0], parts[1], parts[2]
        if not self.mixing:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(windows, P, self.dim)
        token = self.token[None].expand(windows, -1, -1, -1)  # B*Nw h 1 d
        if self.token_projected:
            row = self.qkv(self.token.reshape(1, self.dim)).view(3, 1, h, 1, d).expand(-1, windows, -1, -1, -1)
        else:
            row = torch.stack([token, token, token])
        if self.token_is_key:
            k, v = torch.cat([k, row[1]], 2), torch.cat([v, row[2]], 2)
            mask = None if mask is None else F.pad(mask, [0, 1], value=True)
        local = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # B*Nw h P d
        summary = F.scaled_dot_product_attention(row[0], k, v, attn_mask=mask)  # B*Nw h 1 d
        summary = summary.transpose(1, 2).reshape(B, windows // B, self.dim)  # B Nw C
        queries = qkv.view(B, -1, 3, h, d)[:, :, 0].transpose(1, 2)  # B h Nw*P d
        fused = self.hand_back(queries, self.mix(summary)).transpose(1, 2).reshape(windows, P, self.dim)
        return local.transpose(1, 2).reshape(windows, P, self.dim) + fused

    def mix(self, summary: Tensor) -> Tensor:
        """Self-attention among the windows' summaries. (B, Nw, C) -> (B, Nw, C)."""
        B, Nw, C = summary.shape
        qkv = self.mix_qkv(summary).view(B, Nw, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)  # 3 B h Nw d
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return self.mix_proj(mixed.transpose(1, 2).reshape(B, Nw, C))

    def hand_back(self, queries: Tensor, mixed: Tensor) -> Tensor:
        """Every pixel's query (B, h, N, d) attends to all mixed summaries (B, Nw, C). -> (B, h, N, d)."""
        B, Nw, C = mixed.shape
        kv = self.fuse_kv(mixed).view(B, Nw, 2, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)  # 2 B h Nw d
        return F.scaled_dot_product_attention(queries, kv[0], kv[1])

    def to_windows(self, x: Tensor) -> Tensor:
        """(B, p*w, q*w, C) -> (B*p*q, w*w, C), windows and pixels in raster order."""
        return split_cells(x, self.window, self.window).flatten(3, 4).flatten(0, 2)

    def from_windows(self, x: Tensor, B: int, p: int, q: int) -> Tensor:
        return join_cells(x.unflatten(1, (self.window, self.window)).unflatten(0, (B, p, q)))

    def valid_keys(self, H: int, W: int, p: int, q: int, like: Tensor) -> Tensor:
        """Which pixels of each window lie inside the map: (Nw, 1, 1, P)."""
        pixel = torch.arange(self.window, device=like.device)
        rows = torch.arange(p, device=like.device)[:, None] * self.window + pixel < H  # p w
        columns = torch.arange(q, device=like.device)[:, None] * self.window + pixel < W  # q w
        return (rows[:, None, :, None] & columns[:, None]).flatten(2, 3).flatten(0, 1)[:, None, None]
