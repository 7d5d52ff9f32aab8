"""Size, MACs, latency and accuracy of models: a row for each, as a table and as points of a plot in HTML.

Gradio's own plot shows wrong figures when its axes change, and cannot be reached by keyboard.
"""

import json
from collections.abc import Sequence
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
from ..visual.metrics import GOALS, TASKS, label
from ..visual.words import milliseconds
from .answers import answer, colour_of
from .candidates import Candidate
from .gate import without_paths

MOST = 6  # models at once, each with a colour of its own
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

    def value(self, key: str) -> float | None:
        """Value on one of AXES, in its unit, or None if it is not known."""
        macs, parameters = None if self.macs is None else self.macs / 1e9, self.parameters / 1e6
        return dict(accuracy=self.accuracy, latency=self.latency.median, macs=macs, parameters=parameters)[key]

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


def compare(chosen: Sequence[Candidate], image: Image.Image) -> list[Row]:
    """Collect the figures of models, times taken in turns on one image; nothing else may compute meanwhile."""
    if not chosen:
        raise ValueError("no model is chosen; choose at least one")
    if len(chosen) > MOST:
        raise ValueError(f"{len(chosen)} models are chosen; expected at most {MOST}")
    rows = []
    for one, said in zip(chosen, answer(chosen, image), strict=True):
        accuracy, place = accuracy_of(one)
        costs = one.run.parameters, _macs(one, image), said.latency
        rows.append(Row(one.name, said.task, one.trained, *costs, accuracy, label(GOALS[said.task]), place))
    return rows


def accuracy_of(one: Candidate, evaluations: Path = Path("evaluations")) -> tuple[float | None, str]:
    """Newest accuracy of a model in per cent, and its place: an evaluation of this model, or the run's own."""
    own = Path(one.source).absolute() if Path(one.source).is_dir() else None
    for path in sorted(evaluations.glob("*/evaluation.json"), key=lambda path: -path.stat().st_mtime):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            value, source = record["figures"][GOALS[one.run.task]], str(record["model"]["source"])
        except (ValueError, OSError, LookupError, TypeError):  # damaged, or about something else
            continue
        same = Path(source).absolute() == own if own else source == one.source and one.trained
        if isinstance(value, (int, float)) and same:
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


def plot(points: Sequence[dict[str, Any]], x_label: str, y_label: str) -> str:
    """Write the plot as HTML, or nothing where there is no point. Both axes begin at zero."""
    if not points:
        return ""
    highest = (max(point[key] for point in points) * 1.05 or 1 for key in "xy")
    x, y = (axis(words, 0, most) for words, most in zip((x_label, y_label), highest, strict=True))
    return html.render("app/plot", points=points, x=x, y=y)


def points(rows: Sequence[Row], x: str, y: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Points of the plot, and of each model that has none the reason: a figure is not known, or is another measure."""
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
            look = dict(place=place, colour=colour_of(row.name, names), about=row.figures)
            drawn.append(dict(name=row.name, x=row.value(x), y=row.value(y), **look))
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
