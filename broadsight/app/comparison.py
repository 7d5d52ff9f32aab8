"""Size, MACs, latency and accuracy of models: a row for each, as a table and as points of a plot.

The plot is HTML, not Gradio's: that one shows wrong figures when its axes change, and cannot be reached by keyboard.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from ..benchmark.timing import Summary
from ..evaluation.run import macs_of
from ..prediction.dense import finder
from ..report.charts import axis
from ..training.run_folder import RunFolder
from ..visual import html
from ..visual.metrics import GOALS, label
from ..visual.words import milliseconds
from .answers import answer
from .candidates import Candidate
from .cards import TASKS, colour_of
from .gate import without_paths

MOST = 6  # models at once, each with a colour of its own
EVALUATIONS = Path("evaluations")
AXES = {"accuracy": "accuracy, %", "latency": "latency, ms", "macs": "MACs, G", "parameters": "parameters, M"}


@dataclass(frozen=True)
class Row:
    """Figures of one model."""

    name: str
    task: str
    trained: bool
    parameters: int
    macs: int | None  # multiply-accumulates of one image, or None if they cannot be counted
    latency: Summary  # milliseconds
    accuracy: float | None  # in per cent, or None if it was never measured
    measure: str  # what accuracy means for the task
    measured_on: str

    def value(self, key: str) -> Any:
        """Value on one of AXES, in its unit, or None if it is not known."""
        macs = None if self.macs is None else self.macs / 1e9
        values = dict(accuracy=self.accuracy, latency=self.latency.median, macs=macs, parameters=self.parameters / 1e6)
        return values[key]

    @property
    def figures(self) -> dict[str, str]:
        """Figures in words, those that are not known included."""
        return {
            "task": TASKS[self.task],
            "parameters": f"{self.parameters / 1e6:.2f} M",
            "size": f"{4 * self.parameters / 1e6:.1f} MB",
            "MACs": "not counted" if self.macs is None else f"{self.macs / 1e9:.3f} G",
            "latency": milliseconds(self.latency.median),
            "accuracy": "not run" if self.accuracy is None else f"{self.accuracy:.1f} % {self.measure}",
        }

    @property
    def notes(self) -> dict[str, str]:
        """Small print below figures."""
        return {"latency": f"± {50 * self.latency.spread:.0f} %", "accuracy": self.measured_on}


@dataclass(frozen=True)
class Point:
    """A model in the plot: its place on the axes, number and colour of its shape, and its figures in words."""

    name: str
    x: float
    y: float
    place: int
    colour: str
    about: Mapping[str, str]


def compare(chosen: Sequence[Candidate], image: Image.Image) -> list[Row]:
    """Collect the figures of models; their times are taken in turns on one image.

    The caller makes sure that nothing else computes meanwhile.
    """
    if not chosen:
        raise ValueError("no model is chosen; choose at least one")
    if len(chosen) > MOST:
        raise ValueError(f"{len(chosen)} models are chosen; expected at most {MOST}")
    rows = []
    for one, said in zip(chosen, answer(chosen, image), strict=True):
        costs = one.run.parameters, _macs(one, image), said.latency
        accuracy, place = accuracy_of(one)
        rows.append(Row(one.name, said.task, one.trained, *costs, accuracy, label(GOALS[said.task]), place))
    return rows


def accuracy_of(one: Candidate, evaluations: Path = EVALUATIONS) -> tuple[float | None, str]:
    """Newest accuracy of a model in per cent, and its place: an evaluation of this model, or the run's own."""
    for path in sorted(evaluations.glob("*/evaluation.json"), key=lambda path: -path.stat().st_mtime):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            value, source = record["figures"][GOALS[one.run.task]], record["model"]["source"]
        except (ValueError, OSError, LookupError, TypeError):  # damaged, or about something else
            continue
        if isinstance(value, (int, float)) and _is_source(str(source), one):
            return float(value), f"evaluation {path.parent.name}"
    try:
        folder = RunFolder(one.source)
        lines = [line for line in folder.metrics() if line.get("kind") == "epoch"]
        data = folder.config().get("broadsight", {}).get("settings", {}).get("data")
    except (ValueError, OSError):  # no run, written to at this moment, or damaged
        return None, ""
    best = next((line["best"] for line in reversed(lines) if isinstance(line.get("best"), (int, float))), None)
    place = f"validation of the run{f', {without_paths(str(data))}' if data else ''}"
    return (None, "") if best is None else (best, place)


def table(rows: Sequence[Row]) -> str:
    """Write the figures of at least one model as an HTML table."""
    order = [row.name for row in rows]
    return html.render("app/table", rows=rows, colours={name: colour_of(name, order) for name in order})


def plot(points: Sequence[Point], x_label: str, y_label: str) -> str:
    """Write the plot as HTML, or nothing where there is no point. Both axes begin at zero."""
    if not points:
        return ""
    across = axis(x_label, 0, max(point.x for point in points) * 1.05 or 1)
    upwards = axis(y_label, 0, max(point.y for point in points) * 1.05 or 1)
    return html.render("app/plot", points=points, x=across, y=upwards)


def points(rows: Sequence[Row], x: str, y: str) -> tuple[list[Point], list[str]]:
    """Points of the models that can be drawn, and for each of the others the reason: a figure is not known, or is
    another measure."""
    measures = [row.measure for row in rows if row.accuracy is not None]
    shared = max(dict.fromkeys(measures), key=measures.count, default="top-1")
    names = [row.name for row in rows]
    drawn, missing = [], []
    for place, row in enumerate(rows):
        lacking = [AXES[key].partition(",")[0] for key in dict.fromkeys((x, y)) if row.value(key) is None]
        if lacking:
            missing.append(f"{row.name}: {' and '.join(lacking)} not known")
        elif "accuracy" in (x, y) and row.measure != shared:
            missing.append(f"{row.name}: measured in {row.measure}, not in {shared}")
        else:
            at = float(row.value(x)), float(row.value(y))
            drawn.append(Point(row.name, *at, place, colour_of(row.name, names), row.figures))
    return drawn, missing


def first_axes(rows: Sequence[Row]) -> tuple[str, str]:
    """Axes to begin with: accuracy over latency if any accuracy is known, else latency over MACs."""
    return ("latency", "accuracy") if any(row.accuracy is not None for row in rows) else ("macs", "latency")


def _macs(one: Candidate, image: Image.Image) -> int | None:
    run: Any = one.run
    if one.classifies:
        return macs_of(run)
    try:
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            finder(run)(image.convert("L") if run.channels == 1 else image, None)
        return counter.get_total_flops() // 2
    except Exception:  # a model may do what cannot be counted; the page shows the other figures
        return None


def _is_source(source: str, one: Candidate) -> bool:
    if Path(one.source).is_dir():
        return Path(source).absolute() == Path(one.source).absolute()
    return source == one.source and one.trained
