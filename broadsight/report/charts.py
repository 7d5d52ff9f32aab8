"""Charts as inline SVG: lines, bars and dots, on axes that end at round numbers.

A chart is drawn for the width of a telephone, so that its letters have the size of small print there and never less.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..visual.plots import PALETTE
from ..visual.words import escape, known, number

WIDTH, HEIGHT = 320, 226
LEFT, RIGHT, TOP, BOTTOM = 44, 308, 26, 186  # edges of the plot area
MOST_POINTS = 600  # of a line
MOST_MARKERS = 40
DASHES = ("", "7 4", "2 3", "9 3 2 3")

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, which are the first and the last of its `ticks`."""

    label: str
    ticks: tuple[float, ...]

    @property
    def low(self) -> float:
        return self.ticks[0]

    @property
    def high(self) -> float:
        return self.ticks[-1]

    def x(self, value: float) -> float:
        return LEFT + (value - self.low) / (self.high - self.low) * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        return BOTTOM - (value - self.low) / (self.high - self.low) * (BOTTOM - TOP)


@dataclass(frozen=True)
class Series:
    """A line through points. Without a colour it stays in the background."""

    name: str
    points: Sequence[Point]
    colour: int | None = None
    dash: int = 0
    marked: bool = True  # its points, if there are few


@dataclass(frozen=True)
class Bar:
    """From `low` to `high` on the x-axis, as high as `value`."""

    low: float
    high: float
    value: float
    about: str = ""


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    sign: str
    about: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Chart:
    """Everything on one pair of axes, in the order in which it is drawn."""

    title: str
    x: Axis
    y: Axis
    bars: Sequence[Bar] = ()
    lines: Sequence[Series] = ()
    ticks: Sequence[Bar] = ()  # short horizontal strokes, such as where a bar should have ended
    dots: Sequence[Dot] = ()
    legend: Sequence[tuple[str, str]] = field(default=())  # further classes of marks, and what they are

    def html(self) -> str:
        """The chart as a figure with its title above and its legend below."""
        drawn = [_bar(bar, self.x, self.y) for bar in self.bars]
        drawn += [_line(line, self.x, self.y) for line in self.lines]
        drawn += [_tick(tick, self.x, self.y) for tick in self.ticks]
        drawn += [_dot(dot, self.x, self.y) for dot in self.dots]
        about = escape(self.description())
        return (
            f'<figure class="chart"><figcaption>{escape(self.title)}</figcaption>\n'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}"><title>{about}</title>\n'
            f"{_frame(self.x, self.y)}{''.join(drawn)}</svg>\n{self._legend()}</figure>\n"
        )

    def description(self) -> str:
        """What a reader who does not see the chart should know."""
        ends = [
            f"{line.name} from {number(line.points[0][1])} to {number(line.points[-1][1])}"
            for line in self.lines
            if line.points and line.colour is not None
        ]
        axes = f"{self.title}: {self.y.label} by {self.x.label}"
        return "; ".join([axes, *ends, *(dot.about for dot in self.dots)])

    def _legend(self) -> str:
        named = [(_swatch(line), line.name) for line in self.lines if line.name]
        named += [(f'<i class="{kind}" aria-hidden="true"></i>', text) for kind, text in self.legend]
        if len(named) < 2:  # the title says it
            return ""
        return f'<ul class="legend">{"".join(f"<li>{swatch}{escape(text)}</li>" for swatch, text in named)}</ul>\n'


def axis(label: str, low: float, high: float, *, intervals: int = 5, within: Point | None = None) -> Axis:
    """An axis around all from `low` to `high` in about so many intervals of 1, 2 or 5 times a power of ten.

    Args:
        within: Bounds that the axis never leaves, such as 0 and 100 of percentages.
    """
    least, most = within or (-math.inf, math.inf)
    low, high = (min(max(value, least), most) for value in (low, high))
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(high) / 10 or 1.0
        low, high = max(low - margin, least), min(high + margin, most)
    power = 10.0 ** math.floor(math.log10((high - low) / intervals))
    step = next(power * size for size in (1, 2, 5, 10) if power * size * intervals >= (high - low) * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(label, tuple(float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)))


