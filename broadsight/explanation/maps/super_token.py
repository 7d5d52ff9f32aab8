"""Super tokens (STViT): which pixels belong to which super token, and how surely."""

from typing import Any

import torch
from torch import Tensor, nn

from ...layers import SuperTokenAttention
from ...layers.any_size import join_cells
from .map import Collector, LayerCall, Look, modules_of


class SuperTokenLooks(Collector):
    """Of every super-token attention with cells of several pixels: the super token that has most of each pixel.

    A pixel is shared among the 3 x 3 super tokens around its cell. The shares are those of the run, after the last
    iteration. Super tokens are numbered by row and column of the cells that seed them. Those that the layer imagines
    beyond the border take shares too, but are no super tokens: nothing belongs to them.
    """

    kind = "super-tokens"

    @classmethod
    def find(cls, model: nn.Module) -> dict[str, nn.Module]:
        return {name: x for name, x in modules_of(model, SuperTokenAttention).items() if x.cell != (1, 1)}

    def given(self, module: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        return tuple(x.shape[-2:])

    def looks_of(self, depth: int, call: LayerCall) -> list[Look]:
        share, cell, size = call.weights(3, -2)[-1].mT, call.module.cell, call.given  # p*q 9 P
        p, q = (-(-n // side) for n, side in zip(size, cell, strict=True))
        numbers = around(p, q, share.device)  # p*q 9
        share = share.masked_fill((numbers < 0)[:, :, None], -1)
        largest, which = share.max(1)  # p*q P
        labels = _joined(numbers.gather(1, which), (p, q), cell, size).cpu()
        most = f"the super token, of {p} x {q} super tokens, that holds the largest share of each pixel"
        part = f"how much of each pixel that one of {p} x {q} super tokens holds: 1 is all, 1/9 is no preference"
        return [
            Look(self.kind, "association", call.layer, depth, "labels", labels, most),
            self.heat(depth, call.layer, "largest share", _joined(largest, (p, q), cell, size), part),
        ]


def around(p: int, q: int, device: Any = None) -> Tensor:
    """Numbers of the 3 x 3 super tokens around each of p x q, row by row; -1 beyond the border. (p*q, 9)"""
    rows = torch.arange(p, device=device)[:, None] + torch.arange(-1, 2, device=device)  # p 3
    columns = torch.arange(q, device=device)[:, None] + torch.arange(-1, 2, device=device)  # q 3
    numbers = rows[:, None, :, None] * q + columns[None, :, None, :]  # p q 3 3
    inside = ((rows >= 0) & (rows < p))[:, None, :, None] & ((columns >= 0) & (columns < q))[None, :, None, :]
    return numbers.masked_fill(~inside, -1).view(p * q, 9)


def _joined(x: Tensor, grid: tuple[int, int], cell: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Pixels by cell (p*q, P) -> (H, W), without the padding."""
    return join_cells(x.view(1, *grid, *cell, 1))[0, : size[0], : size[1], 0].contiguous()
