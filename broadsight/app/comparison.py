"""Size, MACs, latency and accuracy of models: a row for each, as a table and as points of a plot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from ..benchmark.timing import Summary
from ..evaluation.run import macs_of
from ..prediction.dense import finder
from ..training.run_folder import RunFolder
from .answers import answer
from .candidates import Contestant
from .cards import TASKS, colour_of, milliseconds
from .gate import without_paths
from .scatter import Point, marker

MOST = 6  # models at once, each with a colour of its own
EVALUATIONS = Path("evaluations")
# What a task is after: the figure in records, and in words.
GOALS = {
    "classify": ("top1", "top-1"),
    "detect": ("box_ap", "box AP"),
    "instances": ("mask_ap", "mask AP"),
    "segment": ("miou", "mIoU"),
    "keypoints": ("keypoint_ap", "keypoint AP"),
}
HEADS = ("task", "parameters", "size", "MACs", "latency", "accuracy")  # of a table, behind the model
NOT_RUN, NOT_COUNTED = "not run", "not counted"
AXES = {
    "accuracy": "accuracy, %",
    "latency": "latency, ms",
    "macs": "MACs, G",
    "parameters": "parameters, M",
}


@dataclass(frozen=True)
class Row:
    """Figures of one model.

    Args:
        macs: Multiply-accumulates of one image, or None if they cannot be counted.
        latency: Milliseconds.
        accuracy: In per cent, or None if nobody has measured it.
        measure: What accuracy means for its task.
        measured_on: Where it was measured.
    """

    name: str
    task: str
    trained: bool
    parameters: int
    macs: int | None
    latency: Summary
    accuracy: float | None
    measure: str
    measured_on: str

    def value(self, axis: str) -> float | None:
        """What a plot shows."""
        if axis == "accuracy":
            return self.accuracy
        if axis == "latency":
            return self.latency.median
        if axis == "macs":
            return None if self.macs is None else self.macs / 1e9
        return self.parameters / 1e6


def compare(chosen: Sequence[Contestant], image: Image.Image) -> list[Row]:
    """Figures of models; their times are taken in turns on one image.

    Whoever calls sees to it that nothing else computes meanwhile.
    """
    if not chosen:
        raise ValueError("no model is chosen; choose at least one")
    if len(chosen) > MOST:
        raise ValueError(f"{len(chosen)} models are chosen; expected at most {MOST}")
    rows = []
    for one, said in zip(chosen, answer(chosen, image), strict=True):
        accuracy, measured_on = accuracy_of(one)
        measure = GOALS[one.task][1]
        rows.append(
            Row(
                one.name,
                one.task,
                one.trained,
                one.parameters,
                _macs(one, image),
                said.latency,
                accuracy,
                measure,
                measured_on,
            )
        )
    return rows


def accuracy_of(one: Contestant, evaluations: Path = EVALUATIONS) -> tuple[float | None, str]:
    """The newest that was measured, in per cent, and where: an evaluation of this model, or the run's own."""
    figure = GOALS[one.task][0]
    for path in sorted(evaluations.glob("*/evaluation.json"), key=lambda path: -path.stat().st_mtime):
        record = _read(path)
        value = record.get("figures", {}).get(figure)
        source = record.get("model", {}).get("source")
        if isinstance(value, (int, float)) and source is not None and _same(str(source), one):
            return float(value), f"evaluation {path.parent.name}"
    if not Path(one.source).is_dir():
        return None, ""
    try:
        lines = [line for line in RunFolder(one.source).metrics() if line.get("kind") == "epoch"]
        data = RunFolder(one.source).config().get("broadsight", {}).get("settings", {}).get("data")
    except (ValueError, OSError):  # written to at this moment, or damaged
        return None, ""
    best = next((line["best"] for line in reversed(lines) if isinstance(line.get("best"), (int, float))), None)
    return best, f"validation of the run{f', {without_paths(str(data))}' if data else ''}" if best is not None else ""


def table(rows: Sequence[Row]) -> str:
    """As HTML; figures that nobody has are named, not left empty."""
    head = "".join(f'<th scope="col">{text}</th>' for text in ("model", *HEADS))
    order = [row.name for row in rows]
    body = "".join(f"<tr>{_cells(row, order)}</tr>" for row in rows)
    return (
        '<div class="bs-scroll" tabindex="0" role="region" aria-label="Figures of the models">'
        f'<table class="bs-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def points(rows: Sequence[Row], x: str, y: str) -> tuple[list[Point], list[str]]:
    """What can be drawn, and why the others cannot: who lacks a figure, or has one that means something else."""
    measures = [row.measure for row in rows if row.accuracy is not None]
    shared = max(dict.fromkeys(measures), key=measures.count, default="top-1")
    names = [row.name for row in rows]
    drawn, missing = [], []
    for place, row in enumerate(rows):
        values = {axis: row.value(axis) for axis in (x, y)}
        lacking = [AXES[axis].partition(",")[0] for axis, value in values.items() if value is None]
        if lacking:
            missing.append(f"{row.name}: {' and '.join(lacking)} not known")
        elif "accuracy" in values and row.measure != shared:
            missing.append(f"{row.name}: measured in {row.measure}, not in {shared}")
        else:
            at = [float(value) for value in (values[x], values[y]) if value is not None]
            drawn.append(Point(row.name, at[0], at[-1], place, colour_of(row.name, names), _about(row)))
    return drawn, missing


def first_axes(rows: Sequence[Row]) -> tuple[str, str]:
    """Accuracy over latency where there is any, else latency over MACs."""
    if any(row.accuracy is not None for row in rows):
        return "latency", "accuracy"
    return "macs", "latency"


def _about(row: Row) -> dict[str, str]:
    """A model's figures in words."""
    return {
        "task": TASKS[row.task],
        "parameters": f"{row.parameters / 1e6:.2f} M",
        "size": f"{4 * row.parameters / 1e6:.1f} MB",
        "MACs": NOT_COUNTED if row.macs is None else f"{row.macs / 1e9:.3f} G",
        "latency": milliseconds(row.latency.median),
        "accuracy": NOT_RUN if row.accuracy is None else f"{row.accuracy:.1f} % {row.measure}",
    }


def _cells(row: Row, order: Sequence[str]) -> str:
    random = "" if row.trained else ' <span class="bs-tag bs-random">random weights</span>'
    more = {"latency": f"± {50 * row.latency.spread:.0f} %", "accuracy": row.measured_on}
    figures = ""
    for label, value in _about(row).items():
        small = f"<small>{escape(more[label])}</small>" if more.get(label) else ""
        shown = f'<span class="bs-none">{value}</span>' if value in (NOT_RUN, NOT_COUNTED) else escape(value)
        # a narrow screen shows each figure on a line of its own, behind its label
        figures += f'<td data-label="{label}">{shown}{small}</td>'
    sign = marker(order.index(row.name), colour_of(row.name, order))
    return f'<th scope="row">{sign}{escape(row.name)}{random}</th>{figures}'


def _macs(one: Contestant, image: Image.Image) -> int | None:
    if one.classifier is not None:
        return macs_of(one.classifier)
    run: Any = one.run
    try:
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            finder(run)(image.convert("L") if run.channels == 1 else image, None)
        return counter.get_total_flops() // 2
    except Exception:  # a courtesy, as in evaluation
        return None


def _same(source: str, one: Contestant) -> bool:
    if Path(one.source).is_dir():
        return Path(source).absolute() == Path(one.source).absolute()
    return source == one.source and one.trained


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}
