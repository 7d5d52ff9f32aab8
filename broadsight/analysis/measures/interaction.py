"""How much of an image two patches need around them to act together: the multi-order interaction strength.

As in the EMSNet chapter (Eq. 3.13 and 3.14), after Deng et al., ICLR 2022: v(S) is a model's score for its class when
of n patches only S are shown. Two interact in the context S by v(S+i+j) - v(S+i) - v(S+j) + v(S); the mean of that over
contexts of m patches is their interaction of order m, and its mean size the strength, relative to the other orders.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor, nn

from ...inspection.passing import NO_IMAGES, Images, Seen, batches, check_model, pass_images
from .base import OF_CLASSIFIERS, Measure, Rows, register_measure
from .frame import Figure, Result, draw_band, draw_legend, draws, new_figure, plain, style_of

# Evenly spaced, since the strength is a multiple of the mean over them.
ORDERS = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)
GRID = (16, 16)
SCORES = ("log-odds", "logit")


@dataclass(frozen=True)
class InteractionStrength(Result):
    """Interaction strength of each order, and how well it is known.

    The error is by the jackknife over images, a little small with fewer than some 20; of a single image over its pairs,
    and nan of a single pair. A strength near the floor wants more contexts: that much their scatter alone gives pairs
    that do not interact on average, 0 where all contexts were taken, nan for a single one.
    """

    orders: tuple[int, ...]  # m, the patches in a context, ascending
    strength: tuple[float, ...]  # J of each order; their mean is 1, or all are 0 where no two patches interact
    error: tuple[float, ...]
    floor: tuple[float, ...]
    absolute: tuple[float, ...]  # the mean size of the interactions, in units of the score: the numerator of J
    images: int
    pairs: int  # of each image
    contexts: int  # of each pair and order
    grid: tuple[int, int]
    score: str
    seed: int

    @property
    def fractions(self) -> tuple[float, ...]:
        """m / n: the orders as shares of all patches."""
        return tuple(order / math.prod(self.grid) for order in self.orders)

    def record(self) -> dict[str, Any]:
        columns: dict[str, Iterable[Any]] = dict(order=self.orders, fraction=self.fractions, strength=self.strength)
        columns |= dict(error=self.error, floor=self.floor, absolute=self.absolute)
        settings = {name: getattr(self, name) for name in ("grid", "images", "pairs", "contexts", "score", "seed")}
        orders = [dict(zip(columns, one, strict=True)) for one in zip(*columns.values(), strict=True)]
        return plain({**settings, "error_over": "images" if self.images > 1 else "pairs", "orders": orders})


def interaction_strength(
    model: nn.Module,
    images: Images,
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
    """Strength of the interactions between patches of an image, by the number of patches around them.

    Every image passes the model once as it is and four times for each pair, order and context, 1,441 times by default:
    a few images are a large measurement. Pairs and contexts depend on the seed and the number of the image alone:
    models that are measured on the same images with the same seed can be compared pair by pair. The mean size of an
    interaction that is itself a mean over few contexts comes out too large, at most by about `floor`.

    Args:
        grid: Patches down and across, or one number for both; the thesis has 16 x 16, of 14 pixels each.
        orders: Context sizes: floats are shares of all patches, 0 to 1, rounded to n - 2 at most; integers numbers.
        pairs, contexts: Pairs drawn of each image, and contexts of each pair and order; all, if there are no more.
        target: The class whose score it is: the model's answer to the whole image if None, "label" for the second of
            the tuples that the images come in, one for all, or one for each image in their order.
        score: "log-odds" of the class's probability, log p / (1 - p), as in the paper; or its "logit".
        baseline: Stands for an absent patch, one value or one for each channel; 0 is the mean of normalised images.
        batch_size: Masked images that pass the model at a time, at most.
    """
    check_model(model)
    design = Design(grid, orders, pairs, contexts)
    if score not in SCORES:
        raise ValueError(f"score={score!r} is not known; choose {' or '.join(SCORES)}")
    tell = seen or (lambda done: None)
    sizes: list[Tensor] = []  # of each image (pairs, orders): the size of the mean over contexts
    noise: list[Tensor] = []  # and the variance of that mean
    for done, (image, label) in enumerate(_labelled(images, target)):
        answers = _Answers(label, score)
        subsets = design.subsets(random.Random(f"{seed} {done}"))
        shown = masked(image, subsets, design.grid, baseline, batch_size)
        pass_images(model, shown, batch_size=batch_size, seen=lambda passed, done=done: tell(done), see=answers.see)
        means, variances = design.interactions(torch.cat(answers.scores)[1:])
        sizes.append(means.abs())
        noise.append(variances)
        tell(done + 1)
    if not sizes:
        raise ValueError(NO_IMAGES)
    units = torch.stack([size.mean(0) for size in sizes]) if len(sizes) > 1 else sizes[0]  # units, orders
    scatter = torch.stack([variance.sqrt().mean(0) for variance in noise]).mean(0) * (2 / math.pi) ** 0.5
    absolute, count = units.mean(0), len(units)
    strength = error = floor = torch.zeros_like(absolute)
    if whole := absolute.mean().item():  # the figures are multiples of it
        strength, floor, error = absolute / whole, scatter / whole, torch.full_like(absolute, math.nan)
        if count > 1:  # jackknife: how the ratio varies when one unit is left out
            without = (units.sum(0) - units) / (count - 1)
            without = without / without.mean(1, keepdim=True).clamp(min=1e-300)
            error = ((without - without.mean(0)).square().sum(0) * (count - 1) / count).sqrt()
    figures = dict(strength=strength, error=error, floor=floor, absolute=absolute)
    lists: dict[str, Any] = {name: tuple(values.tolist()) for name, values in figures.items()}
    how: dict[str, Any] = dict(pairs=design.pairs, contexts=contexts, grid=design.grid, score=score, seed=seed)
    return InteractionStrength(design.orders, **lists, images=len(sizes), **how)


@draws(InteractionStrength, "interaction_strength")
def plot_interaction_strength(results: Mapping[str, InteractionStrength]) -> Figure:
    """Draw strength over order in a band of two standard errors, and dotted the floor that scatter alone gives."""
    figure = new_figure(7, 4.2)
    panel = figure.subplots()
    for i, (label, result) in enumerate(results.items()):
        style, places = style_of(i), result.fractions
        panel.plot(places, result.strength, **style, label=label)
        draw_band(panel, places, result.strength, [2 * error for error in result.error], style["color"], 0.2)
        panel.plot(places, result.floor, color=style["color"], linestyle=":", linewidth=1)
    panel.plot([], [], color="grey", linestyle=":", linewidth=1, label="floor: scatter of contexts")
    panel.set(xlabel="order: share of the patches that are there, m / n", ylim=(0, None))
    panel.set_ylabel("relative interaction strength J, ± 2 standard errors")
    draw_legend(panel)
    return figure


def rows(result: InteractionStrength) -> Rows:
    columns = ("order", "part of patches", "strength", "standard error", "floor", "absolute")
    figures = (result.fractions, result.strength, result.error, result.floor, result.absolute)
    return columns, list(zip(map(str, result.orders), *figures, strict=True))


def _labelled(images: Any, target: Any) -> Iterator[tuple[Tensor, int | None]]:
    """Every image with the class whose score it is; None for the model's answer."""
    if isinstance(target, str) and target != "label":
        raise ValueError(f'target={target!r} is not known; pass "label", a class, one for each image, or None')
    done = 0
    for batch, rest in batches(images):
        if isinstance(target, str) and not rest:
            raise ValueError('target="label" needs labels; pass images as batches of (images, labels)')
        if target is None or isinstance(target, int):
            classes = [target] * len(batch)
        else:
            classes = list(map(int, rest[0] if isinstance(target, str) else target[done : done + len(batch)]))
        done += len(classes)
        if len(classes) != len(batch):
            raise ValueError(f"targets end with image {done}, and there are more; pass one for each")
        yield from zip(batch, classes, strict=True)


