"""Window attention with abstract tokens: a learned query sums up each window, the summaries are mixed globally."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .any_size import attention, join_cells, join_heads, pad_to, split_cells, split_heads
from .checks import check_divides, check_reading
from .kernels.dispatch import accelerated
from .kernels.window_attention import attend_map, attend_windows, suits_map, suits_windows


@register_notrace_module
class AbstractTokenAttention(nn.Module):
    """Mixing abstract tokens (MAT), or plain window attention. (B, H, W, C) -> (B, H, W, C).

    Inside each window every pixel attends to the window's pixels, and so does one learned query, the abstract token,
    whose result sums up the window. The summaries attend to each other, and every pixel then attends to all of them
    with the query it already has. Any H and W: windows are never larger than the map, and partial ones
    beside whole ones are padded, the padding masked as keys.

    Args:
        dim, heads, window: Channels; heads of all three attentions; side of a window in pixels.
        mixing: False leaves the abstract tokens out: plain window attention.
        reading: "fitted": the abstract token is a query alone, learned in the space of the queries; "equations": it
            joins the pixels of its window before the projection, and w*w + 1 tokens attend to w*w + 1 (Eq. 4.2).
        token_is_key: The abstract token is also a key and a value of its window; None: as the reading has it.
        token_projected: The abstract token passes through the query, key and value projections like a pixel; likewise.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int = 7,
        *,
        mixing: bool = True,
        reading: str = "fitted",
        token_is_key: bool | None = None,
        token_projected: bool | None = None,
    ):
        super().__init__()
        check_divides("dim", dim, "heads", heads)
        check_reading(reading)
        if window < 1:
            raise ValueError(f"window={window} is not a side of at least 1 pixel")
        self.dim, self.heads, self.window, self.mixing = dim, heads, window, mixing
        merged = reading == "equations"
        self.token_is_key = merged if token_is_key is None else token_is_key
        self.token_projected = merged if token_projected is None else token_projected
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        if mixing:
            self.token = nn.Parameter(torch.zeros(heads, 1, dim // heads))
            self.mix_qkv, self.mix_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.fuse_kv = nn.Linear(dim, 2 * dim)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.mixing:
            nn.init.trunc_normal_(self.token, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, _ = x.shape
        h, w = sides = self.sides(H, W)
        p, q = (H + h - 1) // h, (W + w - 1) // w
        if (p * h, q * w) == (H, W):
            y = self.attend(self.qkv(self.to_windows(x, sides)), None, B)
            return self.from_windows(self.proj(y), B, p, q, sides)
        # Padding after the projection spares the padded pixels two matrix products.
        return self.proj(self.attend_map(self.qkv(x)))

    @accelerated(attend_map, suits_map, hides=True)
    def attend_map(self, qkv: Tensor) -> Tensor:
        """Projected pixels (B, H, W, 3C), the partial windows padded meanwhile -> (B, H, W, C)."""
        B, H, W, _ = qkv.shape
        h, w = sides = self.sides(H, W)
        p, q = (H + h - 1) // h, (W + w - 1) // w
        mask = self.valid_keys(H, W, p, q, qkv, sides).repeat(B, 1, 1, 1)
        y = self.attend(self.to_windows(pad_to(qkv, p * h, q * w), sides), mask, B)
        return self.from_windows(y, B, p, q, sides)[:, :H, :W]

    @accelerated(attend_windows, suits_windows, hides=True)
    def attend(self, qkv: Tensor, mask: Tensor | None, B: int) -> Tensor:
        """Projected windows (B*Nw, P, 3C), and which keys lie inside the map (B*Nw, 1, 1, P) -> (B*Nw, P, C).

        Every attention runs on strided views of the projections: 4-D, nothing permuted in memory.
        """
        q, k, v = split_heads(qkv, 3, self.heads)  # each B*Nw h P d
        if not self.mixing:
            return join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        row = self.token_rows()[:, None].expand(-1, qkv.shape[0], -1, -1, -1)  # 3 B*Nw h 1 d
        if self.token_is_key:
            k, v = torch.cat([k, row[1]], 2), torch.cat([v, row[2]], 2)
            mask = None if mask is None else F.pad(mask, [0, 1], value=True)
        local = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # B*Nw h P d
        summary = F.scaled_dot_product_attention(row[0], k, v, attn_mask=mask)  # B*Nw h 1 d
        q = split_heads(qkv.view(B, -1, 3 * self.dim), 3, self.heads)[0]  # B h Nw*P d
        k, v = split_heads(self.mix(join_heads(summary).reshape(B, -1, self.dim)), 2, self.heads)  # each B h Nw d
        local = join_heads(local)
        return local + join_heads(F.scaled_dot_product_attention(q, k, v)).reshape(local.shape)

    def token_rows(self) -> Tensor:
        """The abstract token as a query, a key and a value: (3, h, 1, d)."""
        token = self.token
        return (
            self.qkv(token.view(1, -1)).view(3, *token.shape) if self.token_projected else token.expand(3, -1, -1, -1)
        )

    def mix(self, summary: Tensor) -> Tensor:
        """The windows' summaries (B, Nw, C) attend to each other. -> keys and values for all pixels (B, Nw, 2C)."""
        q, k, v = split_heads(self.mix_qkv(summary), 3, self.heads)  # each B h Nw d
        return self.fuse_kv(self.mix_proj(join_heads(attention(q, k, v))))

    def sides(self, H: int, W: int) -> tuple[int, int]:
        """Height and width of the windows of a map, never larger than the map itself."""
        return min(self.window, H), min(self.window, W)

    def to_windows(self, x: Tensor, sides: tuple[int, int] | None = None) -> Tensor:
        """(B, p*h, q*w, C) -> (B*p*q, h*w, C), windows and pixels in raster order. sides: h, w, if not `window`."""
        return split_cells(x, *(sides or (self.window, self.window))).flatten(3, 4).flatten(0, 2)

    def from_windows(self, x: Tensor, B: int, p: int, q: int, sides: tuple[int, int] | None = None) -> Tensor:
        return join_cells(x.unflatten(1, sides or (self.window, self.window)).unflatten(0, (B, p, q)))

    def valid_keys(self, H: int, W: int, p: int, q: int, like: Tensor, sides: tuple[int, int] | None = None) -> Tensor:
        """Which pixels of each window lie inside the map: (Nw, 1, 1, P)."""
        h, w = sides or (self.window, self.window)
        rows, columns = (torch.arange(n, device=like.device) for n in (p * h, q * w))
        inside = (rows < H).view(p, 1, h, 1) & (columns < W).view(1, q, 1, w)
        return inside.flatten(2).flatten(0, 1)[:, None, None]
