"""Which models are worth their cost: fronts of accuracy over latency, MACs or parameters.

Published accuracies and measured ones are of different trainings, mostly of different images too, so they never
share a front; neither do accuracies on different data, rows of different tables, or times of different machines.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...visual.plots import PALETTE, name_points
from ..front_points import AXES, Point, check_axis
from .base import OF_CLASSIFIERS, Measure, Rows, register_measure
from .frame import Figure, Result, draws, new_figure

UNITS = {  # name, unit, the number of plain units in one, and the column of a table
    "latency_ms": ("latency", "ms per image", 1.0, "ms"),
    "macs": ("MACs", "G", 1e9, "MACs G"),
    "parameters": ("size", "M", 1e6, "parameters M"),
}
MARKERS = {"ours": "oDv^P", "paper": "sX*<>"}
WIDE = 20.0  # largest over smallest cost beyond which the axis is logarithmic
AREA, UNKNOWN, LEAST = 42.0, 14.0, 6.0  # of a mark, in square points: at 224 pixels, at unknown size, and at least


@dataclass(frozen=True)
class Front(Result):
    """Models that may be compared: all of a source, "ours" or "paper", and data; and those that no other beats."""

    source: str
    data: str
    points: tuple[Point, ...]
    best: tuple[Point, ...]

    @property
    def title(self) -> str:
        words = "published accuracy" if self.source == "paper" else "our accuracy"
        return f"{words}, {self.data}" if self.data else words

    def record(self) -> dict[str, Any]:
        points = [asdict(point) | {"on_front": point in self.best} for point in self.points]
        return dict(source=self.source, data=self.data, points=points)


@dataclass(frozen=True)
class Fronts(Result):
    """Fronts of each source and data over one cost, one of AXES."""

    x: str
    fronts: tuple[Front, ...]
    notes: tuple[str, ...] = ()  # models left out and why, and warnings


def pareto_front(points: Iterable[Point]) -> list[Point]:
    """The complete points that no other beats, by cost: no other is as cheap and better, or as good and cheaper."""
    front: list[Point] = []
    for point in sorted((point for point in points if point.complete), key=_place):
        if not front or _place(point) == _place(front[-1]) or point.accuracy > front[-1].accuracy:  # ty: ignore
            front.append(point)
    return front


def fronts(points: Iterable[Point], x: str = "latency_ms") -> Fronts:
    """A front for each source, data and machine.

    A point without accuracy, as from a benchmark, lends its cost to points of the same model without one.
    """
    check_axis(x)
    points, notes = _joined(list(points), UNITS[x][0])
    if not points:
        raise ValueError("; ".join([f"no model has both accuracy and {UNITS[x][0]}", *notes]))
    groups: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.source, point.data, point.machine), []).append(point)
    found = []
    for (source, data, _), members in groups.items():
        members = tuple(sorted(members, key=_place))
        found.append(Front(source, data, members, tuple(pareto_front(members))))
        if len(conditions := sorted({point.conditions for point in members})) > 1:
            notes.append(f"{found[-1].title}: costs were measured under different conditions: {'; '.join(conditions)}")
    return Fronts(x, tuple(found), tuple(notes))


def fronts_over(
    points: Callable[[str], Iterable[Point]], *, x: str = "all", paper: str = "", competitors: str | Sequence[str] = ()
) -> dict[str, Fronts]:
    """Fronts over one of AXES, or over "all" that have any `points`, and by themselves those that a paper has timed.

    Whoever makes the points looks at `paper` and `competitors`.
    """
    found, failures = {}, []
    for axis in AXES if x == "all" else (x,):
        try:
            machines: dict[str, list[Point]] = {"": []}
            for point in points(axis):
                machines.setdefault(point.machine, []).append(point)
        except ValueError as error:
            failures.append(error)
            continue
        for machine, timed in machines.items():
            try:
                found[f"{axis}, {machine} as published" if machine else axis] = fronts(timed, axis)
            except ValueError as error:
                failures.append(error)
    if not found:
        raise failures[0]
    return found


@draws(Fronts, "fronts")
def plot_fronts(fronts: Mapping[str, Fronts]) -> Figure:
    """Draw accuracy over cost: each front a line of steps, broken for published ones; others are pale.

    Where images are of several sizes, the radius of a mark is in proportion to them.
    """
    figure = new_figure(1.5 + 6.0 * len(fronts), 5.4)
    panels = figure.subplots(1, len(fronts), squeeze=False).flatten()
    styles: dict[tuple[str, str], tuple[str, str]] = {}  # colour and marker of each source and data
    handles: dict[str, Any] = {}
    drawn = [point for one in fronts.values() for front in one.fronts for point in front.points]
    areas = _areas({point.size for point in drawn})
    for panel, (title, one) in zip(panels, fronts.items(), strict=True):
        name, unit, scale, _ = UNITS[one.x]
        costs = [point.x / scale for front in one.fronts for point in front.points if point.x is not None]
        if min(costs) > 0 and max(costs) / min(costs) > WIDE:
            panel.set_xscale("log")
        for front in one.fronts:
            marks, before = MARKERS[front.source], sum(source == front.source for source, _ in styles)
            new = PALETTE[len(styles) % len(PALETTE)], marks[before % len(marks)]
            style = styles.setdefault((front.source, front.data), new)
            handles[front.title] = _draw(panel, front, style, scale, max(costs), areas)
        panel.set(xlabel=f"{name}, {unit}", ylabel="top-1, %", title=title)
        panel.margins(x=0.12, y=0.1)
    if any(point.highlight for point in drawn):
        handles["filled: of the paper itself"] = _mark(AREA)
    if len(areas) > 1:
        handles |= {f"{size} pixels" if size else "pixels not given": _mark(area) for size, area in areas.items()}
    columns = min(2 if len(panels) == 1 else 3, len(handles))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)
    for panel, one in zip(panels, fronts.values(), strict=True):
        scale = UNITS[one.x][2]
        shown = [(p, p.highlight or p in front.best) for front in one.fronts for p in front.points]
        name_points(figure, panel, [(p.label, p.x / scale, p.accuracy, best) for p, best in shown])  # ty: ignore
    return figure


def rows(result: Fronts) -> Rows:
    _, _, scale, column = UNITS[result.x]
    return ("model", column, "top-1 %", "on the front", "of", "pixels"), [
        (point.label, (point.x or 0.0) / scale, point.accuracy, "yes" if point in one.best else "no", one.title, size)
        for one in result.fronts
        for point in one.points
        for size in (point.size,)
    ]


def _place(point: Point) -> tuple[float, float]:
    """Cheapest first; of equally cheap ones the best first."""
    assert point.x is not None and point.accuracy is not None
    return point.x, -point.accuracy


def _joined(points: Sequence[Point], cost: str) -> tuple[list[Point], list[str]]:
    """Complete points, some of them with a cost that another lent, and notes on the points left out."""
    lenders = [one for one in points if one.source == "ours" and one.x is not None and one.accuracy is None]
    found: list[Point] = []
    left_out: dict[str, list[str]] = {}
    used: set[str] = set()
    for point in points:
        lent = [one for one in lenders if one.name == point.name and point.x is None and point.accuracy is not None]
        for one in lent:
            label = point.label + one.label.removeprefix(one.name)  # with the runtime or size that was timed
            found.append(replace(point, x=one.x, low=one.low, high=one.high, conditions=one.conditions, label=label))
            used.add(one.name)
        if point.complete:
            found.append(point)
        elif not lent and point not in lenders:
            left_out.setdefault(_unknown(point, cost), []).append(point.label)
    known = {point.name for point in found}
    for one in lenders:
        if one.name not in used:
            why = f"{cost} came with the accuracy" if one.name in known else _unknown(one, cost)
            left_out.setdefault(why, []).append(one.label)
    return found, [f"left out, {why}: {', '.join(dict.fromkeys(names))}" for why, names in left_out.items()]


def _unknown(point: Point, cost: str) -> str:
    """Why a point cannot be drawn."""
    whose = "published accuracy" if point.source == "paper" else "accuracy"
    unknown = [whose] * (point.accuracy is None) + [cost] * (point.x is None)
    run = " (not run)" if point.accuracy is None and point.source == "ours" else ""
    return f"{' and '.join(unknown)} unknown{run}" if unknown else "a number not finite"


def _areas(sizes: Iterable[int | None]) -> dict[int | None, float]:
    """Areas of marks by the size of the images, small first; all alike if there is one size."""
    if len(ordered := sorted(set(sizes), key=lambda size: size or 0)) < 2:
        return dict.fromkeys(ordered, AREA)
    return {size: max(LEAST, AREA * (size / 224) ** 2) if size else UNKNOWN for size in ordered}


def _mark(area: float) -> Any:
    """An entry for the legend: a grey disc."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color="grey", linestyle="", marker="o", markersize=area**0.5)


