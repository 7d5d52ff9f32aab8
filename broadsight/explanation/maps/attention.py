"""Attention weights over the image: of any transformer, and of the convolution-like attention of EMSNet."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...inspection.attention import find_attention, layer_name, watch_attention
from ...inspection.attention_rows import Rows
from ...inspection.branch_structure import affine_layers
from ...inspection.layout import layouts_of, path_of, prefix_tokens
from ...inspection.watch import hooked
from ...inspection.windows import Windows, cells_of, cuts, windows_of
from ...layers import CMHSA, GMHSA, AbstractTokenAttention, GroupClassAttention, MultiTokenPool, PartialAttention
from ...layers.coarse_attention import overlap_add
from ...layers.kernels.folded_interaction import FoldedInteraction
from .map import Collector, LayerCall, Look, modules_of

OF_CLASS = "attention of the class token to each place; bright is much"
RECEIVED = "attention that each place receives, on average over all that ask; bright is much"
IN_WINDOW = "attention that each place receives, on average over those of its window; bright is much"
OF_BACKGROUND = "attention of the single query of the background to each place; bright is much"


@dataclass(frozen=True)
class Placed:
    """Where the tokens of a soft-max are, numbered through all windows: window * tokens of each + token.

    Args:
        keys, queries: (h, w), the number of the token at each place; None if those that ask have no places.
        windows, heads: How many are in the axes before the queries.
        prefix: Tokens before those of the image.
        of_class: Whether the first of these is a class token.
        cut: How the windows were cut out of the map, if they were.
    """

    keys: Tensor
    queries: Tensor | None
    windows: int
    heads: int
    prefix: int = 0
    of_class: bool = False
    cut: Windows | None = None

    def at_places(self, x: Tensor) -> Tensor:
        """Values of the keys (heads, windows, M) as maps (heads, h, w)."""
        return x.flatten(1)[:, self.keys]


class AttentionLooks(Collector):
    """Of every attention layer: one heat map for the mean over its heads, and one for each head if there are several.

    It is the row of the class token, or else what each key receives on average over the queries that may attend to it.
    Windows are joined at their places. A layer whose tokens have no known places is in `skipped`, with the reason.
    """

    kind = "attention"

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        return bool(_outside_pools(model, find_attention(model))) and not _reordered(model)

    def __init__(self, model: nn.Module, image_size: tuple[int, int]):
        super().__init__(model, image_size)
        self.names = find_attention(model)
        self.found: list[tuple[str, Tensor, str]] = []  # name, (heads, h, w), note
        self.skipped: dict[str, str] = {}
        self.inputs: dict[Any, list[tuple[int, ...]]] = {}

    def __enter__(self) -> Collector:
        wanted = _outside_pools(self.model, self.names)
        self.inputs.clear()

        def notes(module: nn.Module, args: tuple, _: dict) -> None:
            sizes = [tuple(x) for x in args if isinstance(x, tuple | list | torch.Size) and len(x) == 2]
            self.inputs[module] = [tuple(x.shape) for x in args if isinstance(x, Tensor)] + sizes

        with ExitStack() as opened:
            blocks = {path_of(self.model, name)[1] for name in self.names.values() if name}
            opened.enter_context(hooked({*self.names, *filter(cuts, blocks)}, before=notes))
            opened.enter_context(watch_attention(self.model, self._see, lambda name: name.partition("#")[0] in wanted))
            self._opened = opened.pop_all()
        return self

    def looks(self) -> list[Look]:
        looks = []
        for depth, (name, maps, note) in enumerate(self.found):
            layer, _, number = name.partition("#")
            note = f"{note}; the layer's soft-max {number}" if number else note
            shown = [("head mean", maps.mean(0)), *((f"head {i}", one) for i, one in enumerate(maps, 1))]
            looks += [self.heat(depth, layer, *one, note) for one in (shown if len(maps) > 1 else shown[:1])]
        return looks

    def _see(self, name: str, rows: Rows, module: nn.Module) -> None:
        if isinstance(found := self._read(name, rows, module), str):
            self.skipped[name] = found
        else:
            self.found.append((name, found[0].float().cpu(), found[1]))

    def _read(self, name: str, rows: Rows, module: Any) -> tuple[Tensor, str] | str:
        """Maps (heads, h, w) and how to read them, or why there are none."""
        if isinstance(module, PartialAttention) and len(rows.shape) == 3:  # one query, and the rows are its heads'
            grids = layouts_of((1, rows.shape[-1], 1), self.image_size, prefixes=[0])
            weights = rows.weights()[0]
            return (weights.unflatten(-1, grids[0].grid), OF_BACKGROUND) if grids else _no_grid(rows.shape[-1])
        placed = self._place(name, rows, module)
        if isinstance(placed, str):
            return placed
        N = rows.shape[-2]
        if placed.cut is not None:
            inside = None if placed.queries is None else _spread_over(rows, placed.cut.inside(), placed.heads)
            received, note = rows.received(counted=inside), RECEIVED if placed.windows == 1 else IN_WINDOW
        else:
            prefix = placed.prefix
            asking = slice(0, 1) if placed.of_class else slice(prefix if prefix < N else 0, N)
            received, note = rows.received(asking), OF_CLASS if placed.of_class else RECEIVED
        return placed.at_places(arranged(received, placed.heads, rows.head_axis)), note

    def _place(self, name: str, rows: Rows, module: Any) -> Placed | str:
        """Where the tokens of a soft-max are, or why that is unknown."""
        if isinstance(module, AbstractTokenAttention) and "#" in name:
            return "what the abstract tokens attend to is shown by the looks abstract-tokens and fusion"
        if isinstance(module, PartialAttention):
            return "its foreground tokens have no fixed places; the look foreground shows them"
        if any(isinstance(child, CMHSA) for child in module.modules()):
            return "its windows overlap; the look c-mhsa shows them"
        path = path_of(self.model, self.names[module])
        if any(_reordered(owner) for owner in path):
            return "its tokens are not in the order of their places"
        N, M = rows.shape[-2:]
        layout = _layout(rows, module)
        if layout is None:
            return f"its weights have the shape {tuple(rows.shape)}, whose axes are unknown"
        windows, heads = layout
        if N == M and self._among_channels(module, N, heads):
            return "it attends to channels, which are everywhere"
        own = M - bool(getattr(module, "token_is_key", False))  # an abstract token is the last key of its window
        cut = windows_of(path[:2], self.inputs, self.image_size, windows, own)
        if cut is not None:
            places = cut.numbers()
            return Placed(places // own * M + places % own, places if own == N else None, windows, heads, cut=cut)
        if windows > 1:
            return f"it attends within {windows} parts of the image, whose places are unknown"
        said, has_class = prefix_tokens(path)
        keys = self._numbered(path, M, said or 0)
        if keys is None:
            return _no_grid(M)
        # A single query is a class token's, unless there is a single place
        queries = keys if N == M else self._numbered(path, N, said or 0) if N > 1 else None
        prefix = int(keys.min())
        return Placed(keys, queries, windows, heads, prefix, bool(prefix) and has_class)

    def _numbered(self, path: list[nn.Module], count: int, prefix: int) -> Tensor | None:
        """(h, w), the number of the token at each place, of so many tokens of the whole image; None without a grid."""
        grids = layouts_of((1, count, 1), self.image_size, prefixes=[prefix, 0])
        if not grids:
            return None
        first = grids[0].prefix
        cells = None if first else cells_of(path[:2], self.inputs, self.image_size, count)
        if cells is not None:  # each token is at all places of its cell; the last cells reach beyond the map
            return cells.numbers() // math.prod(cells.window)
        return first + torch.arange(grids[0].places).view(grids[0].grid)

    def _among_channels(self, module: nn.Module, keys: int, heads: int) -> bool:
        """Whether the keys are a head's channels: as many, and the module says so or other tokens came in."""
        layer: Any = next(affine_layers(module), None)
        channels = getattr(layer, "in_features", None) or getattr(layer, "in_channels", None)
        shapes = [shape for shape in self.inputs.get(module, []) if len(shape) > 2]
        tokens = {n for s in shapes for n in (s[0], s[1], s[-1] * s[-2], s[1] * s[2])}
        says_so = hasattr(module, "temperature") or "channel" in type(module).__name__.lower()
        return keys * heads == channels and (says_so or keys not in tokens) and not cuts(module)


