"""Charts of lines, bars and dots on axes that end at round numbers, as wide as a telephone: templates draw them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..visual.plots import PALETTE
from ..visual.words import coordinate, known, number

LEFT, RIGHT, TOP, BOTTOM = 44, 308, 26, 186  # edges of the plot area
MOST_POINTS, MOST_MARKERS = 600, 40  # of a line
INTERVALS = 5  # between ticks of an axis, about
DASHES = ("", "7 4", "2 3", "9 3 2 3")

Point = tuple[float, float]


class Axis(NamedTuple):
    """An axis from the first to the last of its ticks. `x` and `y` turn values into pixels."""

    label: str
    ticks: tuple[float, ...]
    low = property(lambda self: self.ticks[0])
    high = property(lambda self: self.ticks[-1])

    def x(self, value: float) -> float:
        return LEFT + (value - self.low) / (self.high - self.low) * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        return BOTTOM - (value - self.low) / (self.high - self.low) * (BOTTOM - TOP)

    def text(self, tick: float) -> str:
        """Format a tick with as many digits as the step between ticks needs."""
        step = self.ticks[1] - self.ticks[0]
        if not tick:
            return "0"
        if step < 9e-4 or abs(tick) >= 1e6:
            mantissa, exponent = f"{tick:.2e}".split("e")
            return f"{float(mantissa):g}e{int(exponent)}"
        return f"{tick:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


class Series(NamedTuple):
    """A line through points. Without a colour it stays in the background; `marked` shows its points if they are few."""

    name: str
    points: Sequence[Point]
    colour: int | None = None
    dash: int = 0
    marked: bool = True
    kind = property(lambda self: "" if self.colour is None else f"c{self.colour % len(PALETTE)}")  # a CSS class
    dashes = property(lambda self: DASHES[self.dash % len(DASHES)])

    @property
    def markers(self) -> Sequence[Point]:
        """Points that are drawn as such."""
        few = len(self.points) == 1 or (self.marked and len(self.points) <= MOST_MARKERS)
        return self.points if few and self.colour is not None else ()


class Bar(NamedTuple):
    """A bar from `low` to `high` on the x-axis, as high as `value`."""

    low: float
    high: float
    value: float
    about: str = ""


class Dot(NamedTuple):
    """A dot with a sign in it, such as the number of a model; `ours` stands out."""

    x: float
    y: float
    sign: str
    about: str = ""
    ours: bool = False


class Chart(NamedTuple):
    """A chart: all that is drawn on one pair of axes, in this order."""

    width, height, left, right, bottom = 320, 226, LEFT, RIGHT, BOTTOM  # for the template

    title: str
    x: Axis
    y: Axis
    bars: Sequence[Bar] = ()
    lines: Sequence[Series] = ()
    ticks: Sequence[Bar] = ()  # short horizontal strokes, such as where a bar should have ended
    dots: Sequence[Dot] = ()
    legend: Sequence[tuple[str, str]] = ()  # CSS classes of other marks than lines, and what they mean

    @property
    def description(self) -> str:
        """Text for readers who do not see the chart: axes, ends of the lines, dots."""
        shown = (line for line in self.lines if line.points and line.colour is not None)
        ends = [f"{one.name} from {number(one.points[0][1])} to {number(one.points[-1][1])}" for one in shown]
        return "; ".join([f"{self.title}: {self.y.label} by {self.x.label}", *ends, *(dot.about for dot in self.dots)])

    def path(self, line: Series) -> str:
        """Path of a line, for SVG."""
        points = (f"{coordinate(self.x.x(x))} {coordinate(self.y.y(y))}" for x, y in thin(line.points))
        return f"M{'L'.join(points)}"


def axis(label: str, low: float, high: float, *, within: Point | None = None) -> Axis:
    """An axis from below `low` to above `high`, never beyond `within`, in steps of 1, 2 or 5 times a power of ten."""
    least, most = within or (-math.inf, math.inf)
    low, high = (min(max(value, least), most) for value in (low, high))
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(high) / 10 or 1.0
        low, high = max(low - margin, least), min(high + margin, most)
    power = 10.0 ** math.floor(math.log10((high - low) / INTERVALS))
    step = next(power * size for size in (1, 2, 5, 10) if power * size * INTERVALS >= (high - low) * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(label, tuple(float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)))


def finite(points: Sequence[tuple[object, object]]) -> list[Point]:
    """Keep the points whose two coordinates are numbers."""
    return [(float(x), float(y)) for x, y in points if known(x) and known(y)]  # ty: ignore[invalid-argument-type]


def thin(points: Sequence[Point]) -> list[Point]:
    """Reduce a line to at most MOST_POINTS: its ends, and the lowest and highest point of every stretch between."""
    if len(points) <= MOST_POINTS:
        return list(points)
    inner, stretches = range(1, len(points) - 1), (MOST_POINTS - 2) // 2
    kept = {0, len(points) - 1}
    for i in range(stretches):
        stretch = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        kept |= {min(stretch, key=lambda k: points[k][1]), max(stretch, key=lambda k: points[k][1])}
    return [points[k] for k in sorted(kept)]
