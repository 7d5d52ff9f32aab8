"""How fast a classifier loses its answer when pixels go, the most salient first; and two orders to compare with.

The removal itself, the orders and the saliencies are those of the suite "salient" of `broadsight eval`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from ...data.sources import Source
from ...evaluation.removal import ORDERS
from ...evaluation.robustness import Choices, Suite, Tested, passes_of, run_suite
from ...evaluation.saliency import Saliency, about, from_name
from ...visual.plots import PALETTE, need_matplotlib, save
from ..layer_chart import check_results, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRACTIONS = tuple(tenth / 10 for tenth in range(10))
# How each order is drawn: line, marker.
STYLES = dict(zip(ORDERS, (("-", "o"), ("--", "s"), (":", "^")), strict=True))


@dataclass(frozen=True)
class RemovalCurves:
    """Top-1 in per cent against the part of the pixels that is removed.

    Args:
        saliency: What says which pixels are salient, in words.
        images: How many were asked about.
        fractions: Parts of 1, from 0 on.
        top1: By order of removal, one for each fraction.
        areas: The mean height of each curve, in per cent.
        skipped: Images that could not be read, and why.
    """

    saliency: str
    images: int
    fractions: tuple[float, ...]
    top1: dict[str, tuple[float, ...]]
    areas: dict[str, float]
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def gaps(self) -> dict[str, float]:
        """How much higher the other orders' curves are than that of the most salient first, on average."""
        salient, *others = ORDERS
        return {order: self.areas[order] - self.areas[salient] for order in others}

    def errors(self, order: str) -> tuple[float, ...]:
        """Standard error of each top-1, in per cent: as if images were drawn by chance."""
        return tuple((value * (100 - value) / self.images) ** 0.5 for value in self.top1[order])

    def record(self) -> dict[str, Any]:
        """As plain numbers, for JSON."""
        return {
            "saliency": self.saliency,
            "images": self.images,
            "fractions": list(self.fractions),
            "top1": {order: list(values) for order, values in self.top1.items()},
            "errors": {order: list(self.errors(order)) for order in self.top1},
            "areas": dict(self.areas),
            "gaps": self.gaps,
            "skipped": dict(self.skipped),
        }


def salient_removal(
    classifier: Tested,
    source: Source,
    *,
    saliency: Saliency | str | None = None,
    fractions: Sequence[float] = FRACTIONS,
    dino_checkpoint: str | Path | None = None,
    batch_size: int = 64,
    workers: int = 0,
    kept: np.ndarray | None = None,
    seed: int = 0,
    strict: bool = False,
    seen: Callable[[int], None] | None = None,
) -> RemovalCurves:
    """Top-1 of a classifier while pixels are set to the mean colour: salient first, by chance, least salient first.

    Args:
        classifier: As `open_classifier` gives: a model, how images reach it, its classes.
        source: Images whose labels are numbers of the classifier's classes.
        saliency: "scenes", "gradcam", "dino", "file.py:function", or a function from normalised images (B, C, H, W)
            and their batch to (B, H, W); by default the scenes' own where there are scenes, and else gradcam.
        fractions: Parts of the pixels that are removed; 0 is always measured too.
        dino_checkpoint: Weights of "dino"; timm's if None.
        batch_size: Images that pass the model at a time.
        workers: Processes that prepare images.
        kept: The classes that compete; all of the model's if None.
        seed: Of ties in saliency and of the order by chance.
        strict: An image that cannot be read is an error.
        seen: Told how many images are done in all cases.
    """
    if isinstance(classifier, nn.Module):
        raise ValueError(
            f"a {type(classifier).__name__} alone does not say how images reach it; pass what "
            "broadsight.runs.classifier.open_classifier gives"
        )
    choices = Choices(fractions=tuple(fractions))
    if saliency is None or isinstance(saliency, str):
        saliency = from_name(saliency, classifier, source, kept=kept, checkpoint=dino_checkpoint)
    elif dino_checkpoint is not None:
        raise ValueError("dino_checkpoint is given with a saliency of your own; it is for the saliency 'dino'")
    passes, done = passes_of("salient", choices), 0

    def count(images: int, doing: str) -> None:
        nonlocal done
        done += images
        if seen is not None:
            seen(done // passes)

    suite = run_suite(
        "salient",
        classifier,
        source,
        choices=choices,
        saliency=saliency,
        batch=batch_size,
        workers=workers,
        kept=kept,
        seed=seed,
        strict=strict,
        seen=count,
    )
    return curves_of(suite, about(saliency))


def curves_of(suite: Suite, saliency: str = "") -> RemovalCurves:
    """The curves of a suite "salient" that has been run.

    Args:
        saliency: What says which pixels are salient, in words.
    """
    if suite.name != "salient":
        raise ValueError(f"the suite {suite.name!r} removes nothing by saliency; expected 'salient'")
    curves = {order: suite.curve(order) for order in ORDERS}
    return RemovalCurves(
        saliency,
        suite.rows[0].images,
        tuple(at for at, _ in curves[ORDERS[0]]),
        {order: tuple(top1 for _, top1 in curve) for order, curve in curves.items()},
        {order: suite.summary[f"area, {order}"] for order in ORDERS},
        dict(suite.skipped),
    )


def plot_salient_removal(curves: Mapping[str, RemovalCurves], path: str | Path | None = None) -> "Figure":
    """Draw top-1 against the part that is removed: a colour for each classifier, a line for each order.

    Bands are one standard error to either side.

    Args:
        curves: What `salient_removal` gave, by the name that the legend shows.
        path: A png, svg or pdf file to write, which appears complete or not at all.
    """
    check_results(path, curves, RemovalCurves, "salient_removal")
    need_matplotlib()
    from matplotlib.lines import Line2D

    figure = new_figure(9, 4.4)
    panel = figure.subplots()
    handles = []
    for place, (label, one) in enumerate(curves.items()):
        colour, at = PALETTE[place % len(PALETTE)], [100 * fraction for fraction in one.fractions]
        for order, (line, marker) in STYLES.items():
            middle, errors = one.top1[order], one.errors(order)
            style: dict[str, Any] = dict(color=colour, linestyle=line, marker=marker, markersize=4)
            panel.plot(at, middle, **style)
            low, high = ([y + sign * e for y, e in zip(middle, errors, strict=True)] for sign in (-1, 1))
            panel.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
            name = f"{label}, {order} (area {one.areas[order]:.1f})"
            handles.append(Line2D([], [], **style, label=name))
    panel.set_xlabel("pixels removed, %")
    panel.set_ylabel("top-1, %")
    panel.set_ylim(bottom=0)
    panel.set_title("salient by " + "; ".join(dict.fromkeys(one.saliency for one in curves.values())), fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    if path is not None:
        save(figure, path)
    return figure