def _outside_pools(model: nn.Module, names: Mapping[nn.Module, str]) -> set[str]:
    """Attentions, as results call them, without those of a pooling, which has looks of its own."""
    pools = [name for name, module in model.named_modules() if isinstance(module, MultiTokenPool | GroupClassAttention)]
    inside = [name for name in names.values() if any(f"{name}.".startswith(f"{pool}.") for pool in pools)]
    return {layer_name(name) for name in names.values() if name not in inside}


def _reordered(model: Any) -> bool:
    """Whether the model sorts its tokens other than by their places, as Hiera does."""
    return isinstance(getattr(model, "reroll", None), nn.Module)


def _no_grid(keys: int) -> str:
    return f"its {keys} keys do not form a grid like the image's"


def _layout(rows: Rows, module: Any) -> tuple[int, int] | None:
    """How many windows and heads are in the axes before the queries in one image's weights; None if that is unclear."""
    *lead, _, _ = rows.shape
    if len(lead) == 1:  # heads after images or windows in one axis, or a single head
        heads = next((x for x in (getattr(module, name, None) for name in ("num_heads", "heads")) if x), 1)
        return (lead[0] // heads, heads) if isinstance(heads, int) and lead[0] % heads == 0 else None
    if rows.head_axis is None or len(lead) > 3:
        return None
    others = sorted(n for i, n in enumerate(lead) if i != rows.head_axis)
    return (others[-1], lead[rows.head_axis]) if others[:-1] in ([], [1]) else None


def arranged(x: Tensor, heads: int, axis: int | None) -> Tensor:
    """(..., M) with the heads in one of the axes, or together with the windows in the first, as (heads, windows, M)."""
    x = x.unflatten(0, (-1, heads)).movedim(1, 0) if axis is None else x.movedim(axis, 0)
    return x.reshape(heads, -1, x.shape[-1])


def _spread_over(rows: Rows, inside: Tensor, heads: int) -> Tensor | None:
    """Whether each of the rows counts, (B, ..., N), from the same for (windows, N); None if all do."""
    *lead, N, _ = rows.shape
    if inside.all():
        return None
    if rows.head_axis is None:
        return inside.repeat_interleave(heads, 0)
    axis = max((i for i in range(len(lead)) if i != rows.head_axis), key=lambda i: lead[i])
    return inside.view(*(n if i == axis else 1 for i, n in enumerate(lead)), N).expand(*lead, N)


class LocalAttentionLooks(Collector):
    """Of every C-MHSA: how much attention the value of each cell gets, and how concentrated each window's weights are.

    Windows of 3x3 cells lie at every second cell and are summed: a cell belongs to one, two or four of them, and gets
    as much attention on average. Of the G-MHSA beside it: how much attention each cell gets, at the same depth.
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
