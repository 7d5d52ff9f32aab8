"""How fast a classifier loses its answer when pixels go, the most salient first; and two orders to compare with.

The removal itself, the orders and the saliencies are those of the suite "salient" of `broadsight eval`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ...data.sources import Source
from ...evaluation.robustness import ORDERS, Choices, Tested, run_suite
from ...evaluation.saliency import Saliency, about, from_name
from ...visual.plots import PALETTE
from .base import OF_CLASSIFIERS, Measure, Rows, register_measure
from .frame import Figure, Result, draw_band, draws, new_figure

FRACTIONS = tuple(tenth / 10 for tenth in range(10))
STYLES = dict(zip(ORDERS, (("-", "o"), ("--", "s"), (":", "^")), strict=True))  # line and marker


@dataclass(frozen=True)
class RemovalCurves(Result):
    """Top-1 in per cent against the part of the pixels that is removed."""

    saliency: str  # how salient pixels are found, in words
    images: int  # their number
    fractions: tuple[float, ...]  # parts of 1, from 0 on
    top1: dict[str, tuple[float, ...]]  # by order of removal, one for each fraction
    areas: dict[str, float]  # the mean height of each curve, in per cent
    skipped: dict[str, str] = field(default_factory=dict)  # images that could not be read, and why

    @property
    def gaps(self) -> dict[str, float]:
        """How much higher the other orders' curves are than that of the most salient first, on average."""
        salient, *others = ORDERS
        return {order: self.areas[order] - self.areas[salient] for order in others}

    def errors(self, order: str) -> tuple[float, ...]:
        """Standard error of each top-1, in per cent: as if images were drawn by chance."""
        return tuple((value * (100 - value) / self.images) ** 0.5 for value in self.top1[order])

    def record(self) -> dict[str, Any]:
        return super().record() | dict(errors={order: self.errors(order) for order in self.top1}, gaps=self.gaps)


def salient_removal(
    classifier: Tested,
    source: Source,
    *,
    saliency: Saliency | str | None = None,
    fractions: Sequence[float] = FRACTIONS,
    dino_checkpoint: str | Path | None = None,
    batch_size: int = 64,
    workers: int = 0,
    seed: int = 0,
    strict: bool = False,
    seen: Callable[[int], None] | None = None,
) -> RemovalCurves:
    """Top-1 of a classifier while pixels are set to the mean colour: salient first, by chance, least salient first.

    Args:
        classifier: As `open_classifier` gives: a model, its transforms, its classes.
        source: Images whose labels are numbers of the classifier's classes.
        saliency: "scenes", "gradcam", "dino", "file.py:function", or a function from normalised images (B, C, H, W)
            and their batch to (B, H, W); by default the scenes' own where there are scenes, and else gradcam.
        fractions: Parts of the pixels that are removed; 0 is always measured too.
        dino_checkpoint: Weights of "dino"; timm's if None.
        seed: Of ties in saliency and of the order by chance.
        seen: Called with the number of images that are done in all cases.
    """
    if isinstance(classifier, nn.Module):
        hint = "pass what broadsight.runs.classifier.open_classifier gives"
        raise ValueError(f"a {type(classifier).__name__} alone does not say how images reach it; {hint}")
    choices = Choices(fractions=tuple(fractions))
    if saliency is None or isinstance(saliency, str):
        saliency = from_name(saliency, classifier, source, checkpoint=dino_checkpoint)
    elif dino_checkpoint is not None:
        raise ValueError("dino_checkpoint is given with a saliency of your own; it is for the saliency 'dino'")
    passes, done = len(choices.cases("salient")), 0

    def count(images: int, doing: str) -> None:
        nonlocal done
        done += images
        if seen is not None:
            seen(done // passes)

    options: dict[str, Any] = dict(batch=batch_size, workers=workers, seed=seed, strict=strict, seen=count)
    suite = run_suite("salient", classifier, source, choices=choices, saliency=saliency, **options)
    top1 = {order: tuple(top1 for _, top1 in suite.curve(order)) for order in ORDERS}
    areas = {order: suite.summary[f"area, {order}"] for order in ORDERS}
    at = tuple(at for at, _ in suite.curve(ORDERS[0]))
    return RemovalCurves(about(saliency), suite.rows[0].images, at, top1, areas, dict(suite.skipped))


@draws(RemovalCurves, "salient_removal")
def plot_salient_removal(curves: Mapping[str, RemovalCurves]) -> Figure:
    """Draw top-1 against the part that is removed, a line for each order, with bands of one standard error."""
    figure = new_figure(9, 4.4)
    from matplotlib.lines import Line2D

    panel = figure.subplots()
    handles = []
    for place, (label, one) in enumerate(curves.items()):
        colour, at = PALETTE[place % len(PALETTE)], [100 * fraction for fraction in one.fractions]
        for order, (line, marker) in STYLES.items():
            style: dict[str, Any] = dict(color=colour, linestyle=line, marker=marker, markersize=4)
            panel.plot(at, one.top1[order], **style)
            draw_band(panel, at, one.top1[order], one.errors(order), colour, 0.12)
            handles.append(Line2D([], [], **style, label=f"{label}, {order} (area {one.areas[order]:.1f})"))
    panel.set(xlabel="pixels removed, %", ylabel="top-1, %", ylim=(0, None))
    panel.set_title("salient by " + "; ".join(dict.fromkeys(one.saliency for one in curves.values())), fontsize=9)
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def rows(result: RemovalCurves) -> Rows:
    names = [f"{100 * fraction:g} % gone" for fraction in result.fractions]
    cells = list(zip(names, *result.top1.values(), strict=True))
    return ("top-1 %", *result.top1), [*cells, ("area", *(result.areas[order] for order in result.top1))]


ABOUT = "how fast the answer is lost when pixels go, the most salient first", "MAP, Fig. 3"
IMAGES: dict[str, Any] = dict(samples=200, batch=32, takes="classifier", labels="needed")
OPTIONS = {
    "saliency": "scenes, gradcam, dino, or your own as file.py:function",
    "fractions": "parts of the pixels that go, such as 0,0.25,0.5",
    "dino_checkpoint": "weights of the saliency dino; timm's without",
}
FUNCTIONS = salient_removal, plot_salient_removal, rows
register_measure(Measure("removal", *ABOUT, *FUNCTIONS, **OF_CLASSIFIERS, **IMAGES, options=OPTIONS, order=10))
