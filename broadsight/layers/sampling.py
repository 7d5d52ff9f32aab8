"""Super-token sampling: pixels to the super tokens around their cell, and back."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .any_size import join_cells, pad_to, split_cells


def grid_of(x: Tensor, cell: tuple[int, int]) -> tuple[int, int, int]:
    """(B, C, H, W) -> B, and how many cells there are in a column and in a row."""
    return x.shape[0], (x.shape[2] + cell[0] - 1) // cell[0], (x.shape[3] + cell[1] - 1) // cell[1]


def to_cells(x: Tensor, cell: tuple[int, int]) -> Tensor:
    """Pixels by cell in raster order, zero-padded below and on the right: one copy. (B, C, H, W) -> (B*p*q, P, C)."""
    _, p, q = grid_of(x, cell)
    x = pad_to(x.permute(0, 2, 3, 1), p * cell[0], q * cell[1])
    return split_cells(x, cell[0], cell[1]).flatten(3, 4).flatten(0, 2)


def sample(
    cells: Tensor, grid: tuple[int, int, int], iterations: int, scale: float, constant: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Associate pixels with super tokens and average them. No gradient reaches shares and mass if they are `constant`.

    cells (B*p*q, P, C), grid (B, p, q) -> tokens (B, p, q, C), the share (B*p*q, 9, P) of each pixel in its nine super
    tokens (the nine first, for a soft-max over contiguous pixels), and the mass (B, p, q, 1) that each holds.
    """
    associated = cells.detach() if constant else cells
    tokens = associated.mean(1).unflatten(0, grid)
    share, mass = cells, tokens
    for i in range(iterations):
        around = neighbours((tokens.detach() if constant else tokens) * scale)
        logits = torch.bmm(around, associated.transpose(1, 2))  # B*p*q 9 P
        # Half precision would lose the small shares, and the guard below would vanish in float16.
        weights = (logits if logits.dtype == torch.float64 else logits.float()).softmax(1)
        share = weights.to(cells.dtype)
        sums = torch.bmm(share, cells if i == iterations - 1 else associated)  # B*p*q 9 C
        folded = fold(torch.cat([sums.to(weights.dtype), weights.sum(2, keepdim=True)], 2), grid)  # B p q C+1
        mass = (folded[..., -1:].detach() if constant else folded[..., -1:]) + 1e-12
        tokens = (folded[..., :-1] / mass).to(cells.dtype)
    return tokens, share, mass


def neighbours(tokens: Tensor) -> Tensor:
    """The 3 x 3 tokens around each, zero beyond the border. (B, p, q, C) -> (B*p*q, 9, C), row-major."""
    around = F.pad(tokens, [0, 0, 1, 1, 1, 1]).unfold(1, 3, 1).unfold(2, 3, 1)  # B p q C 3 3
    return around.permute(0, 1, 2, 4, 5, 3).flatten(3, 4).flatten(0, 2)


def fold(parts: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """The adjoint of `neighbours`: adds up what was meant for each token. (B*p*q, 9, C) -> (B, p, q, C)."""
    # Separable: three shifted sums of rows, then three of columns.
    parts = parts.unflatten(1, (3, 3)).unflatten(0, grid)  # B p q 3 3 C
    down, up = F.pad(parts[:, :, :, 2], [0, 0, 0, 0, 0, 0, 1, 0]), F.pad(parts[:, :, :, 0], [0, 0, 0, 0, 0, 0, 0, 1])
    rows = parts[:, :, :, 1] + down[:, :-1] + up[:, 1:]  # B p q 3 C
    right, left = F.pad(rows[:, :, :, 2], [0, 0, 1, 0]), F.pad(rows[:, :, :, 0], [0, 0, 0, 1])
    return rows[:, :, :, 1] + right[:, :, :-1] + left[:, :, 1:]


def spread(tokens: Tensor, share: Tensor, cell: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Every pixel gets the mixture of its nine tokens. (B, p, q, C), (B*p*q, 9, P), (H, W) -> (B, H, W, C)."""
    y = torch.bmm(share.transpose(1, 2), neighbours(tokens))  # B*p*q P C
    y = y.unflatten(1, cell).unflatten(0, tokens.shape[:3])  # B p q h w C
    return join_cells(y)[:, : size[0], : size[1]]


def autocast(x: Tensor) -> Tensor:
    """The dtype in which autocast would run matrix products, once, so that forward and backward agree on it."""
    device = x.device.type
    autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if autocasts else x
