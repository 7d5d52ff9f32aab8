"""Super tokens (STViT): which pixels belong to which super token, and how surely."""

from typing import Any

import torch
from torch import Tensor, nn

from ...layers import SuperTokenAttention
from ...layers.any_size import join_cells
from .map import LayerCall, LayerCalls, Look, modules_of, shown


class SuperTokenLooks(LayerCalls):
    """Of every super-token attention with cells of several pixels: the super token that has most of each pixel.

    A pixel is shared among the 3 x 3 super tokens around its cell. The shares are those of the run, after the last
    iteration. Super tokens are numbered by row and column of the cells that seed them. Those that the layer imagines
    beyond the border take shares too, but are no super tokens: nothing belongs to them.
    """

    kind = "super-tokens"

    @staticmethod
    def suits(model: nn.Module) -> bool:
        return bool(_pooling(model))

    def __init__(self, model: nn.Module, image_size: tuple[int, int]):
        super().__init__(_pooling(model))

    def given(self, module: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        return tuple(x.shape[-2:])

    def looks(self) -> list[Look]:
        return [look for depth, call in enumerate(self.calls) for look in self._looks(depth, call)]

    def _looks(self, depth: int, call: LayerCall) -> list[Look]:
        share, (h, w) = call.weights(3, -2)[-1].mT, call.module.cell  # p*q 9 P
        (p, q), size = (-(-n // side) for n, side in zip(call.given, (h, w), strict=True)), call.given
        numbers = around(p, q, share.device)  # p*q 9
        share = share.masked_fill((numbers < 0)[:, :, None], -1)
        largest, which = share.max(1)  # p*q P
        labels = numbers.gather(1, which)
        name = f"{p} x {q} super tokens"
        return [
            Look(
                self.kind,
                "association",
                call.layer,
                depth,
                "labels",
                _joined(labels, (p, q), (h, w), size).cpu(),
                f"the super token, of {name}, that holds the largest share of each pixel",
            ),
            Look(
                self.kind,
                "largest share",
                call.layer,
                depth,
                "heat",
                shown(_joined(largest, (p, q), (h, w), size)),
                f"how much of each pixel that one of {name} holds: 1 is all, 1/9 is no preference",
            ),
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


def _pooling(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, Any] = modules_of(model, SuperTokenAttention)
    return {name: module for name, module in found.items() if module.cell != (1, 1)}
