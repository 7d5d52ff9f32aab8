"""How densely a model attends: the entropy of its attention weights, layer by layer.

As in the context broadcasting paper. A row that reaches all tokens alike has the largest entropy, one that picks a
single token has none.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...inspection.attention_rows import Rows as AttentionRows
from ...inspection.passing import Images, Seen
from .base import OF_ATTENTION, Measure, Rows, register_measure
from .frame import AttentionSum, Figure, draw_legend, draw_lines, draws, new_figure, sum_attention


class LayerEntropy(float):
    """The mean entropy of a layer's attention rows, in nats, over images, heads and queries."""

    heads: tuple[float, ...]  # the mean of each head; one for all where they have no axis of their own in the weights
    keys: int  # the length of the rows: the number of tokens, or for attention among channels of channels

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
        """The entropy as a share of the largest one: 1 is uniform attention, and attention to a single key."""
        return float(self) / self.uniform if self.keys > 1 else 1.0

    def record(self) -> dict[str, Any]:
        numbers = dict(entropy=float(self), uniform=self.uniform, density=self.density)
        return numbers | dict(keys=self.keys, heads=list(self.heads))


def attention_entropy(
    model: nn.Module, images: Images, *, batch_size: int = 8, seen: Seen | None = None
) -> dict[str, LayerEntropy]:
    """Entropy of the attention weights of every layer of a model, by the layer's name, in the order of execution.

    The weights are those that the soft-max over the last axis gives in eval mode, before dropout and whatever follows.
    A layer with several of them has several entries, "name", "name#2" and so on; rows in which everything is masked do
    not count. All images have one size. What a row is depends on the layer:

    - attention in windows: the keys of one window; among channels (XCiT, DaViT): channels instead of tokens;
    - super-token attention: one super token's weights over all of them, and not the association of pixels with them;
    - abstract tokens (MAT): a pixel's weights in its window; "#2" the abstract token's in its window; "#3" an abstract
      token's among those of the image; "#4" a pixel's among those of the image;
    - partial attention: a foreground token's among the foreground; "#2" the background's single query among all tokens;
    - EMSNet: a place's weights in its 3x3 window; "#2" a coarse cell's among all of them;
    - multi-token pooling: a learned token's weights over its group's tokens and the image.
    """
    layers = sum_attention(model, images, _Layer, batch_size=batch_size, seen=seen)
    return {name: layer.entropy() for name, layer in layers.items()}


@draws(LayerEntropy, "attention_entropy", by_layer=True)
def plot_attention_entropy(entropies: Mapping[str, Mapping[str, LayerEntropy]]) -> Figure:
    """Draw one line for each model, entropy over layers, and a dashed one for uniform attention in the first."""
    figure = new_figure(7, 4.2)
    panel = figure.subplots()
    lines = {label: [float(x) for x in layers.values()] for label, layers in entropies.items()}
    draw_lines(panel, lines, "attention entropy, nats")
    uniform = [x.uniform for x in next(iter(entropies.values())).values()]
    panel.plot(range(1, len(uniform) + 1), uniform, color="black", linestyle="--", linewidth=0.8, label="uniform")
    draw_legend(panel)
    return figure


def rows(result: Mapping[str, LayerEntropy]) -> Rows:
    cells = [(name, x.keys, len(x.heads), float(x), x.uniform, 100 * x.density) for name, x in result.items()]
    return ("layer", "keys", "heads", "entropy, nats", "uniform", "% of uniform"), cells


class _Layer(AttentionSum):
    """Sums of the entropies of all rows, and the numbers of rows, by head."""

    def __init__(self, rows: AttentionRows):
        super().__init__(rows)
        self.sums, self.rows = torch.zeros(2, self.heads, dtype=torch.float64)

    def add(self, rows: AttentionRows) -> None:
        others = [i for i in range(len(rows.shape) - 1) if i != rows.head_axis]
        for _, _, logits, weights in rows.pieces():
            entropies, counted = _entropies(logits, ours=weights is None)
            self.sums += entropies.cpu().double().sum(others)
            self.rows += entropies.numel() // self.heads if counted is None else counted.cpu().double().sum(others)

    def entropy(self) -> LayerEntropy:
        largest = math.log(self.keys)  # which rounding may carry a mean past
        heads = (self.sums / self.rows).clamp(max=largest).tolist()
        return LayerEntropy((self.sums.sum() / self.rows.sum()).clamp(max=largest).item(), heads, self.keys)


def _entropies(logits: Tensor, ours: bool) -> tuple[Tensor, Tensor | None]:
    """Entropies (...) of the soft-max of logits (..., M), which may be `ours` to write to, and which rows count.

    With z the logits less the largest, and s the sum of exp(z): log(s) - sum(exp(z) z) / s, in which nothing cancels.
    """
    largest = logits.amax(-1, keepdim=True)
    z = logits.sub_(largest) if ours else logits - largest
    terms = z.exp()
    total = terms.sum(-1)
    entropies = total.log() - terms.mul_(z).sum(-1) / total
    if not entropies.isnan().any():
        return entropies, None  # all rows count
    # Zero times infinity where something is masked; or else the model computes nonsense, and should show it.
    terms = z.clamp_(min=-800).exp()  # zero, also in float64
    total = terms.sum(-1)
    hidden = largest.squeeze(-1).isneginf()
    return (total.log() - terms.mul_(z).sum(-1) / total).masked_fill_(hidden, 0), ~hidden


ABOUT = "how widely every attention spreads: from one token, 0, to all alike", "context broadcasting, Sec. 3"
register_measure(Measure("entropy", *ABOUT, attention_entropy, plot_attention_entropy, rows, **OF_ATTENTION, order=4))
