"""Published ImageNet-1K top-1 against measured latency, ours beside what a user would pick instead."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import timm
import yaml

from ..models import FAMILIES
from ..papers.verify import SOURCES, printed_of_models
from ..visual.plots import PALETTE, new_panels, save
from .candidates import name_and_size
from .report import headline, is_int8
from .run import Report, Row

NAMES = {"stvit": "STViT", "emsnet": "EMSNet", "mat": "MAT", "partialformer": "PartialFormer", "map": "MAP"}
NAMES["context_broadcast"] = "context broadcasting"
MARKS = "svD^P*<>Xhpd8H"  # of other families; ours are discs
MIXED = (NAMES["map"], NAMES["context_broadcast"])  # on many kinds of backbones: a line would join unlike models
# Where a name may stand beside its point, in points of distance to the right and upwards
OFFSETS = [(dx, dy) for far in (7, 16, 26) for dx, dy in ((far, 0), (-far, 0), (0, far), (0, -far), (far, far))]
OFFSETS += [(dx, dy) for far in (12, 22, 34) for dx, dy in ((far, -far), (-far, far), (-far, -far), (far, far))]


@dataclass(frozen=True)
class Published:
    """One figure."""

    family: str  # of `models.FAMILIES`, or what its authors call it if it is not ours
    top1: float  # percent of the validation images of ImageNet-1K
    size: int  # side of the images in pixels
    source: str  # where it is printed
    ours: bool
    weights: str | None = None  # timm's tag of the weights that reach it; None if none were published


@cache
def published() -> dict[str, Published]:
    """Read all figures of our sources, by the timm name of the model."""
    found: dict[str, Published] = {}
    for family in FAMILIES:
        for name, row in printed_of_models(family).items():
            if "top1" in row and timm.is_model(name):  # the papers of our models publish for 224 pixels
                found[name] = Published(family, float(row["top1"]), 224, SOURCES[family], ours=True)
    data: dict[str, Any] = yaml.safe_load(files("broadsight.papers").joinpath("published_top1.yaml").read_text("utf-8"))
    for group in ("ours", "others"):
        for name, row in data[group].items():
            found[name] = Published(**row | {"source": data["sources"][row["source"]], "ours": group == "ours"})
    return found


@dataclass(frozen=True)
class Point:
    """A model with a published top-1 at the size it was timed at; `row` is that of its fastest runtime."""

    model: str
    published: Published
    row: Row
    family = property(lambda self: NAMES.get(self.published.family, self.published.family))
    at = property(lambda self: (self.row.wall_ms.median, self.published.top1))


def points(reports: Sequence[Report], runtimes: Sequence[str] | None = None) -> tuple[list[Point], list[str]]:
    """The fastest row of every model, by default in float, and the names of those without a figure at their size."""
    fastest: dict[str, Point] = {}
    missing: dict[str, None] = {}
    for report in reports:
        for row in report.rows:
            name = name_and_size(row.model)[0] if "+" not in row.model else row.model
            figure = published().get(name)
            if figure is None or list(row.size or report.settings.size) != [figure.size] * 2:
                missing[row.model] = None
            elif row.runtime in runtimes if runtimes is not None else not is_int8(row.runtime):
                point = Point(name, figure, row)
                fastest[name] = min(fastest.get(name, point), point, key=lambda one: one.at[0])
    return list(fastest.values()), list(missing)


def check(names: Sequence[str], size: tuple[int, int]) -> None:
    """Refuse, before anything is timed, names of which none could be drawn."""
    known = {name: published()[name].size for name, _ in map(name_and_size, names) if name in published()}
    if not any((own or size) == (known.get(name),) * 2 for name, own in map(name_and_size, names)):
        at = next((f"; {name} has one at {side}" for name, side in known.items()), "")
        raise ValueError(f"no published top-1 for {', '.join(names)} at that size{at}: there is nothing to draw")


def plot(reports: Sequence[Report], path: str | Path) -> None:
    """Draw top-1 over latency into a png, svg or pdf file: in eager torch, and in each model's fastest runtime."""
    best, missing = points(reports)
    if not best:
        raise ValueError(f"no published top-1 at its size for any of {', '.join(missing)}: there is nothing to draw")
    shown = {"eager torch": points(reports, ["eager"])[0]}
    if any(point.row.runtime != "eager" for point in best):
        shown["the fastest runtime of each"] = best
    shown = {title: found for title, found in shown.items() if found}
    figure, panels = new_panels(path, 11, 7.2 * len(shown) + 0.8, rows=len(shown))
    ours, others = (
        sorted({one.family for found in shown.values() for one in found if one.published.ours == own})
        for own in (True, False)
    )
    styles: dict[str, dict[str, Any]] = {}  # ours in colours, the others in grey and behind them
    for i, name in enumerate(ours):
        styles[name] = dict(color=PALETTE[i % len(PALETTE)], marker="o", markersize=8, zorder=3, linewidth=0.9)
    for i, name in enumerate(others):
        styles[name] = dict(color="#777777", marker=MARKS[i % len(MARKS)], markersize=6, zorder=2, linewidth=0.4)
    for panel, (title, found) in zip(panels, shown.items(), strict=True):
        for family, style in styles.items():
            mine = sorted(point.at for point in found if point.family == family)
            x, y = [at[0] for at in mine], [at[1] for at in mine]
            panel.plot(x, y, linestyle="" if family in MIXED else "-", label=family, **style)
        panel.set(title=title, xscale="log", ylabel="published top-1, %")
        panel.margins(x=0.1, y=0.08)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter("{x:g}")
        panel.tick_params(axis="x", which="minor", labelsize=7)
        panel.grid(True, which="both", alpha=0.25)
    settings = reports[0].settings
    panels[-1].set_xlabel(f"latency, ms per batch of {settings.batch} (less is better)")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(f"published ImageNet-1K top-1 against measured latency\n{headline(settings)}", fontsize=10)
    for panel, found in zip(panels, shown.values(), strict=True):
        _label(panel, found)
    save(figure, path)


def _label(panel: Any, found: Sequence[Point]) -> None:
    """Write a name beside every point, where it covers no other name or point if there is such a place."""
    panel.figure.draw_without_rendering()  # positions are known from here on
    where = [panel.transData.transform(point.at) for point in found]
    taken: list[Any] = []
    for point, own in zip(found, where, strict=True):
        plain, bold = dict(fontsize=6, color="#444444"), dict(fontsize=6.5, color="black", fontweight="bold")
        look: dict[str, Any] = bold if point.published.ours else plain
        tried: list[tuple[int, Any, Any]] = []
        for dx, dy in OFFSETS:
            arrow = {"arrowstyle": "-", "linewidth": 0.4, "color": "#999999"} if max(abs(dx), abs(dy)) > 12 else None
            look["ha"] = "left" if dx > 0 else "right" if dx < 0 else "center"
            look["va"] = "bottom" if dy > 0 else "top" if dy < 0 else "center"
            place: Any = (point.row.model, point.at, (dx, dy))
            text = panel.annotate(*place, textcoords="offset points", arrowprops=arrow, **look)
            text.set_in_layout(False)
            box = text.get_window_extent()
            clashes = sum(box.overlaps(other) for other in taken)
            clashes += sum(box.contains(*other) for other in where if tuple(other) != tuple(own))
            clashes += box.x0 < panel.bbox.x0 or box.x1 > panel.bbox.x1  # would be cut off
            tried.append((clashes, text, box))
            if clashes == 0:
                break
        _, kept, box = min(tried, key=lambda one: one[0])
        for _, text, _ in tried:
            if text is not kept:
                text.remove()
        taken.append(box)
