"""Super-token attention: attend among pooled tokens, then hand the answer back to every pixel."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .any_size import attention
from .checks import check_divides, check_reading
from .kernels.dispatch import accelerated, untouched
from .kernels.super_token import is_linear, linear_sampling
from .sampling import autocast, grid_of, sample, spread, to_cells


@register_notrace_module
class SuperTokenAttention(nn.Module):
    """Pool, associate, attend, scatter back (Huang et al., CVPR 2023). (B, C, H, W) -> (B, C, H, W).

    Every cell of pixels seeds one super token. Each pixel belongs, by a soft-max, to the 3 x 3 super tokens around its
    cell; these become the weighted means of their pixels, attend to each other, and every pixel receives the mixture
    of its nine. Super tokens beyond the border are zero and keep their share. Any H and W; the memory format stays.

    Args:
        dim, heads: Channels in and out, and heads of the attention among super tokens.
        cell: Side, or (height, width), in pixels of the cell that seeds one super token; 1 is plain attention.
        iterations: How often the association is refined.
        qkv_bias: Bias of the query, key and value projections.
        relative_grid: (height, width) of the grid that a relative position bias is learned for; others resize it.
        reading: "fitted", as released: the association is constant to the gradient; "equations": it is differentiated,
            as Algorithm 1 reads. Values are equal.
    """

    def __init__(
        self,
        dim: int,
        cell: int | tuple[int, int],
        heads: int,
        iterations: int = 1,
        qkv_bias: bool = True,
        relative_grid: tuple[int, int] | None = None,
        reading: str = "fitted",
    ):
        super().__init__()
        cell = (cell, cell) if isinstance(cell, int) else tuple(cell)
        check_divides("dim", dim, "heads", heads)
        check_reading(reading)
        if len(cell) != 2 or min(cell) < 1:
            raise ValueError(f"cell={cell} is not a side or (height, width) of at least 1 pixel")
        if iterations < 1:
            raise ValueError(f"iterations={iterations} leaves no association; choose 1 or more")
        self.cell, self.heads, self.iterations, self.reading = (cell[0], cell[1]), heads, iterations, reading
        self.by_head = True  # rows of the projection are ordered per head as [q | k | v], as in the release
        self.scale = dim**-0.5  # of the association, which is not split into heads: all channels count
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=qkv_bias), nn.Linear(dim, dim)
        self.position = None if relative_grid is None else RelativePositionBias(heads, relative_grid)

    @accelerated(linear_sampling, is_linear)
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns residual + attention(x)."""
        channels_first = x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last)
        if self.cell == (1, 1):
            y = self.attend(x.permute(0, 2, 3, 1))
        else:
            cells = to_cells(autocast(x), self.cell)
            grid, constant = grid_of(x, self.cell), self.reading == "fitted"
            tokens, share, _ = sample(cells, grid, self.iterations, self.scale, constant)
            y = spread(self.attend(tokens), share, self.cell, (x.shape[2], x.shape[3]))
        y = y.permute(0, 3, 1, 2).contiguous() if channels_first else y.permute(0, 3, 1, 2)
        return y if residual is None else residual + y

    def reparameterize(self) -> None:
        """For inference: the rows of the projection ordered as [q | k | v], each by head, which is one split."""
        if self.by_head and untouched(self.qkv, nn.Linear):
            for name, value in self.qkv.named_parameters():
                by_kind = value.detach().unflatten(0, (self.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
                setattr(self.qkv, name, nn.Parameter(by_kind.contiguous(), requires_grad=False))
            self.by_head = False

    def attend(self, x: Tensor) -> Tensor:
        """Multi-head self-attention among all cells of a map. (B, p, q, C) -> (B, p, q, C)."""
        B, p, q, C = x.shape
        parts, order = ((self.heads, 3), (3, 0, 2, 1, 4)) if self.by_head else ((3, self.heads), (2, 0, 3, 1, 4))
        qkv = self.qkv(x).reshape(B, p * q, *parts, C // self.heads).permute(order)  # 3 B heads N d
        bias = None if self.position is None else self.position(p, q)
        y = attention(qkv[0], qkv[1], qkv[2], bias)  # B heads N d
        return self.proj(y.transpose(1, 2).reshape(B, p, q, C))


class RelativePositionBias(nn.Module):
    """Bias (heads, N, N) of the logits of N = height * width tokens, from a table by offset, resized to the grid."""

    def __init__(self, heads: int, grid: tuple[int, int]):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(heads, 2 * grid[0] - 1, 2 * grid[1] - 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, height: int, width: int) -> Tensor:
        rows, columns, table = 2 * height - 1, 2 * width - 1, self.table
        if rows == 1:  # resized to a single place, only the offset of zero is left
            table = table[:, table.shape[1] // 2][:, None]
        if columns == 1:
            table = table[:, :, table.shape[2] // 2][:, :, None]
        if table.shape[1] != rows or table.shape[2] != columns:
            table = F.interpolate(table[None], [rows, columns], mode="bilinear", align_corners=True)[0]
        y, x = torch.arange(height, device=table.device), torch.arange(width, device=table.device)
        dy = (y[:, None] - y + height - 1)[:, None, :, None]  # H 1 H 1
        dx = (x[:, None] - x + width - 1)[None, :, None, :]  # 1 W 1 W
        index = (dy * columns + dx).reshape(-1)
        return table.flatten(1)[:, index].reshape(-1, height * width, height * width)
