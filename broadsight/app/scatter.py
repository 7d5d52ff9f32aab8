"""Models as points on two axes, in HTML: they have names and shapes, and tell their figures when pointed at.

Gradio's own plot shows the figures before last when its axes change with them, and cannot be reached by keyboard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..report.charts import Axis, axis

SHAPES = (
    '<circle cx="8" cy="8" r="6.5"/>',
    '<rect x="2" y="2" width="12" height="12" rx="1"/>',
    '<path d="M8 1.2L15 14H1Z"/>',
    '<path d="M8 .5L15.5 8L8 15.5L.5 8Z"/>',
    '<path d="M8 14.8L1 2H15Z"/>',
    '<path d="M5.5 1h5v4.5H15v5h-4.5V15h-5v-4.5H1v-5h4.5Z"/>',
)


@dataclass(frozen=True)
class Point:
    """A model in the plot.

    Args:
        x, y: On the axes; 0 or more.
        place: Which shape it has.
        colour: Of the shape, for CSS.
        about: What it tells, by name.
    """

    name: str
    x: float
    y: float
    place: int
    colour: str
    about: Mapping[str, str]


def marker(place: int, colour: str) -> str:
    """The sign of a model, the same in plot and table."""
    shape = SHAPES[place % len(SHAPES)]
    return f'<svg class="bs-mark" viewBox="0 0 16 16" style="fill:{escape(colour)}" aria-hidden="true">{shape}</svg>'


def plot(points: Sequence[Point], x_label: str, y_label: str) -> str:
    """The plot, or nothing where there is no point. Both axes begin at zero."""
    if not points:
        return ""
    across = axis(x_label, 0, max(point.x for point in points) * 1.05 or 1)
    upwards = axis(y_label, 0, max(point.y for point in points) * 1.05 or 1)
    lines = "".join(f'<i class="bs-across" style="bottom:{_share(tick, upwards)}"></i>' for tick in upwards.ticks)
    lines += "".join(f'<i class="bs-up" style="left:{_share(tick, across)}"></i>' for tick in across.ticks)
    ticks = "".join(f'<b class="bs-y" style="bottom:{_share(t, upwards)}">{t:g}</b>' for t in upwards.ticks)
    ticks += "".join(f'<b class="bs-x" style="left:{_share(t, across)}">{t:g}</b>' for t in across.ticks)
    drawn = "".join(_point(point, across, upwards) for point in points)
    about = f"{len(points)} models, {y_label} by {x_label}; each can be focused and tells its figures"
    return (
        f'<figure class="bs-figure"><figcaption>{escape(y_label)}</figcaption>'
        f'<div class="bs-plot" role="group" aria-label="{escape(about)}"><div aria-hidden="true">{lines}{ticks}</div>'
        f'{drawn}</div><p class="bs-xlabel">{escape(x_label)}</p></figure>'
    )


def _point(point: Point, across: Axis, upwards: Axis) -> str:
    sides = ("left" if point.x > 0.6 * across.high else "right", "below" if point.y > 0.55 * upwards.high else "above")
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in point.about.items())
    said = "; ".join([point.name, *(f"{key} {value}" for key, value in point.about.items())])
    return (
        f'<div class="bs-point bs-{sides[0]} bs-{sides[1]}" tabindex="0" role="img" aria-label="{escape(said)}" '
        f'style="left:{_share(point.x, across)};bottom:{_share(point.y, upwards)}">{marker(point.place, point.colour)}'
        f'<span class="bs-label">{escape(point.name)}</span>'
        f'<div class="bs-tip"><strong>{escape(point.name)}</strong><dl>{rows}</dl></div></div>'
    )


def _share(value: float, axis_: Axis) -> str:
    return f"{100 * value / axis_.high:.2f}%"