def finite(points: Sequence[tuple[object, object]]) -> list[Point]:
    """The points that can be drawn."""
    return [(float(x), float(y)) for x, y in points if known(x) and known(y)]  # ty: ignore[invalid-argument-type]


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most so many points: the first, the last, and the lowest and highest of every stretch between."""
    if len(points) <= most:
        return list(points)
    inner, stretches = range(1, len(points) - 1), (most - 2) // 2
    kept = {0, len(points) - 1}
    for i in range(stretches):
        stretch = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        kept |= {min(stretch, key=lambda k: points[k][1]), max(stretch, key=lambda k: points[k][1])}
    return [points[k] for k in sorted(kept)]


def place(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{round(value, 1):g}"


def _frame(x: Axis, y: Axis) -> str:
    grid, labels = [], []
    for tick in y.ticks:
        at = place(y.y(tick))
        grid.append(f'<path d="M{LEFT} {at}H{RIGHT}"/>')
        labels.append(f'<text x="{LEFT - 7}" y="{place(y.y(tick) + 4)}" text-anchor="end">{_tick_text(tick, y)}</text>')
    for tick in x.ticks:
        at = place(x.x(tick))
        labels.append(f'<text x="{at}" y="{BOTTOM + 17}" text-anchor="middle">{_tick_text(tick, x)}</text>')
    return (
        f'<g class="grid">{"".join(grid)}</g><path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>\n'
        f'<g class="labels">{"".join(labels)}'
        f'<text class="name" x="{LEFT - 40}" y="12">{escape(y.label)}</text>'
        f'<text class="name" x="{RIGHT}" y="{BOTTOM + 35}" text-anchor="end">{escape(x.label)}</text></g>\n'
    )


def _tick_text(tick: float, axis_: Axis) -> str:
    step = axis_.ticks[1] - axis_.ticks[0]
    if not tick:
        return "0"
    if step < 9e-4 or abs(tick) >= 1e6:
        mantissa, exponent = f"{tick:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{tick:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _line(line: Series, x: Axis, y: Axis) -> str:
    if not line.points:
        return ""
    path = "L".join(f"{place(x.x(a))} {place(y.y(b))}" for a, b in thin(line.points))
    if line.colour is None:
        return f'<path class="faint" d="M{path}"/>\n'
    marks = ""
    if len(line.points) == 1 or (line.marked and len(line.points) <= MOST_MARKERS):
        marks = "".join(
            f'<circle cx="{place(x.x(a))}" cy="{place(y.y(b))}" r="3"><title>'
            f"{escape(line.name)}: {number(b, 4)} ({escape(x.label)} {a:g})</title></circle>"
            for a, b in line.points
        )
    return f'<g class="c{line.colour % len(PALETTE)}"><path class="line"{_dashes(line)} d="M{path}"/>{marks}</g>\n'


def _dashes(line: Series) -> str:
    dashes = DASHES[line.dash % len(DASHES)]
    return f' stroke-dasharray="{dashes}"' if dashes else ""


def _bar(bar: Bar, x: Axis, y: Axis) -> str:
    left, right, top = x.x(bar.low) + 0.75, x.x(bar.high) - 0.75, y.y(bar.value)
    return (
        f'<rect class="c0" x="{place(left)}" y="{place(top)}" width="{place(max(right - left, 0.5))}" '
        f'height="{place(BOTTOM - top)}"><title>{escape(bar.about)}</title></rect>\n'
    )


def _tick(tick: Bar, x: Axis, y: Axis) -> str:
    return f'<path class="aim" d="M{place(x.x(tick.low))} {place(y.y(tick.value))}H{place(x.x(tick.high))}"/>\n'


def _dot(dot: Dot, x: Axis, y: Axis) -> str:
    a, b = place(x.x(dot.x)), y.y(dot.y)
    return (
        f'<g class="dot{" ours" if dot.ours else ""}"><circle cx="{a}" cy="{place(b)}" r="9"/>'
        f'<text x="{a}" y="{place(b + 4)}" text-anchor="middle">{escape(dot.sign)}</text>'
        f"<title>{escape(dot.about)}</title></g>\n"
    )


def _swatch(line: Series) -> str:
    if line.colour is None:
        return '<svg class="swatch" viewBox="0 0 24 10" aria-hidden="true"><path class="faint" d="M0 5H24"/></svg>'
    return (
        f'<svg class="swatch c{line.colour % len(PALETTE)}" viewBox="0 0 24 10" aria-hidden="true">'
        f'<path class="line"{_dashes(line)} d="M0 5H24"/></svg>'
    )
