"""What measures share: passes over blocks or attentions, and results that are checked, drawn and written."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...inspection.attention import pass_attention
from ...inspection.attention_rows import Rows
from ...inspection.blocks import Block, find_blocks, find_layers, watch_blocks
from ...inspection.passing import Images, Seen, pass_images, peek
from ...visual.plots import PALETTE, plot_format, save
from ...visual.plots import new_figure as new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Figure = Any  # matplotlib comes when something is drawn

MARKERS = "osD^vPX"  # one more than there are colours, so that a pair of both comes back late


@dataclass(frozen=True)
class Result:
    """What a measure gives, written by its fields."""

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {one.name: plain(getattr(self, one.name)) for one in fields(self)}


def plain(value: Any) -> Any:
    """Records for results, lists for tuples, None for what JSON has no number for."""
    if isinstance(value, Result):
        return value.record()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return [plain(item) for item in value] if isinstance(value, Sequence) else str(value)


def pass_blocks(
    model: nn.Module,
    images: Images,
    see: Callable[[Block, Tensor], None],
    *,
    layers: str | Sequence[str] | None = None,
    batch_size: int = 8,
    seen: Seen | None = None,
) -> tuple[list[Block], int]:
    """Run a model on all images and show the map (B, C, h, w) of every block, or of `layers`, to `see`.

    Back come the blocks in order of execution, and how many images there were.
    """
    image, images = peek(images)
    blocks = find_blocks(model, image) if layers is None else find_layers(model, image, layers)
    with watch_blocks(model, blocks, lambda number, features: see(blocks[number], features)):
        return blocks, pass_images(model, images, batch_size=batch_size, seen=seen)


class AttentionSum:
    """What is summed up over all images of one soft-max, from whose rows `add` takes it."""

    def __init__(self, rows: Rows):
        self.heads = 1 if rows.head_axis is None else rows.shape[rows.head_axis]
        self.keys = rows.shape[-1]

    def add(self, rows: Rows) -> None: ...


def sum_attention(
    model: nn.Module,
    images: Images,
    start: Callable[[Rows], Any],
    *,
    arranged: Callable[[Rows, nn.Module], Rows] = lambda rows, module: rows,
    batch_size: int = 8,
    seen: Seen | None = None,
) -> dict[str, Any]:
    """Sums over the attention rows of all images for every soft-max of a model, by its name.

    `start` makes an empty AttentionSum; `arranged` brings the rows of a module into another form first.
    """
    sums: dict[str, Any] = {}

    def see(name: str, rows: Rows, module: nn.Module) -> None:
        rows = arranged(rows, module)
        new = start(rows)
        layer = sums.setdefault(name, new)
        if (layer.heads, layer.keys) != (new.heads, new.keys):
            keys = f"{new.keys} keys now and to {layer.keys} before"
            raise ValueError(f"{name} attends to {keys}; pass images of one size")
        layer.add(rows)

    pass_attention(model, images, see, batch_size=batch_size, seen=seen)
    return sums


def draws(kind: type, measure: str, *, by_layer: bool = False) -> Callable[[Callable], Callable[..., Figure]]:
    """Give a function that draws {label: result} a second argument `path`, a png, svg or pdf file to write whole.

    The results are checked first: each is of that kind, or its values are if it is one `by_layer`.
    """

    def decorate(draw: Callable[..., Figure]) -> Callable[..., Figure]:
        @functools.wraps(draw)
        def plot(results: Mapping[str, Any], path: str | Path | None = None, **options: Any) -> Figure:
            if path is not None:
                plot_format(path)
            if not isinstance(results, Mapping) or not results:
                raise ValueError(f"there is nothing to draw; expected {{label: result of {measure}}}, one at least")
            for label, result in results.items():
                fits = isinstance(result, Mapping if by_layer else kind)
                if not fits or (by_layer and not all(isinstance(x, kind) for x in result.values())):
                    came = type(result).__name__
                    raise ValueError(f"{label!r} is no result of {measure} but a {came}; pass {{label: result}}")
            figure = draw(results, **options)
            for panel in figure.axes:
                if not panel.images:
                    panel.spines[["top", "right"]].set_visible(False)
            if path is not None:
                save(figure, path)
            return figure

        first, *others = inspect.signature(draw).parameters.values()
        given = inspect.Parameter("path", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        plot.__signature__ = inspect.Signature([first, given, *others])  # ty: ignore[missing-attribute]
        return plot

    return decorate


def style_of(number: int) -> dict[str, Any]:
    """Colour and marker of a line, different from those of its neighbours."""
    return dict(color=PALETTE[number % len(PALETTE)], marker=MARKERS[number % len(MARKERS)], markersize=5)


def count_from_one(panel: Axes, name: str) -> None:
    """Whole numbers along the horizontal axis, of things called that."""
    from matplotlib.ticker import MaxNLocator

    panel.set_xlabel(name)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_lines(panel: Axes, lines: Mapping[str, Sequence[float]], quantity: str) -> None:
    """One line for each model; layers are numbered from 1."""
    for number, (label, values) in enumerate(lines.items()):
        panel.plot(range(1, len(values) + 1), values, **style_of(number), label=label)
    panel.set_ylabel(quantity)
    count_from_one(panel, "layer")


def draw_band(panel: Axes, at: Any, middle: Any, half: Any, colour: str, alpha: float) -> None:
    """A pale band around a line, that wide to either side; all three are sequences of numbers."""
    low, high = ([y + sign * e for y, e in zip(middle, half, strict=True)] for sign in (-1, 1))
    panel.fill_between(at, low, high, color=colour, alpha=alpha, linewidth=0)


def draw_legend(panel: Axes) -> None:
    """Inside the panel if it is short, beside it if not."""
    beside: dict[str, Any] = dict(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    panel.legend(frameon=False, **beside if len(panel.get_legend_handles_labels()[1]) > 4 else {})
