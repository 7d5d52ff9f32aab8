"""Colours and file formats of all plots, which are written complete or not at all."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import printable
from ..files import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_FORMATS = ("png", "svg", "pdf")
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # Okabe and Ito's safe colours


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


def new_figure(
    path: str | Path, width: float, height: float, rows: int = 1, columns: int = 1, **subplots: Any
) -> "tuple[Figure, Any]":
    """Make a figure of so many inches to be saved under a name, and an array of its panels, row by row.

    Args:
        subplots: More options of `Figure.subplots`.
    """
    plot_format(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels: Any = figure.subplots(rows, columns, squeeze=False, **subplots).ravel()
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def save(figure: "Figure", path: str | Path) -> None:
    """Write a figure in the format of the file's name."""
    suffix = plot_format(path)
    _take_names_as_they_are(figure)
    with whole_file(Path(path)) as unfinished:
        figure.savefig(unfinished, format=suffix, dpi=150)


def _take_names_as_they_are(figure: "Figure") -> None:
    """Show names such as $x$ as text and escape what no font has; only numbers of an axis are formulas."""
    from matplotlib.axes import Axes
    from matplotlib.text import Text

    def plain(text: str) -> str:
        return "\n".join(map(printable, text.split("\n")))

    for axes in figure.findobj(Axes):
        for axis in (axes.xaxis, axes.yaxis):
            shown = [label.get_text() for label in axis.get_ticklabels()]
            if any(plain(text) != text for text in shown):
                axis.set_ticks(axis.get_ticklocs(), list(map(plain, shown)))
    for text in figure.findobj(Text):
        if text.get_text() and not text.get_text().startswith("$\\mathdefault"):
            text.set_parse_math(False)
            text.set_text(plain(text.get_text()))
