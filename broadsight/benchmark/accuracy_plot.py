"""Published accuracy against measured latency, ours beside what a user would pick instead."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..visual.plots import PALETTE, plot_format, save
from .candidates import name_and_size
from .published_accuracy import Published, published
from .report import headline
from .run import Report, Row
from .settings import EXPORTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {
    "stvit": "STViT",
    "emsnet": "EMSNet",
    "mat": "MAT",
    "partialformer": "PartialFormer",
    "map": "MAP",
    "context_broadcast": "context broadcasting",
}
MARKS = "svD^P*<>Xhpd8H"  # of others, one for a family; ours are discs
GREY = "#777777"
MIXED = (NAMES["map"], NAMES["context_broadcast"])  # on backbones of all kinds: a line would join what is not alike


@dataclass(frozen=True)
class Point:
    """A model with a published top-1 at the size that it was timed at.

    Args:
        row: Where it was fastest, of the runtimes that count.
    """

    model: str
    published: Published
    row: Row

    @property
    def family(self) -> str:
        return NAMES.get(self.published.family, self.published.family)


def points(reports: Sequence[Report], runtimes: Sequence[str] | None = None) -> tuple[list[Point], list[str]]:
    """Models by their fastest row, and those that cannot be drawn.

    Args:
        runtimes: That count; if None all that compute in float.

    Returns:
        Points in the order of the rows; names of models without a published figure at the size they were timed at.
    """
    fastest: dict[str, Row] = {}
    known = published()
    missing: dict[str, None] = {}
    for report in reports:
        for row in report.rows:
            name = name_and_size(row.model)[0] if "+" not in row.model else row.model
            figure = known.get(name)
            if figure is None or list(row.size or report.settings.size) != [figure.size] * 2:
                missing[row.model] = None
            elif counts(row.runtime, runtimes) and (
                name not in fastest or row.wall_ms.median < fastest[name].wall_ms.median
            ):
                fastest[name] = row
    return [Point(name, known[name], row) for name, row in fastest.items()], list(missing)


def check(names: Sequence[str], size: tuple[int, int]) -> None:
    """Refuse, before anything is timed, names of which none could be drawn."""
    known = published()
    for name, own in map(name_and_size, names):
        figure = known.get(name)
        if figure is not None and (own or size) == (figure.size, figure.size):
            return
    at = next((f"; {name} has one at {known[name].size}" for name, _ in map(name_and_size, names) if name in known), "")
    raise ValueError(f"no published top-1 for {', '.join(names)} at that size{at}: there is nothing to draw")


def counts(runtime: str, runtimes: Sequence[str] | None) -> bool:
    """int8 costs accuracy that nobody has published: it is not among the runtimes that count by themselves."""
    return runtime in runtimes if runtimes is not None else not EXPORTED.get(runtime, ("", False))[1]


def plot(reports: Sequence[Report], path: str | Path) -> None:
    """Draw top-1 over latency into a png, svg or pdf file: in eager torch, and in each model's fastest runtime.

    The file appears complete or not at all.
    """
    plot_format(path)
    from matplotlib.figure import Figure

    best, missing = points(reports)
    if not best:
        raise ValueError(f"no published top-1 at its size for any of {', '.join(missing)}: there is nothing to draw")
    eager, _ = points(reports, ["eager"])
    panels = [
        (found, title) for found, title in ((eager, "eager torch"), (best, "the fastest runtime of each")) if found
    ]
    if {point.row.runtime for point in best} == {"eager"}:
        panels = panels[:1]
    figure = Figure(figsize=(11, 7.2 * len(panels) + 0.8), layout="constrained")
    axes: Any = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    styles = _styles([point for found, _ in panels for point in found])
    for panel, (found, title) in zip(axes, panels, strict=True):
        _draw(panel, found, styles)
        panel.set_title(title, fontsize=11)
    settings = reports[0].settings
    axes[-1].set_xlabel(f"latency, ms per batch of {settings.batch} (less is better)")
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(f"published ImageNet-1K top-1 against measured latency\n{headline(settings)}", fontsize=10)
    for panel in axes:
        _label(panel, next(found for found, title in panels if title == panel.get_title()))
    save(figure, path)


def _styles(found: Sequence[Point]) -> dict[str, dict[str, Any]]:
    families = dict.fromkeys((point.family, point.published.ours) for point in found)
    ours = [family for family, is_ours in families if is_ours]
    others = [family for family, is_ours in families if not is_ours]
    styles: dict[str, dict[str, Any]] = {}
    for place, family in enumerate(sorted(ours)):
        styles[family] = {"color": PALETTE[place % len(PALETTE)], "marker": "o", "markersize": 8, "zorder": 3}
    for place, family in enumerate(sorted(others)):
        styles[family] = {"color": GREY, "marker": MARKS[place % len(MARKS)], "markersize": 6, "zorder": 2}
    return styles


def _draw(panel: "Axes", found: Sequence[Point], styles: dict[str, dict[str, Any]]) -> None:
    for family, style in styles.items():
        mine = sorted((p for p in found if p.family == family), key=lambda p: p.row.wall_ms.median)
        x, y = [p.row.wall_ms.median for p in mine], [p.published.top1 for p in mine]
        joined = family not in MIXED
        panel.plot(
            x, y, linestyle="-" if joined else "", linewidth=0.9 if style["zorder"] == 3 else 0.4, label=family, **style
        )
    panel.set(xscale="log", ylabel="published top-1, %")
    panel.margins(x=0.1, y=0.08)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("{x:g}")
    panel.tick_params(axis="x", which="minor", labelsize=7)
    panel.grid(True, which="both", alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _label(panel: "Axes", found: Sequence[Point]) -> None:
    """A name beside every point, where it lies on no other name and no other point, if there is such a place."""
    figure: Any = panel.figure
    figure.draw_without_rendering()  # positions are known from here on
    where = [panel.transData.transform((p.row.wall_ms.median, p.published.top1)) for p in found]
    taken: list[Any] = []
    sides = [(dx, dy) for far in (7, 16, 26) for dx, dy in ((far, 0), (-far, 0), (0, far), (0, -far), (far, far))]
    sides += [(dx, dy) for far in (12, 22, 34) for dx, dy in ((far, -far), (-far, far), (-far, -far), (far, far))]
    for point, (x, y) in zip(found, where, strict=True):
        best: Any = None
        for dx, dy in sides:
            text = panel.annotate(
                point.row.model,
                (point.row.wall_ms.median, point.published.top1),
                (dx, dy),
                textcoords="offset points",
                fontsize=6.5 if point.published.ours else 6,
                fontweight="bold" if point.published.ours else "normal",
                color="black" if point.published.ours else "#444444",
                ha="left" if dx > 0 else "right" if dx < 0 else "center",
                va="center" if dy == 0 else "bottom" if dy > 0 else "top",
                arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "#999999"}
                if max(abs(dx), abs(dy)) > 12
                else None,
            )
            text.set_in_layout(False)
            box = text.get_window_extent()
            clashes = sum(box.overlaps(other) for other in taken)
            clashes += sum(box.contains(*other) for other in where if tuple(other) != (x, y))
            clashes += box.x0 < panel.bbox.x0 or box.x1 > panel.bbox.x1  # would be cut off
            if best is None or clashes < best[0]:
                if best is not None:
                    best[1].remove()
                best = clashes, text, box
            else:
                text.remove()
            if clashes == 0:
                break
        taken.append(best[2])