class _Answers:
    """Scores of a class, if None of the first answer, in all answers of a model to the subsets of one image."""

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


class Design:
    """The subsets of patches that are shown of an image; orders are numbers of patches here, each once, ascending."""

    def __init__(self, grid: int | Sequence[int], orders: float | Sequence[float], pairs: int, contexts: int):
        sides = (grid, grid) if isinstance(grid, int) else tuple(grid)
        if len(sides) != 2 or not all(isinstance(n, int) and n > 0 for n in sides) or math.prod(sides) < 2:
            raise ValueError(f"grid={grid} has no two patches; pass (rows, columns), such as (16, 16)")
        for name, number in (("pairs", pairs), ("contexts", contexts)):
            if number < 1:
                raise ValueError(f"{name}={number} measures nothing; choose 1 or more")
        patches, sizes = math.prod(sides), set()
        for order in orders if isinstance(orders, Sequence) else [orders]:
            share = not isinstance(order, int)
            if not isinstance(order, int | float) or not 0 <= order <= (1 if share else patches - 2):
                meant = "a share of the patches, 0 to 1" if share else f"a number of patches, 0 to {patches - 2}"
                raise ValueError(f"orders hold {order}; expected {meant}")
            sizes.add(min(round(order * patches), patches - 2) if share else int(order))
        if not sizes:
            raise ValueError("orders are empty; pass shares of the patches, such as 0.05, 0.5 and 0.95")
        self.grid, self.patches, self.orders = (sides[0], sides[1]), patches, tuple(sorted(sizes))
        self.pairs, self.contexts = min(pairs, math.comb(patches, 2)), contexts

    def subsets(self, draw: random.Random) -> Iterator[tuple[int, ...]]:
        """The patches shown: all; then by pair, order and context, the context alone, with i, with j, and with both."""
        yield tuple(range(self.patches))
        for number in draw.sample(range(math.comb(self.patches, 2)), self.pairs):
            j = (1 + math.isqrt(1 + 8 * number)) // 2  # pairs i < j are numbered by j, then i
            i = number - math.comb(j, 2)
            others = [patch for patch in range(self.patches) if patch not in (i, j)]
            for order in self.orders:
                few = math.comb(len(others), order) <= self.contexts
                contexts: dict[tuple[int, ...], None] = dict.fromkeys(combinations(others, order) if few else ())
                while not few and len(contexts) < self.contexts:  # different ones, in the order in which they are drawn
                    contexts[tuple(sorted(draw.sample(others, order)))] = None
                for context in contexts:
                    yield from (context, (*context, i), (*context, j), (*context, i, j))

    def interactions(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of all subsets but the first -> (pairs, orders) mean over contexts, and the variance of that mean."""
        alone, with_i, with_j, both = scores.view(self.pairs, -1, 4).unbind(-1)
        there = [math.comb(self.patches - 2, order) for order in self.orders]
        parts = (both - with_i - with_j + alone).split([min(self.contexts, count) for count in there], 1)
        variances = []
        for count, part in zip(there, parts, strict=True):
            untaken = 1 - part.shape[1] / count
            scatter = part.var(1) if part.shape[1] > 1 else torch.full_like(part[:, 0], math.nan)
            variances.append(scatter / self.contexts * untaken if untaken else torch.zeros_like(scatter))
        return torch.stack([part.mean(1) for part in parts], 1), torch.stack(variances, 1)


def masked(image: Tensor, subsets: Iterator, grid: tuple[int, int], baseline: Any, batch_size: int) -> Iterator[Tensor]:
    """Batches of an image (C, H, W) in which only the patches of each subset are shown."""
    (channels, *size), (height, width) = image.shape, grid
    if size[0] < height or size[1] < width:
        raise ValueError(f"an image of {size[0]}x{size[1]} has no {height}x{width} patches; choose a smaller grid")
    absent = torch.as_tensor(baseline, dtype=image.dtype, device=image.device)
    if absent.numel() not in (1, channels):
        raise ValueError(f"baseline has {absent.numel()} values; expected 1 or one for each of {channels} channels")
    rows, columns = (torch.arange(n, device=image.device) * cells // n for n, cells in zip(size, grid, strict=True))
    while chosen := list(islice(subsets, batch_size)):
        there = torch.zeros(len(chosen), height * width, dtype=torch.bool)
        images = [number for number, subset in enumerate(chosen) for _ in subset]
        there[images, [patch for subset in chosen for patch in subset]] = True
        there = there.to(image.device).view(-1, 1, height, width)[:, :, rows][..., columns]  # B 1 H W
        yield torch.where(there, image, absent.view(-1, 1, 1))


ABOUT = "how strongly pairs of patches act together, by how much of the image is around them"
SOURCE = "EMSNet, Eq. 3.13-3.14 and Fig. 3.7"
OPTIONS = {
    "grid": "patches down and across, such as 16,16",
    "orders": "how much is around a pair: parts of all patches, or numbers of them",
    "pairs": "drawn of each image",
    "contexts": "drawn of each pair and order",
    "target": "class whose score it is: a number, label, or without it the answer",
    "score": "log-odds or logit",
    "baseline": "what stands for an absent patch, in normalised values",
}
FUNCTIONS = interaction_strength, plot_interaction_strength, rows
TAKES: dict[str, Any] = dict(samples=8, batch=32, options=OPTIONS, order=8)
register_measure(Measure("interaction", ABOUT, SOURCE, *FUNCTIONS, **OF_CLASSIFIERS, **TAKES))
