"""How alike a model's attention rows are: the mean cosine similarity of two queries, or two heads, layer by layer.

As in the PartialFormer chapter (Fig. 5.2). Near 1, all places ask for the same, and most of the attention is computed
in vain. The mean needs no matrix of pairs: it is the squared length of the sum of the rows, each brought to length one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...inspection.attention_rows import Rows as AttentionRows
from ...inspection.passing import Images, Seen
from ...layers import GroupClassAttention, PartialAttention
from .base import OF_ATTENTION, Measure, Rows, register_measure
from .frame import AttentionSum, Figure, Result, draw_legend, draw_lines, draws, new_figure, sum_attention


@dataclass(frozen=True)
class LayerSimilarity(Result):
    """How alike a layer's attention rows are, from 0 (no key in common) to 1 (the same weights)."""

    queries: float | None  # mean cosine similarity of two queries of one head; None where no two share their keys
    heads: float | None  # mean cosine similarity of two heads at the same query; None where there are no two
    by_head: tuple[float | None, ...]  # `queries` of each head; one for all where heads have no axis of their own
    keys: int  # the length of the rows
    reason: str = ""  # why a figure is None


def attention_similarity(
    model: nn.Module, images: Images, *, with_itself: bool = False, batch_size: int = 8, seen: Seen | None = None
) -> dict[str, LayerSimilarity]:
    """Cosine similarity of the attention rows of every layer, by the layer's name, in the order of execution.

    Two rows are compared if they are weights of the same keys: two queries of one image, one head and, where attention
    is in windows, one window; or two heads of one query. A class token is a query like the others. `attention_entropy`
    says which rows a layer has. All images have one size.

    Args:
        with_itself: A row is a pair with itself too, as in the mean over the whole matrix: adds 1 / N for N rows.
    """
    options: dict[str, Any] = dict(arranged=_by_head, batch_size=batch_size, seen=seen)
    layers = sum_attention(model, images, lambda rows: _Layer(rows, with_itself), **options)
    return {name: layer.similarity() for name, layer in layers.items()}


@draws(LayerSimilarity, "attention_similarity", by_layer=True)
def plot_attention_similarity(similarities: Mapping[str, Mapping[str, LayerSimilarity]]) -> Figure:
    """Draw similarity between queries and between heads over layers, with gaps where a layer has no figure."""
    figure = new_figure(10, 4.2)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, what in zip(panels, ("queries", "heads"), strict=True):
        found = {label: [getattr(layer, what) for layer in layers.values()] for label, layers in similarities.items()}
        lines = {label: [math.nan if x is None else x for x in values] for label, values in found.items()}
        draw_lines(panel, lines, "mean cosine similarity of attention" if what == "queries" else "")
        panel.set(title=f"between {what}", ylim=(-0.02, 1.02))
    draw_legend(panels[1])
    return figure


def rows(result: Mapping[str, LayerSimilarity]) -> Rows:
    columns = ("layer", "keys", "between queries", "between heads", "why not")
    shown = 5 if any(x.reason for x in result.values()) else 4
    cells = [(name, x.keys, x.queries, x.heads, x.reason or None)[:shown] for name, x in result.items()]
    return columns[:shown], cells


def _by_head(rows: AttentionRows, module: nn.Module) -> AttentionRows:
    """The rows, with heads apart where a layer of ours has them among the queries."""
    if isinstance(module, PartialAttention) and len(rows.shape) == 3:  # the single query of the background
        return rows.split((rows.shape[-2], 1), 1)
    if isinstance(module, GroupClassAttention):
        return rows.split((module.groups, module.heads, -1), 2)
    return rows


class _Layer(AttentionSum):
    """Sums over groups of rows of their mean cosine similarity, and the numbers of groups."""

    def __init__(self, rows: AttentionRows, with_itself: bool):
        super().__init__(rows)
        self.have_axis, self.with_itself = rows.head_axis is not None, with_itself
        self.query_sums = torch.zeros(2, self.heads, dtype=torch.float64)  # sums, groups; by head
        self.head_sums = torch.zeros(2, dtype=torch.float64)

    def add(self, rows: AttentionRows) -> None:
        axis = rows.head_axis
        others = [i for i in range(len(rows.shape) - 2) if i != axis]
        sums = counts = torch.zeros(())
        for _, queries, logits, weights in rows.pieces():
            unit = logits.softmax(-1) if weights is None else weights.clone()
            unit.div_(torch.linalg.vector_norm(unit, dim=-1, keepdim=True))
            counted = torch.ones_like(unit[..., 0])
            if unit[..., 0].isnan().any():  # masked as a whole, or else the model computes nonsense: it should show
                hidden = logits.isneginf().all(-1)
                unit.masked_fill_(hidden[..., None], 0)
                counted.masked_fill_(hidden, 0)
            if queries.start == 0:
                sums = counts = torch.zeros(())  # of an image's queries so far: their unit rows, and how many
            sums, counts = sums + unit.sum(-2), counts + counted.sum(-1)
            if queries.stop >= rows.shape[-2]:
                self.query_sums += self._means(sums, counts).sum([axis + 1 for axis in others]).view(2, -1)
            if axis is not None:
                self.head_sums += self._means(unit.sum(axis), counted.sum(axis)).flatten(1).sum(1)

    def _means(self, sums: Tensor, rows: Tensor) -> Tensor:
        """(2, ...): mean cosines of groups of unit rows with these sums (..., M) and numbers (...), and 1 for each."""
        squares, n = sums.square().sum(-1).cpu().double(), rows.cpu().double()
        pairs = n * n if self.with_itself else n * (n - 1)
        means = (squares if self.with_itself else squares - n) / pairs.clamp(min=1)
        return torch.stack([torch.where(pairs > 0, means, 0), (pairs > 0).double()])  # 0, 0 for a group without pairs

    def similarity(self) -> LayerSimilarity:
        def mean(total: Tensor, groups: Tensor) -> float | None:
            if not groups:
                return None
            value = (total / groups).item()
            return value if math.isnan(value) else min(max(value, 0.0), 1.0)  # rounding may carry it past either

        queries, heads = mean(*self.query_sums.sum(1)), mean(*self.head_sums)
        by_head = [mean(*head) for head in self.query_sums.T]
        reasons = ["no two queries share their keys"] if queries is None else []
        if heads is None:
            reasons.append("it has a single head" if self.have_axis else "its heads are not apart in an axis")
        return LayerSimilarity(queries, heads, tuple(by_head), self.keys, "; ".join(reasons))


ABOUT = "how alike attention is between queries and between heads: at 1 all ask for the same", "PartialFormer, Fig. 5.2"
OPTIONS = {"with_itself": "whether a row is a pair with itself too"}
FUNCTIONS = attention_similarity, plot_attention_similarity, rows
register_measure(Measure("similarity", *ABOUT, *FUNCTIONS, **OF_ATTENTION, options=OPTIONS, order=5))
