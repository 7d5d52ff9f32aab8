"""How much of an image two patches need around them to act together: the multi-order interaction strength.

The measure of the EMSNet chapter (Eq. 3.13 and 3.14), after Deng et al., ICLR 2022. An image is cut into n patches;
v(S) is what a model gives for its class when only the patches S are there and the rest shows a baseline. Two patches
interact in the context S by v(S+i+j) - v(S+i) - v(S+j) + v(S); the mean of that over contexts of m patches is their
interaction of order m. The strength of an order is the mean size of these interactions, as a multiple of what it is on
average over all orders that were measured.
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...inspection.passing import Seen, batches, check_model, pass_images
from ...visual.plots import save
from ..layer_chart import check_results, draw_legend, new_figure, style_of
from ..patch_subsets import designed, masked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Evenly spaced: the strength is a multiple of the mean over them.
ORDERS = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)
GRID = (16, 16)
SCORES = ("log-odds", "logit")


@dataclass(frozen=True)
class InteractionStrength:
    """Interaction strength of each order, and how well it is known.

    Args:
        orders: m, the patches in a context, ascending.
        strength: J of each order; their mean is 1, or all are 0 where no two patches interact.
        error: Its standard error. The units are the images: what one of them gives, with its own pairs and contexts,
            is one draw. It is the jackknife's over images, so it covers images, pairs, contexts and denominator;
            with fewer than some 20 images it is a little small. Of a single image the units are its pairs, and it
            says nothing about other images; nan of a single pair.
        floor: The strength that pairs would show that do not interact on average, by the scatter of their few contexts
            alone, were that normal. A strength near it wants more contexts. 0 where all contexts were taken; nan if
            one context was drawn, which has no scatter.
        absolute: The mean size of the interactions themselves, in units of the score: the numerator of J.
        images: How many images there were, and
        pairs: how many pairs of each, and
        contexts: how many contexts, at most, of each pair and order.
        grid: Patches from top to bottom, and from left to right.
        score: Of the class: "log-odds" or "logit".
        seed: Of the pairs and contexts.
    """

    orders: tuple[int, ...]
    strength: tuple[float, ...]
    error: tuple[float, ...]
    floor: tuple[float, ...]
    absolute: tuple[float, ...]
    images: int
    pairs: int
    contexts: int
    grid: tuple[int, int]
    score: str
    seed: int

    @property
    def fractions(self) -> tuple[float, ...]:
        """The orders as shares of all patches, m / n."""
        return tuple(order / math.prod(self.grid) for order in self.orders)

    def record(self) -> dict[str, Any]:
        """Everything as plain numbers; None for what is not known."""
        return {
            "grid": list(self.grid),
            "images": self.images,
            "pairs": self.pairs,
            "contexts": self.contexts,
            "score": self.score,
            "seed": self.seed,
            "error_over": "images" if self.images > 1 else "pairs",
            "orders": [
                {"order": order, "fraction": fraction, "strength": strength}
                | {"error": _known(error), "floor": _known(floor), "absolute": absolute}
                for order, fraction, strength, error, floor, absolute in zip(
                    self.orders, self.fractions, self.strength, self.error, self.floor, self.absolute, strict=True
                )
            ],
        }


def interaction_strength(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    grid: int | Sequence[int] = GRID,
    orders: float | Sequence[float] = ORDERS,
    pairs: int = 6,
    contexts: int = 6,
    target: str | int | Sequence[int] | Tensor | None = None,
    score: str = "log-odds",
    baseline: float | Sequence[float] = 0.0,
    seed: int = 0,
    batch_size: int = 32,
    seen: Seen | None = None,
) -> InteractionStrength:
    """Strength of the interactions between patches of an image, by how many patches are around them.

    Every image passes the model `passes_per_image` times, 1,441 by default: a few images are a large measurement.
    Pairs and contexts depend on the seed and on the number of the image, and not on the model: models that are
    measured on the same images with the same seed can be compared pair by pair. The mean size of an interaction that
    is itself a mean over few contexts comes out too large, at most by about `floor`.

    Args:
        model: Any classifier: (B, C, H, W) to (B, classes).
        images: (B, C, H, W), or an iterable of such batches, or of tuples that begin with one. Any sizes.
        grid: Patches from top to bottom and from left to right, or one number for both; sizes that they do not divide
            give unequal patches. The thesis has 16 x 16, of 14 pixels each.
        orders: Context sizes: shares of all patches if they are floats, 0 to 1, and numbers of patches if integers.
            They are rounded, n - 2 at most; those that fall together count once.
        pairs: How many pairs of patches are drawn of each image; all, if there are no more.
        contexts: How many contexts are drawn of each pair and order; all, if there are no more.
        target: The class whose score it is: what the model answers to the whole image if None, "label" for the
            second of the tuples that the images come in, one for all, or one for each image in their order.
        score: "log-odds" of the class's probability, log p / (1 - p), as in the paper; or its "logit".
        baseline: What stands for an absent patch, one value or one for each channel. 0 is the mean colour of images
            that were normalised.
        seed: Of the pairs and contexts.
        batch_size: How many masked images pass the model at a time, at most.
        seen: Told after every pass how many images are done.

    Raises:
        ValueError: There are no images, or an image has fewer pixels than patches, or the model is no classifier.
    """
    check_model(model)
    design = designed(grid, orders, pairs, contexts)
    if score not in SCORES:
        raise ValueError(f"score={score!r} is not known; choose {' or '.join(SCORES)}")
    sizes: list[Tensor] = []  # of each image: (pairs, orders), the mean over contexts
    noise: list[Tensor] = []  # the variance of that mean
    for batch, rest in batches(images):
        labels = _labels(target, rest, len(sizes), len(batch))
        for image, label in zip(batch, labels, strict=True):
            done = len(sizes)
            subsets = design.subsets(random.Random(f"{seed} {done}"))
            tick = None if seen is None else (lambda _, seen=seen, done=done: seen(done))
            answers = _Answers(label, score)
            shown = masked(image, subsets, design.grid, baseline, batch_size)
            pass_images(model, shown, batch_size=batch_size, seen=tick, see=answers.see)
            found = design.interactions(torch.cat(answers.scores)[1:])
            sizes.append(found[0].abs())
            noise.append(found[1])
            if seen is not None:
                seen(done + 1)
    if not sizes:
        raise ValueError("images are empty; pass one at least, as (B, C, H, W)")
    units = torch.stack([size.mean(0) for size in sizes]) if len(sizes) > 1 else sizes[0]  # units, orders
    strength, error, whole = _relative(units)
    scatter = torch.stack([variance.sqrt().mean(0) for variance in noise]).mean(0) * (2 / math.pi) ** 0.5
    floor = scatter / whole if whole else torch.zeros_like(scatter)
    return InteractionStrength(
        orders=design.orders,
        strength=tuple(strength.tolist()),
        error=tuple(error.tolist()),
        floor=tuple(floor.tolist()),
        absolute=tuple(units.mean(0).tolist()),
        images=len(sizes),
        pairs=design.pairs,
        contexts=contexts,
        grid=design.grid,
        score=score,
        seed=seed,
    )


def passes_per_image(
    *, grid: int | Sequence[int] = GRID, orders: float | Sequence[float] = ORDERS, pairs: int = 6, contexts: int = 6
) -> int:
    """How often one image passes the model: once as it is, and four times for each pair, order and context."""
    design = designed(grid, orders, pairs, contexts)
    return 1 + 4 * design.pairs * sum(map(design.drawn, design.orders))


def plot_interaction_strength(results: Mapping[str, InteractionStrength], path: str | Path | None = None) -> "Figure":
    """Draw strength over order, one line for each model, in a band of two standard errors to either side.

    The dotted line in a model's colour is its floor: what the scatter of its contexts alone would show.

    Args:
        results: What `interaction_strength` gave, by the name that the legend shows.
        path: A png, svg or pdf file to write, which appears complete or not at all.
    """
    check_results(path, results, InteractionStrength, "interaction_strength")
    figure = new_figure(7, 4.2)
    panel = figure.subplots()
    for i, (label, result) in enumerate(results.items()):
        style, places = style_of(i), result.fractions
        colour = style["color"]
        panel.plot(places, result.strength, **style, label=label)
        lower, upper = (
            [s + sign * 2 * e for s, e in zip(result.strength, result.error, strict=True)] for sign in (-1, 1)
        )
        panel.fill_between(places, lower, upper, color=colour, alpha=0.2, linewidth=0)
        panel.plot(places, result.floor, color=colour, linestyle=":", linewidth=1)
    panel.plot([], [], color="grey", linestyle=":", linewidth=1, label="floor: scatter of contexts")
    panel.set_xlabel("order: share of the patches that are there, m / n")
    panel.set_ylabel("relative interaction strength J, ± 2 standard errors")
    panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
    draw_legend(panel)
    if path is not None:
        save(figure, path)
    return figure


def _labels(target: Any, rest: tuple[Any, ...], done: int, count: int) -> list[int | None]:
    """The class of each image of a batch; None for what the model answers."""
    if target is None:
        return [None] * count
    if isinstance(target, str):
        if target != "label":
            raise ValueError(f'target={target!r} is not known; pass "label", a class, one for each image, or None')
        if not rest:
            raise ValueError('target="label" needs labels; pass images as batches of (images, labels)')
        given = rest[0]
    elif isinstance(target, int):
        given = [target] * count
    else:
        given = target[done : done + count]
    labels = [int(label) for label in given]
    if len(labels) != count:
        raise ValueError(f"targets end with image {done + len(labels)}, and there are more; pass one for each")
    return [*labels]


class _Answers:
    """Scores of one class in all that a model answers to one image, the whole of which comes first.

    Args:
        label: The class; what the model answers to the whole image if None.
        score: "log-odds" or "logit".
    """

    def __init__(self, label: int | None, score: str):
        self.label, self.score = label, score
        self.scores: list[Tensor] = []

    def see(self, logits: Any, rest: Any) -> None:
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            what = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ValueError(f"the model gives {what}; interactions need a classifier that gives (B, classes)")
        classes = logits.shape[1]
        if classes < 2 and self.score == "log-odds":
            raise ValueError(f"log-odds need two classes, and the model gives {classes}; pass score='logit'")
        if self.label is None:
            self.label = int(logits[0].argmax())
        if not 0 <= self.label < classes:
            raise ValueError(f"the target is class {self.label}, and the model has {classes}; pass 0 to {classes - 1}")
        logits = logits.cpu().double()
        scores = logits[:, self.label]
        if self.score == "log-odds":  # log p / (1 - p), without a p that rounds to 1
            others = torch.cat([logits[:, : self.label], logits[:, self.label + 1 :]], 1)
            scores = scores - others.logsumexp(1)
        if not scores.isfinite().all():
            raise ValueError("the model gives scores that are not finite; look at its weights or use float32")
        self.scores.append(scores)


def _relative(units: Tensor) -> tuple[Tensor, Tensor, float]:
    """Sizes (units, orders) -> their mean over units as a multiple of the mean over all, its error, and that mean."""
    count, mean = len(units), units.mean(0)
    whole = mean.mean()
    if whole == 0:
        return mean, torch.zeros_like(mean), 0.0
    error = torch.full_like(mean, math.nan)
    if count > 1:  # jackknife: how the ratio varies when one unit is left out
        without = (units.sum(0) - units) / (count - 1)
        without = without / without.mean(1, keepdim=True).clamp(min=1e-300)
        error = ((without - without.mean(0)).square().sum(0) * (count - 1) / count).sqrt()
    return mean / whole, error, whole.item()


def _known(number: float) -> float | None:
    return None if math.isnan(number) else number
