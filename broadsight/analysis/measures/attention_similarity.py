"""How much alike a model's attention rows are: between queries, and between heads, layer by layer.

The measure of the PartialFormer chapter (Fig. 5.2): the mean cosine similarity of the attention weights of two queries.
Near 1, all places ask for the same, and most of the attention is computed in vain. No matrix of pairs is needed for the
mean over all of them: it is the squared length of the sum of the rows, each brought to length one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...inspection.attention import pass_attention
from ...inspection.attention_rows import Rows
from ...inspection.passing import Seen
from ...layers import GroupClassAttention, PartialAttention
from ...visual.plots import save
from ..layer_chart import check_results, draw_lines, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LayerSimilarity:
    """How much alike a layer's attention rows are, from 0 (no key in common) to 1 (the same weights).

    Args:
        queries: Mean cosine similarity of two queries of one head; None where there are no two that share their keys.
        heads: Mean cosine similarity of two heads at the same query; None where there are no two.
        by_head: `queries` of each head; one for all where the layer does not keep heads apart in an axis of its
            weights.
        keys: The length of the rows.
        reason: Why a figure is None; empty if none is.
    """

    queries: float | None
    heads: float | None
    by_head: tuple[float | None, ...]
    keys: int
    reason: str = ""

    def record(self) -> dict[str, Any]:
        """Everything as plain numbers."""
        return {
            "queries": self.queries,
            "heads": self.heads,
            "by_head": list(self.by_head),
            "keys": self.keys,
            "reason": self.reason,
        }


def attention_similarity(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    with_itself: bool = False,
    batch_size: int = 8,
    seen: Seen | None = None,
) -> dict[str, LayerSimilarity]:
    """Cosine similarity of the attention rows of every layer, by the layer's name, in the order of execution.

    Two rows are compared if they are weights of the same keys: two queries of one image, one head and, where attention
    is in windows, one window; or two heads of one query. The figure is the mean over all such pairs, windows, heads and
    images. A class token is a query like the others. Which rows a layer has is said at `attention_entropy`: the single
    query of a layer of partial attention, for instance, has no other one to be compared with.

    Args:
        model: Any model with attention that takes a batch of images: timm's, ours, yours.
        images: (B, C, H, W), or an iterable of such batches, or of tuples that begin with one, as a data loader is. All
            of one size. They are moved to the model's device and dtype.
        with_itself: Whether a row counts as a pair with itself too, as in the mean over the whole matrix of pairs. That
            adds one of N to the mean of N rows, so it is not done by default.
        batch_size: How many images pass the model at a time, at most.
        seen: Told after every pass how many images have passed; for a progress bar.

    Raises:
        ValueError: The model has no attention, or there are no images, or their sizes differ.
    """
    layers: dict[str, _Layer] = {}

    def see(name: str, rows: Rows, module: nn.Module) -> None:
        rows = _by_head(rows, module)
        heads = 1 if rows.head_axis is None else rows.shape[rows.head_axis]
        layer = layers.setdefault(name, _Layer(heads, rows.shape[-1], rows.head_axis is not None, with_itself))
        if (layer.count, layer.keys) != (heads, rows.shape[-1]):
            raise ValueError(
                f"{name} attends to {rows.shape[-1]} keys now and to {layer.keys} before; pass images of one size"
            )
        layer.add(rows)

    pass_attention(model, images, see, batch_size=batch_size, seen=seen)
    return {name: layer.similarity() for name, layer in layers.items()}


def plot_attention_similarity(
    similarities: Mapping[str, Mapping[str, LayerSimilarity]], path: str | Path | None = None
) -> "Figure":
    """Draw two panels, similarity between queries and between heads over layers, with one line for each model.

    Args:
        similarities: What `attention_similarity` gave, by the name that the legend shows. Layers without a figure leave
            a gap.
        path: A png, svg or pdf file to write, which appears complete or not at all.
    """
    check_results(path, similarities, LayerSimilarity, "attention_similarity", by_layer=True)
    figure = new_figure(10, 4.2)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, what in zip(panels, ("queries", "heads"), strict=True):
        found = {label: [getattr(layer, what) for layer in layers.values()] for label, layers in similarities.items()}
        lines = {label: [math.nan if x is None else x for x in values] for label, values in found.items()}
        draw_lines(panel, lines, "mean cosine similarity of attention" if what == "queries" else "")
        panel.set_title(f"between {what}")
        panel.set_ylim(-0.02, 1.02)
    if len(similarities) > 4:
        figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside right upper")
    else:
        panels[0].legend(frameon=False)
    if path is not None:
        save(figure, path)
    return figure


def _by_head(rows: Rows, module: nn.Module) -> Rows:
    """The rows, with heads apart where a layer of ours has them among the queries."""
    if isinstance(module, PartialAttention) and len(rows.shape) == 3:  # the single query of the background
        return rows.split((rows.shape[-2], 1), 1)
    if isinstance(module, GroupClassAttention):
        return rows.split((module.groups, module.heads, -1), 2)
    return rows


@dataclass
class _Layer:
    """What has been seen of one soft-max. A figure is a sum over groups of rows, divided by their number.

    Args:
        count: How many heads there are, or 1 if they are not apart.
        keys: How long the rows are.
        apart: Whether the heads have an axis.
        with_itself: Whether a row and itself make a pair.
    """

    count: int
    keys: int
    apart: bool
    with_itself: bool
    queries: list[Tensor] = field(init=False)
    heads: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.queries = [torch.zeros(self.count, dtype=torch.float64) for _ in range(2)]  # sums, groups; by head
        self.heads = [torch.zeros((), dtype=torch.float64) for _ in range(2)]

    def add(self, rows: Rows) -> None:
        axis = rows.head_axis
        others = [i for i in range(len(rows.shape) - 2) if i != axis]
        sums = counts = torch.zeros(())  # of an image's queries so far: their unit rows (b, ..., M), and how many
        for _, queries, logits, weights in rows.pieces():
            unit = logits.softmax(-1) if weights is None else weights.clone()
            unit.div_(torch.linalg.vector_norm(unit, dim=-1, keepdim=True))
            counted = torch.ones(unit.shape[:-1], dtype=unit.dtype, device=unit.device)
            if unit[..., 0].isnan().any():  # masked as a whole, or else the model computes nonsense: it should show
                hidden = logits.isneginf().all(-1)
                unit.masked_fill_(hidden[..., None], 0)
                counted.masked_fill_(hidden, 0)
            first, last = not queries.start, queries.stop >= rows.shape[-2]
            sums = unit.sum(-2) if first else sums + unit.sum(-2)
            counts = counted.sum(-1) if first else counts + counted.sum(-1)
            if last:
                for total, new in zip(self.queries, self._means(sums, counts), strict=True):
                    total += new.sum(others) if others else new
            if axis is not None:
                for total, new in zip(self.heads, self._means(unit.sum(axis), counted.sum(axis)), strict=True):
                    total += new.sum()

    def _means(self, sums: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cosines of groups of unit rows with these sums (..., M) and numbers (...), and which groups have one."""
        squares, n = sums.square().sum(-1).cpu().double(), rows.cpu().double()
        pairs = n * n if self.with_itself else n * (n - 1)
        means = (squares if self.with_itself else squares - n) / pairs.clamp(min=1)
        enough = pairs > 0
        return torch.where(enough, means, 0), enough.double()

    def similarity(self) -> LayerSimilarity:
        def mean(total: Tensor, groups: Tensor) -> float | None:
            if not groups:
                return None
            value = (total / groups).item()
            return value if math.isnan(value) else min(max(value, 0.0), 1.0)  # rounding may carry it past either

        queries = mean(*(x.sum() for x in self.queries))
        heads = mean(*self.heads)
        by_head = [mean(*head) for head in zip(*self.queries, strict=True)]
        reasons = ["no two queries share their keys"] if queries is None else []
        if heads is None:
            reasons.append("it has a single head" if self.apart else "its heads are not apart in an axis")
        return LayerSimilarity(queries, heads, tuple(by_head), self.keys, "; ".join(reasons))
