"""Convolution-like attention (EMSNet): which coarse cells the 3x3 windows attend to, and which all cells do."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...layers import CMHSA, GMHSA
from ...layers.coarse_attention import overlap_add
from ...layers.kernels.folded_interaction import FoldedInteraction
from .map import Collector, LayerCall, Look, modules_of


class LocalAttentionLooks(Collector):
    """Of every C-MHSA: how much attention the value of each cell gets, and how concentrated each window's weights are.

    Windows of 3x3 cells lie at every second cell; in each, nine outputs weigh nine values, and overlapping windows are
    summed. So a cell belongs to one, two or four windows, and gets as much attention on average. What goes to values
    beyond the border is lost. Of the G-MHSA beside it: how much attention each cell gets, at the same depth.
    """

    kind = "c-mhsa"
    # A folded mixer calls its attentions by their parts, past their hooks.
    layers = (CMHSA, GMHSA, FoldedInteraction)

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        return bool(modules_of(model, CMHSA))

    def given(self, module: Any, x: Tensor, spare: int = 0) -> Any:
        return tuple(x.shape[1:3])

    def looks(self) -> list[Look]:
        found: list[Look] = []
        depth = -1
        for call in self.calls:
            windows = call.weights(6)
            depth += bool(windows)
            folded = call.module if isinstance(call.module, FoldedInteraction) else None
            if windows:
                patch, layer = (folded.local.patch, ".local.attn") if folded is not None else (1, "")
                found += self._local(depth, (call.layer + layer).lstrip("."), windows[0], _coarse(call, patch))
            for rows in (rows for rows in call.rows if len(rows.shape) == 4):
                patch, layer = (folded.global_.patch, ".global_.attn") if folded is not None else (1, "")
                path, values = (call.layer + layer).lstrip("."), rows.received()[0].mean(0)
                note = "attention that each coarse cell gets from all cells, mean over heads; all cells add up to 1"
                values = values.view(_coarse(call, patch))
                found.append(self.heat(max(depth, 0), path, "G-MHSA, received", values, note))
        return found

    def _local(self, depth: int, layer: str, softmax: Tensor, cells: tuple[int, int]) -> list[Look]:
        """softmax: (heads, 1, rows, columns, 9, 9), outputs before values."""
        weights = softmax[:, 0].float()
        received = _spread(weights.sum(-2).mean(0), cells)
        windows = _spread(torch.ones_like(weights[0, :, :, 0]), cells)
        entropy = torch.special.entr(weights).sum(-1).mean((0, -1))  # rows columns
        concentration = (1 - entropy / math.log(9)).clamp(min=0)
        gets = "attention that each cell's value gets from all windows, mean over heads"
        over = "the same over what uniform weights give it, mean over heads: 1 is uniform"
        sure = "of each window's weights, mean over heads and its nine outputs: 0 is uniform, 1 picks one value each"
        return [
            self.heat(depth, layer, "C-MHSA, received", received, gets),
            self.heat(depth, layer, "C-MHSA, received, over uniform", received / windows, over),
            self.heat(depth, layer, "C-MHSA, concentration", concentration, sure),
        ]


def _spread(windows: Tensor, cells: tuple[int, int]) -> Tensor:
    """Windows of nine at every second cell, overlaps summed. (rows, columns, 9) -> (h, w)"""
    parts = windows.unflatten(-1, (3, 3)).transpose(1, 2)  # rows 3 columns 3
    whole = overlap_add(overlap_add(parts, 0), 1)  # the first cell of the first window lies beyond the border
    return whole[1 : cells[0] + 1, 1 : cells[1] + 1]


def _coarse(call: LayerCall, patch: int) -> tuple[int, int]:
    return -(-call.given[0] // patch), -(-call.given[1] // patch)
