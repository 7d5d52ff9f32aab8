"""How densely a model attends: the entropy of its attention weights, layer by layer.

The measure of the context broadcasting paper: a row of weights that reaches all tokens alike has the largest entropy, a
row that picks one token has none.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...inspection.attention import pass_attention
from ...inspection.attention_rows import Rows
from ...inspection.passing import Seen
from ...visual.plots import save
from ..layer_chart import check_results, draw_legend, draw_lines, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class LayerEntropy(float):
    """The mean entropy of a layer's attention rows, in nats, over images, heads and queries.

    Args:
        value: The mean.
        heads: The mean of each head; one for all where the layer does not keep heads apart in an axis of its weights.
        keys: The length of the rows: how many tokens, or for attention among channels how many channels, are attended
            to.
    """

    heads: tuple[float, ...]
    keys: int

    def __new__(cls, value: float, heads: Iterable[float], keys: int) -> "LayerEntropy":
        self = super().__new__(cls, value)
        self.heads, self.keys = tuple(heads), int(keys)
        return self

    def __getnewargs__(self) -> tuple[float, tuple[float, ...], int]:  # ty: ignore[incompatible-method-override]
        return float(self), self.heads, self.keys

    @property
    def uniform(self) -> float:
        """The largest entropy there is, that of uniform attention: log(keys)."""
        return math.log(self.keys)

    @property
    def density(self) -> float:
        """The entropy as a share of the largest one. 1 is uniform attention, also where there is but one key."""
        return float(self) / self.uniform if self.keys > 1 else 1.0

    def record(self) -> dict[str, Any]:
        """Everything as plain numbers."""
        return {
            "entropy": float(self),
            "uniform": self.uniform,
            "density": self.density,
            "keys": self.keys,
            "heads": list(self.heads),
        }


def attention_entropy(
    model: nn.Module, images: Tensor | Iterable[Any], *, batch_size: int = 8, seen: Seen | None = None
) -> dict[str, LayerEntropy]:
    """Entropy of the attention weights of every layer of a model, by the layer's name, in the order of execution.

    The weights are those that the soft-max gives in eval mode: before dropout, and before what some models do to them
    afterwards (mixing of heads, differences). A layer with several soft-maxes has several entries, "name", "name#2" and
    so on. Only soft-maxes over the last axis count, and no row in which everything is masked. What a row is depends on
    the layer:

    - attention in windows: the keys of one window;
    - attention among channels (XCiT, every other layer of DaViT): channels instead of tokens;
    - super-token attention: one super token's weights over all of them. The association of pixels with super tokens is
      a soft-max over another axis, and does not count;
    - abstract tokens (MAT): a pixel's weights in its window; "#2" the abstract token's in its window; "#3" an abstract
      token's among those of the image; "#4" a pixel's among those of the image;
    - partial attention: a foreground token's weights among the foreground; "#2" the background's single query. The
      latter's rows are as long as there are tokens, and zero for the foreground;
    - EMSNet: a place's weights in its 3x3 window; "#2" a coarse cell's among all of them;
    - multi-token pooling: a learned token's weights over its group's tokens and the image.

    Args:
        model: Any model with attention that takes a batch of images: timm's, ours, yours.
        images: (B, C, H, W), or an iterable of such batches, or of tuples that begin with one, as a data loader is. All
            of one size. They are moved to the model's device and dtype.
        batch_size: How many images pass the model at a time, at most.
        seen: Told after every pass how many images have passed; for a progress bar.

    Raises:
        ValueError: The model has no attention, or there are no images, or their sizes differ.
    """
    layers: dict[str, _Layer] = {}

    def see(name: str, rows: Rows, _: nn.Module) -> None:
        found = _Layer.of(rows)
        layer = layers.setdefault(name, found)
        if layer is not found:
            layer.add(name, found)

    pass_attention(model, images, see, batch_size=batch_size, seen=seen)
    return {name: layer.entropy() for name, layer in layers.items()}


def plot_attention_entropy(
    entropies: Mapping[str, Mapping[str, LayerEntropy]], path: str | Path | None = None
) -> "Figure":
    """Draw one line for each model, entropy over layers, and a dashed one for uniform attention in the first.

    Args:
        entropies: What `attention_entropy` gave, by the name that the legend shows.
        path: A png, svg or pdf file to write, which appears complete or not at all.
    """
    check_results(path, entropies, LayerEntropy, "attention_entropy", by_layer=True)
    figure = new_figure(7, 4.2)
    panel = figure.subplots()
    lines = {label: [float(x) for x in layers.values()] for label, layers in entropies.items()}
    draw_lines(panel, lines, "attention entropy, nats")
    uniform = [x.uniform for x in next(iter(entropies.values())).values()]
    panel.plot(range(1, len(uniform) + 1), uniform, color="black", linestyle="--", linewidth=0.8, label="uniform")
    draw_legend(panel)
    if path is not None:
        save(figure, path)
    return figure


@dataclass
class _Layer:
    """What has been seen of one soft-max.

    Args:
        sums: Of the entropies of all rows, by head.
        rows: How many there were, by head.
        keys: Their length.
    """

    sums: Tensor
    rows: Tensor
    keys: int

    @classmethod
    def of(cls, rows: Rows) -> "_Layer":
        heads = 1 if rows.head_axis is None else rows.shape[rows.head_axis]
        layer = cls(torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64), rows.shape[-1])
        others = [i for i in range(len(rows.shape) - 1) if i != rows.head_axis]
        for _, _, logits, weights in rows.pieces():
            entropies, hidden = _entropies(logits, ours=weights is None)
            layer.sums += entropies.cpu().double().sum(others)
            layer.rows += entropies.numel() // heads
            if hidden is not None:
                layer.rows -= hidden.cpu().double().sum(others)
        return layer

    def add(self, name: str, other: "_Layer") -> None:
        if (self.keys, len(self.rows)) != (other.keys, len(other.rows)):
            raise ValueError(
                f"{name} attends to {other.keys} keys now and to {self.keys} before; pass images of one size"
            )
        self.sums += other.sums
        self.rows += other.rows

    def entropy(self) -> LayerEntropy:
        largest = math.log(self.keys)  # which rounding may carry a mean past
        heads = (self.sums / self.rows).clamp(max=largest).tolist()
        return LayerEntropy((self.sums.sum() / self.rows.sum()).clamp(max=largest).item(), heads, self.keys)


def _entropies(logits: Tensor, ours: bool) -> tuple[Tensor, Tensor | None]:
    """Of the soft-max of logits (..., M), each (...), which the weights need not be there for; 0 where all is masked.

    With z the logits less the largest, and s the sum of exp(z): log(s) - sum(exp(z) z) / s. Nothing cancels in it.

    Returns:
        The entropies, and which rows are masked as a whole, or None if none is.
    """
    largest = logits.amax(-1, keepdim=True)
    z = logits.sub_(largest) if ours else logits - largest
    terms = z.exp()
    total = terms.sum(-1)
    entropies = total.log() - terms.mul_(z).sum(-1) / total
    if not entropies.isnan().any():
        return entropies, None
    # Zero times infinity where something is masked; or else the model computes nonsense, and should show it.
    terms = z.clamp_(min=-800).exp()  # zero, also in float64
    total = terms.sum(-1)
    hidden = largest.squeeze(-1).isneginf()
    return (total.log() - terms.mul_(z).sum(-1) / total).masked_fill_(hidden, 0), hidden