def _draw(
    panel: Any, front: Front, style: tuple[str, str], scale: float, end: float, areas: Mapping[int | None, float]
) -> Any:
    """Draw the front's line, points and bars; its entry for the legend."""
    from matplotlib.lines import Line2D

    colour, marker = style
    line, face = ("--", "white") if front.source == "paper" else ("-", colour)
    at = [point.x / scale for point in front.best if point.x is not None]
    heights = [point.accuracy for point in front.best]
    panel.step([*at, end], [*heights, heights[-1]], where="post", color=colour, linestyle=line, linewidth=1.2)
    for point in front.points:
        assert point.x is not None
        x, alpha = point.x / scale, 1.0 if point in front.best else 0.3
        if point.low is not None and point.high is not None:
            bar = [[max(0.0, point.x - point.low) / scale], [max(0.0, point.high - point.x) / scale]]
            panel.errorbar(x, point.accuracy, xerr=bar, color=colour, alpha=alpha, capsize=2, linewidth=1)
        inside = colour if point.highlight else face
        marks: dict[str, Any] = dict(s=areas[point.size], marker=marker, color=inside, edgecolor=colour)
        marks |= dict(alpha=alpha, zorder=3)
        panel.scatter(x, point.accuracy, **marks)
    return Line2D([], [], color=colour, linestyle=line, marker=marker, markerfacecolor=face)


ABOUT = "which models are worth their cost: accuracy over latency, MACs and parameters"
SOURCE = "MAP, Figs. 1 and 7d; MAT, Fig. 4.4; PartialFormer, Fig. 5.1"
TAKES: dict[str, Any] = dict(batch=64, takes="files", labels="needed")
TAKES["notes"] = lambda results: [note for one in results.values() for note in one.notes]
OPTIONS = {
    "x": "latency_ms, macs, parameters or all",
    "paper": "published accuracies too, of our models whose names match, such as 'mat_*'",
    "competitors": "what the papers compare with: all, or tables such as map, map-sizes, emsnet, mat, partialformer",
}
FUNCTIONS = fronts_over, plot_fronts, rows
register_measure(Measure("front", ABOUT, SOURCE, *FUNCTIONS, **OF_CLASSIFIERS, **TAKES, options=OPTIONS, order=11))
