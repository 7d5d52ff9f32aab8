"""A learned bias for every relative offset between two tokens of a grid."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RelativePositionBias(nn.Module):
    """Bias (heads, N, N) to add to the attention logits of a grid of N = height * width tokens.

    One number per head and offset is stored for a reference grid (height, width); other grids get the table resized
    bilinearly.
    """

    def __init__(self, heads: int, grid: tuple[int, int]):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(heads, 2 * grid[0] - 1, 2 * grid[1] - 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, height: int, width: int) -> Tensor:
        rows, columns = 2 * height - 1, 2 * width - 1
        table = self.table
        if rows == 1:  # resized to a single place, only the offset of zero is left
            table = table[:, table.shape[1] // 2][:, None]
        if columns == 1:
            table = table[:, :, table.shape[2] // 2][:, :, None]
        if table.shape[1] != rows or table.shape[2] != columns:
            table = F.interpolate(table[None], [rows, columns], mode="bilinear", align_corners=True)[0]
        y = torch.arange(height, device=table.device)
        x = torch.arange(width, device=table.device)
        dy = (y[:, None] - y + height - 1)[:, None, :, None]  # H 1 H 1
        dx = (x[:, None] - x + width - 1)[None, :, None, :]  # 1 W 1 W
        index = (dy * columns + dx).reshape(-1)
        N = height * width
        return table.flatten(1)[:, index].reshape(-1, N, N)
