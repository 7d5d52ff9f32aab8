"""How the cost of models grows with the image: time, memory and operations as powers of the pixels."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..visual.plots import PALETTE, new_panels, save
from ..visual.terminal import number
from .candidates import Settings, how
from .report import caption, headline, plus_minus, table_of
from .run import Progress, Report, measure_sizes
from .timing import median_interval


@dataclass(frozen=True)
class Exponent:
    """Power of the pixels that a cost grows with, and its interval of 95 % confidence (see `median_interval`)."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = (f"{number:.2f}" for number in (self.value, self.low, self.high))
        return value if low == high else f"{value} ({low} to {high})"


@dataclass(frozen=True)
class GrowthRow:
    """Exponents of one candidate, of times medians over the rounds; None where fewer than two sizes count."""

    model: str
    runtime: str  # and the precision, if it is not fp32
    params: int
    time: Exponent | None
    cpu_time: Exponent | None
    memory: Exponent | None
    macs: Exponent | None


@dataclass(frozen=True)
class Growth:
    """Everything `measure` found, a report for each size; `dataclasses.asdict` gives what JSON can hold."""

    growth_from: int
    rows: list[GrowthRow]
    reports: list[Report]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Growth":
        rows = []
        for row in data["rows"]:
            found: dict[str, Any] = {key: Exponent(**value) for key, value in row.items() if isinstance(value, dict)}
            rows.append(GrowthRow(**(row | found)))
        return cls(data["growth_from"], rows, [Report.from_dict(report) for report in data["reports"]])


def measure(
    names: Sequence[str],
    settings: Settings,
    sizes: Sequence[tuple[int, int]],
    growth_from: int = 512,
    progress: Progress | None = None,
    artefacts: str | Path | None = None,
) -> Growth:
    """Time models at several image sizes, and find how costs grow at those of `growth_from` squared pixels or more."""
    if twice := [size for place, size in enumerate(sizes) if size in sizes[:place]]:
        raise ValueError("size {}x{} is given twice; expected different sizes".format(*twice[0]))
    reports = measure_sizes(names, settings, sizes, progress, artefacts)
    return Growth(growth_from, exponents(reports, growth_from), reports)


def exponents(reports: Sequence[Report], growth_from: int) -> list[GrowthRow]:
    """A row for each candidate of reports that differ in size alone."""
    counted = [report for report in reports if math.prod(report.settings.size) >= growth_from**2]
    pixels = [math.prod(report.settings.size) for report in counted]

    def exponent(samples: list[Any]) -> Exponent | None:
        """Of costs by size, and for each size by round."""
        slopes = [found for costs in zip(*samples, strict=True) if (found := slope(pixels, costs)) is not None]
        return Exponent(statistics.median(slopes), *median_interval(slopes)) if slopes else None

    rows = []
    for place, first in enumerate(reports[0].rows):
        mine = [report.rows[place] for report in counted]
        times = exponent([row.wall_samples_ms for row in mine]), exponent([row.cpu_samples_ms for row in mine])
        exact = exponent([[row.peak_bytes] for row in mine]), exponent([[row.macs] for row in mine])
        rows.append(GrowthRow(first.model, how(first), first.params, *times, *exact))
    return rows


def slope(pixels: Sequence[int], values: Sequence[float | None]) -> float | None:
    """Slope of the least-squares line of log(value) over log(pixels); None without two sizes and positive values."""
    known = [value for value in values if value is not None and value > 0]
    if len(set(pixels)) < 2 or len(known) < len(values):
        return None
    x, y = [math.log(count) for count in pixels], [math.log(value) for value in known]
    return statistics.linear_regression(x, y).slope


def render(growth: Growth) -> Table:
    """Make a table with one row per candidate: time and memory at every size, and the exponents."""
    memory, side = "MB at the worst moment of a call beyond weights and images", growth.growth_from
    about = f"{caption(growth.reports[0])}\n± is the inter-quartile range; {memory}\n"
    about += f"exponents in pixels, from {side}x{side} up: median of the rounds' slopes and where it lies"
    headings = ["params\nM"]
    for report in growth.reports:
        headings += [f"{_size(report)}\nms", "\nMB"]
    headings += [f"exponent\n{what}" for what in ("time", "CPU time", "memory", "MACs")]
    lines = []
    for place, row in enumerate(growth.rows):
        cells = [number(row.params, 1e6, 2)]
        for found in (report.rows[place] for report in growth.reports):
            cells += [plus_minus(found.wall_ms, 1), number(found.peak_bytes, 1e6, 1)]
        cells += [str(one or "-") for one in (row.time, row.cpu_time, row.memory, row.macs)]
        lines.append((row.model, row.runtime, *cells))
    return table_of(_title(growth), about, headings, lines)


def plot(growth: Growth, path: str | Path) -> None:
    """Draw time and peak memory over pixels, both axes logarithmic, the exponents in the legends."""
    figure, panels = new_panels(path, 12, 5 + 0.1 * len(growth.rows), columns=2)
    reports = sorted(growth.reports, key=lambda report: math.prod(report.settings.size))
    pixels = [math.prod(report.settings.size) for report in reports]
    ticks: dict[int, str] = {}
    for count, report in zip(pixels, reports, strict=True):
        if not ticks or count > 1.1 * max(ticks):  # the names of nearly equal sizes would overlap
            ticks[count] = _size(report)
    several = len({row.runtime for row in growth.rows}) > 1
    for panel, label, cost, exponent in (
        (panels[0], f"time, ms per batch of {reports[0].settings.batch}", lambda one: one.wall_ms.median, "time"),
        (panels[1], "peak memory, MB", lambda one: (one.peak_bytes or math.nan) / 1e6, "memory"),
    ):
        for place, row in enumerate(growth.rows):
            name, found = f"{row.model} ({row.runtime})" if several else row.model, getattr(row, exponent)
            look: dict[str, Any] = dict(color=PALETTE[place % len(PALETTE)], marker="o", markersize=4)
            look["linestyle"] = ("-", "--", ":", "-.")[place // len(PALETTE) % 4]  # when there are more than colours
            look["label"] = f"{name}: {'-' if found is None else f'{found.value:.2f}'}"
            panel.plot(pixels, [cost(report.rows[place]) for report in reports], **look)
        panel.set(xscale="log", yscale="log", xlabel="image, on a scale of pixels", ylabel=label)
        panel.set_xticks(list(ticks), list(ticks.values()), rotation=45, ha="right", minor=False)
        panel.set_xticks([], minor=True)
        panel.grid(True, which="major", alpha=0.3)
        panel.legend(title=f"exponent from {growth.growth_from}² up", fontsize=8, frameon=False)
    figure.suptitle(_title(growth), fontsize=10)
    save(figure, path)


def _title(growth: Growth) -> str:
    return headline(growth.reports[0].settings, ", ".join(_size(report) for report in growth.reports))


def _size(report: Report) -> str:
    return "{}x{}".format(*report.settings.size)
