"""How results are drawn: checks, colours and markers, and lines over the layers of models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..visual.plots import PALETTE, need_matplotlib, plot_format

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPX"  # one more than there are colours: many lines go without the same pair
INSIDE = 4  # lines that a legend inside the panel has room for


def check_results(
    path: str | Path | None, results: Mapping[str, Any], kind: type, measure: str, *, by_layer: bool = False
) -> None:
    """Make sure that a figure can be drawn and written.

    Args:
        results: By the name that the figure shows.
        kind: Of each result; of its values if it is one `by_layer`.
        measure: What gives such results.

    Raises:
        ValueError: The results are not of that kind, or there are none, or the file has no name for an image.
    """
    if path is not None:
        plot_format(path)
    if not isinstance(results, Mapping) or not results:
        raise ValueError(f"there is nothing to draw; expected {{label: result of {measure}}}, one at least")
    for label, result in results.items():
        layers = isinstance(result, Mapping) and all(isinstance(x, kind) for x in result.values())
        if not (layers if by_layer else isinstance(result, kind)):
            came = type(result).__name__
            raise ValueError(f"{label!r} is no result of {measure} but a {came}; pass {{label: result}}")


def new_figure(width: float, height: float) -> "Figure":
    need_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def style_of(number: int) -> dict[str, Any]:
    """Colour and marker of a line, different from those of its neighbours."""
    return dict(color=PALETTE[number % len(PALETTE)], marker=MARKERS[number % len(MARKERS)], markersize=5)


def draw_lines(panel: "Axes", lines: Mapping[str, Sequence[float]], quantity: str) -> None:
    """One line for each model; layers are numbered from 1."""
    from matplotlib.ticker import MaxNLocator

    for number, (label, values) in enumerate(lines.items()):
        panel.plot(range(1, len(values) + 1), values, **style_of(number), label=label)
    panel.set_xlabel("layer")
    panel.set_ylabel(quantity)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.spines[["top", "right"]].set_visible(False)


def draw_legend(panel: "Axes") -> None:
    """Inside the panel if it is short, beside it if not."""
    many = len(panel.get_legend_handles_labels()[1]) > INSIDE
    beside: dict[str, Any] = dict(loc="upper left", bbox_to_anchor=(1.0, 1.0)) if many else {}
    panel.legend(frameon=False, **beside)
