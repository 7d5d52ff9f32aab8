"""Attention of chosen places: where the token at a place of the image looks, in every layer."""

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ...inspection.attention_rows import Rows
from ...inspection.windows import Windows
from ...layers import AbstractTokenAttention, PartialAttention, SuperTokenAttention
from ...layers.partial_attention import select_foreground
from ...layers.sampling import fold, spread
from .attention import AttentionLooks, Placed, arranged
from .map import Collector, Look
from .tokens import FUSION, ForegroundLooks, SuperTokenLooks

ASKS = "attention that the place of the cross pays to each place, mean over heads; bright is much"
IN_WINDOW = f"{ASKS}; it sees its own window alone"
FUSED = "attention that the place of the cross pays to each window's summary, mean over heads; bright is much"
COMPOSED = f"{ASKS}; through super tokens: its shares of them, their attention, and what each holds of a place"
FOREGROUND = f"{ASKS}; it is foreground and sees the foreground alone; before the heads are mixed again"
BACKGROUND = "the place of the cross is background here and asks nothing: it gets what the background's one query finds"
NOT_ASKING = "its queries are not the places of the image"


class QueryLooks(AttentionLooks):
    """Of every attention layer, for each place of `marks`: what the token there attends to.

    It is the token's row of the weights, one map for the mean over heads, with all heads in `Look.heads`. What lies in
    other windows is zero. Through super tokens the row is composed: every pixel is a mixture of super tokens, these
    attend to each other, and each is a mean of pixels. A background token of a partial attention asks nothing, and has
    the map of the one query of all background. Layers in which no place asks are in `skipped`.
    """

    kind = "query"

    def __init__(self, model: nn.Module, image_size: tuple[int, int]):
        super().__init__(model, image_size)
        self.rows: list[tuple[str, int, str, Tensor, str]] = []  # name, place, what, (heads, h, w), note
        self.shares, self.foreground = (one(model, image_size) for one in (SuperTokenLooks, ForegroundLooks))

    def __enter__(self) -> Collector:
        with ExitStack() as opened:
            for one in (self.shares, self.foreground):  # opened first, they have seen a soft-max when `_see` does
                if one.find(self.model):
                    opened.enter_context(one)
            super().__enter__()
            opened.push(self._opened.pop_all())
            self._opened = opened.pop_all()
        return self

    def looks(self) -> list[Look]:
        looks: list[Look] = []
        depth, layer, titles = -1, None, set[str]()
        for name, number, what, maps, note in self.rows:
            path, _, softmax = name.partition("#")
            title = f"query {number + 1}" + (f", {what}" if what else "")
            if path != layer or title in titles:
                depth, layer, titles = depth + 1, path, set()
            titles.add(title)
            note += f"; the layer's soft-max {softmax}" if softmax and not what else ""
            values = maps.mean(0)
            if (rest := 1 - float(values.sum())) > 5e-4:  # less than what is shown
                note += f"; {100 * rest:.1f} % of it went to tokens without a place, such as class tokens and padding"
            looks.append(self.heat(depth, path, title, values, note, mark=self.marks[number], heads=maps))
        return looks

    def _see(self, name: str, rows: Rows, module: nn.Module) -> None:
        for number, mark in enumerate(self.marks):
            found = self._row(name, rows, module, mark)
            if isinstance(found, str):
                self.skipped[name] = found
            elif found is not None:
                self.rows.append((name, number, found[0], found[1].float().cpu(), found[2]))

    def _row(
        self, name: str, rows: Rows, module: Any, mark: tuple[float, float]
    ) -> tuple[str, Tensor, str] | str | None:
        """What the map shows, the row of the place as maps (heads, h, w), and how to read it; or why there is none."""
        if isinstance(module, SuperTokenAttention) and module.cell != (1, 1):
            return "", self._through_super_tokens(rows, module, mark), COMPOSED
        if isinstance(module, PartialAttention):
            return self._partial(rows, module, mark)
        placed = self._place(name, rows, module)
        if isinstance(placed, str):
            return placed
        if placed.queries is None:
            return NOT_ASKING
        window, token = divmod(_at(placed.queries, mark), rows.shape[-2])
        row = arranged(rows.weights(slice(token, token + 1)).squeeze(-2), placed.heads, rows.head_axis)
        seen = torch.zeros_like(row)  # heads windows M
        seen[:, window] = row[:, window]
        fused = isinstance(module, AbstractTokenAttention) and "#" in name
        note = FUSED if fused else ASKS if placed.windows == 1 else IN_WINDOW
        return "fusion" if fused else "", placed.at_places(seen), note

    def _place(self, name: str, rows: Rows, module: Any) -> Placed | str:
        if isinstance(module, AbstractTokenAttention) and name.endswith(f"#{FUSION + 1}"):
            # Queries are pixels, window by window; keys are the summaries of the windows
            _, H, W, _ = self.inputs[module][0]
            cut = Windows((H, W), module.sides(H, W))
            return Placed(cut.numbers() // math.prod(cut.window), cut.numbers(), 1, module.heads)
        return super()._place(name, rows, module)

    def _through_super_tokens(self, rows: Rows, module: SuperTokenAttention, mark: tuple[float, float]) -> Tensor:
        """rows: of the attention (1, heads, p*q, p*q) among super tokens. -> (heads, H, W)"""
        call = self.shares.calls[-1]
        share, cut = call.weights(3, -2)[-1].mT, Windows(call.given, module.cell)  # p*q 9 P
        grid = (1, *cut.counts)
        cell, pixel = divmod(_at(cut.numbers(), mark), share.shape[2])
        own = torch.zeros_like(share[..., :1])
        own[cell, :, 0] = share[cell, :, pixel]
        weights = fold(own, grid).flatten() @ rows.weights()[0].to(share.dtype)  # heads p*q
        mass = fold(share.sum(2, keepdim=True), grid) + 1e-12  # 1 p q 1, of the pixels that each is the mean of
        return spread(weights.T.view(*grid, -1) / mass, share, module.cell, call.given)[0].permute(2, 0, 1)

    def _partial(
        self, rows: Rows, module: PartialAttention, mark: tuple[float, float]
    ) -> tuple[str, Tensor, str] | None:
        """rows: (1, heads, n, 1 + foreground), perhaps in parts; then (1, heads, N) of the background."""
        call = self.foreground.calls[-1]
        scores, grid = call.given
        index = select_foreground(scores, module.foreground_count(scores.shape[1]))
        place = (index == _at(torch.arange(scores.shape[1]).view(grid), mark)).nonzero()
        if len(rows.shape) == 3:
            return None if len(place) else ("background", rows.weights()[0].unflatten(-1, grid), BACKGROUND)
        token = 1 + int(place) - sum(part.shape[-2] for part in call.rows[:-1]) if len(place) else -1
        if not 0 <= token < rows.shape[-2]:  # the abstract token comes first
            return None
        row = rows.weights(slice(token, token + 1))[0, :, 0]  # heads 1+foreground
        maps = row.new_zeros(len(row), scores.shape[1]).index_copy(1, index, row[:, 1:])
        return "", maps.unflatten(-1, grid), FOREGROUND


def _at(numbers: Tensor, mark: tuple[float, float]) -> int:
    """The number (h, w) at a place, (x, y) as shares of the sides."""
    rows, columns = numbers.shape
    return int(numbers[int(mark[1] * rows), int(mark[0] * columns)])
