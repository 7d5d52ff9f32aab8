"""Colours and file formats of all plots, which are written complete or not at all, and names beside their points."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ..files import whole_file
from .terminal import printable_lines

PLOT_FORMATS = ("png", "svg", "pdf")
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # Okabe and Ito's safe colours
LETTER = 7  # points
MARK = 4.5  # from the middle of a mark to its rim, in points
SIDES = ((-1, 1), (1, -1), (1, 1), (-1, -1))  # left and above comes first: a front rises from there


def plot_format(path: str | Path) -> str:
    """The image format of a file name. Raises ValueError for other formats, or without matplotlib."""
    suffix = Path(path).suffix.lstrip(".").lower()
    if suffix not in PLOT_FORMATS:
        raise ValueError(f"cannot plot to {str(path)!r}; expected a name ending in {', '.join(PLOT_FORMATS)}")
    need_matplotlib()
    return suffix


def need_matplotlib() -> None:
    """Raise ValueError, with how to install it, if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError('plotting needs matplotlib; run: pip install "broadsight[plot]"') from None


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches, whose panels find room for their labels."""
    need_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_panels(path: str | Path, width: float, height: float, rows: int = 1, columns: int = 1, **subplots: Any) -> Any:
    """Make a figure of so many inches to be saved under a name, and an array of its panels, row by row."""
    plot_format(path)
    figure = new_figure(width, height)
    panels: Any = figure.subplots(rows, columns, squeeze=False, **subplots).ravel()
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def save(figure: Any, path: str | Path) -> None:
    suffix = plot_format(path)
    from matplotlib.axis import Axis
    from matplotlib.text import Text

    # Names such as $x$ are text, without what no font has; only numbers of an axis are formulas
    for axis in figure.findobj(Axis):
        shown = [label.get_text() for label in axis.get_ticklabels()]
        if any(printable_lines(text) != text for text in shown):
            axis.set_ticks(axis.get_ticklocs(), list(map(printable_lines, shown)))
    for text in figure.findobj(Text):
        if text.get_text() and not text.get_text().startswith("$\\mathdefault"):
            text.set_parse_math(False)
            text.set_text(printable_lines(text.get_text()))
    with whole_file(Path(path)) as unfinished:
        figure.savefig(unfinished, format=suffix, dpi=150)


def name_points(figure: Any, panel: Any, names: Sequence[tuple[str, float, float, bool]]) -> None:
    """Write names beside points where they cover neither each other nor the points, on a figure that is complete
    without: name, x and y of the point in data coordinates, and whether it matters: then it is always written."""
    figure.draw_without_rendering()  # places the points
    per_point = figure.dpi / 72
    places = [panel.transData.transform((x, y)) / per_point for _, x, y, _ in names]
    taken: list[Sequence[float]] = [(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in places]
    left, bottom, right, top = (value / per_point for value in figure.bbox.extents)
    for (name, x, y, matters), place in sorted(zip(names, places, strict=True), key=lambda pair: not pair[0][3]):
        tried = [_beside(place, name, side, lines) for lines, side in product((1.0, 2.6, 4.2), SIDES)]
        inside = [one for one in tried if one[0] >= left and one[2] <= right and one[1] >= bottom and one[3] <= top]
        free = [one for one in inside if not any(_meet(one, other) for other in taken)]
        if not free and not matters:
            continue
        box = free[0] if free else tried[0]
        taken.append(box)
        far = free and tried.index(box) >= len(SIDES)
        arrow = dict(arrowstyle="-", color="grey", linewidth=0.4, shrinkB=3) if far else None
        style = dict(fontsize=LETTER, alpha=1.0 if matters else 0.6, arrowprops=arrow, zorder=4)
        panel.annotate(name, (x, y), (box[0] - place[0], box[1] - place[1]), textcoords="offset points", **style)


def _beside(place: Sequence[float], name: str, side: tuple[int, int], lines: float) -> tuple[float, ...]:
    """Left, bottom, right and top of a name so many lines from its point, whose letters are 0.6 wide on average."""
    width, height = 0.6 * LETTER * len(name), 1.25 * LETTER
    away, up = 3.0 + 6.0 * (lines - 1), MARK + height * (lines - 1)
    left = place[0] + away if side[0] > 0 else place[0] - away - width
    bottom = place[1] + up if side[1] > 0 else place[1] - up - height
    return left, bottom, left + width, bottom + height


def _meet(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
