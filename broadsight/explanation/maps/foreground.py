"""Partial attention (PartialFormer): which places are foreground, how often so far, and what of the rest is seen."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...inspection.layout import layouts_of
from ...inspection.watch import hooked
from ...layers import PartialAttention
from ...layers.partial_attention import select_foreground
from .map import Collector, Look


class ForegroundLooks(Collector):
    """Of every partial attention: the foreground it chose, the choices up to there, and its query of the background.

    Choices are counted on the finest grid of all layers, to which the others are resized by nearest places.
    """

    kind = "foreground"
    layers = (PartialAttention,)

    def __init__(self, model: nn.Module, image_size: tuple[int, int]):
        super().__init__(model, image_size)
        # Tokens come as a row; the block around them gets the map that they are of.
        self.blocks = [m for m in model.modules() if any(isinstance(x, PartialAttention) for x in m.children())]
        self.grid: tuple[int, int] | None = None

    def __enter__(self) -> Collector:
        def enters(module: nn.Module, inputs: tuple, _: dict) -> None:
            x = inputs[0] if inputs else None
            self.grid = (x.shape[1], x.shape[2]) if isinstance(x, Tensor) and x.ndim == 4 else None

        self._opened.enter_context(hooked(self.blocks, before=enters))
        return super().__enter__()

    def given(self, module: Any, x: Tensor, scores: Tensor) -> Any:
        tokens = x.shape[1]
        grid = self.grid if self.grid and self.grid[0] * self.grid[1] == tokens else None
        return scores.detach(), grid or layouts_of((1, tokens, 1), self.image_size, prefixes=[0], nearest=True)[0].grid

    def looks(self) -> list[Look]:
        masks = []
        for call in self.calls:
            scores, grid = call.given
            index = select_foreground(scores, call.module.foreground_count(scores.shape[1])).cpu()
            masks.append(torch.zeros(scores.shape[1], dtype=torch.bool).index_fill(0, index, True).view(grid))
        finest = max((mask.shape for mask in masks), key=lambda shape: shape[0] * shape[1], default=None)
        found, times = [], torch.zeros(finest or (1, 1))
        for depth, (call, mask) in enumerate(zip(self.calls, masks, strict=True)):
            part = f"{int(mask.sum())} of {mask.numel()} places are foreground and attend to each other"
            found.append(Look(self.kind, "foreground", call.layer, depth, "mask", mask, part))
            times = times + F.interpolate(mask[None, None].float(), list(times.shape), mode="nearest")[0, 0]
            often = f"in which share of the {depth + 1} layers so far each place was foreground"
            found.append(self.heat(depth, call.layer, f"history up to layer {depth + 1}", times / (depth + 1), often))
            if background := call.weights(3):
                weights = background[-1][0].mean(0).view(mask.shape)
                seen = "attention of the one query over the background, mean over heads; the foreground gets none"
                found.append(self.heat(depth, call.layer, "background query", weights, seen))
        return found
