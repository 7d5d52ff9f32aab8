"""Points of a front: cost and accuracy of models, read from the files that other commands wrote."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..models.from_run import read_config

AXES = ("latency_ms", "macs", "parameters")
IMAGENET = "ImageNet-1K"  # what all published accuracies are of
# A run folder -> its "title", "parameters", "macs" and "latency_ms", as far as they are known.
Measured = Callable[[Path], Mapping[str, Any]]


@dataclass(frozen=True)
class Point:
    """Cost and accuracy of one model.

    Args:
        label: Its name in the figure.
        x: Its cost: milliseconds for an image, MACs, or parameters; None if not known.
        accuracy: Top-1 in per cent; None if not known.
        source: "ours", or "paper" for a published accuracy.
        data: The images of the accuracy.
        low, high: Quartiles of the cost, if known.
        conditions: How the cost was measured.
        model: The model's name in other files; the label if empty.
    """

    label: str
    x: float | None
    accuracy: float | None
    source: str = "ours"
    data: str = ""
    low: float | None = None
    high: float | None = None
    conditions: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        if self.source not in ("ours", "paper"):
            raise ValueError(f"source={self.source!r} of {self.label}; expected 'ours' or 'paper'")

    @property
    def name(self) -> str:
        return self.model or self.label

    @property
    def complete(self) -> bool:
        return all(value is not None and math.isfinite(value) for value in (self.x, self.accuracy))


def check_axis(x: str) -> str:
    if x not in AXES:
        raise ValueError(f"x={x!r} is not known; choose {', '.join(AXES)}")
    return x


def read_points(path: str | Path, x: str = "latency_ms", measured: Measured | None = None) -> list[Point]:
    """The models that a file or folder describes.

    Args:
        path: A file of `broadsight eval` (evaluation.json or its folder), `broadsight bench --json` or `list --json`,
            or the folder of a run, whose accuracy is its best on the validation images.
        x: One of AXES.
        measured: Gives the costs of a run, which its folder does not hold except for its parameters.

    Raises:
        FileNotFoundError, ValueError: There is no such file, or it holds neither accuracies nor costs.
    """
    check_axis(x)
    path = Path(path)
    if path.is_dir():
        if (path / "evaluation.json").is_file():
            return read_points(path / "evaluation.json", x, measured)
        return [_of_run(path, x, measured)]
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; give an evaluation.json, a bench --json file or a run's folder")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); give an evaluation.json or a bench --json file") from None
    keys = set(record) if isinstance(record, dict) else set()
    try:
        if isinstance(record, list) and record and all(isinstance(row, dict) and "paper_top1" in row for row in record):
            return paper_points(record, x)
        if keys >= {"figures", "model"}:
            return list(_of_evaluation(record, x, path))
        if "reports" in keys and isinstance(record["reports"], list):
            return [point for report in record["reports"] for point in _of_bench(report, x, path, sized=True)]
        if keys >= {"rows", "settings"}:
            return list(_of_bench(record, x, path))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged or of another version ({type(error).__name__}: {error})") from None
    raise ValueError(f"{path} holds no accuracy or cost; give an evaluation.json or a bench --json file")


def paper_points(rows: Iterable[Mapping[str, Any]], x: str = "latency_ms") -> list[Point]:
    """Published accuracies and costs; no latency, since papers measure it on other machines.

    Args:
        rows: Of `broadsight.papers.verify.catalogue`.
    """
    column, unit = {"macs": ("paper_macs_g", 1e9), "parameters": ("paper_params_m", 1e6)}.get(check_axis(x), ("", 1.0))
    points = []
    for row in rows:
        cost = None if row.get(column) is None else unit * float(row[column])
        points.append(Point(row["model"], cost, row.get("paper_top1"), "paper", IMAGENET, conditions="as published"))
    return points


def _of_evaluation(record: Mapping[str, Any], x: str, path: Path) -> Iterable[Point]:
    figures = record["figures"]
    if record.get("kind", "evaluation") != "evaluation" or not ({"title", "parameters"} <= set(record["model"])):
        raise ValueError(f"{path} is no evaluation of a classifier")
    if record["data"].get("task", "classify") != "classify":
        raise ValueError(f"{path} is of a model for {record['data']['task']}; expected one that classifies")
    data, how = _data_of(record), record.get("how", {})
    for model in ({**record["model"], "figures": figures}, *record.get("beside", ())):
        size = "x".join(map(str, (model.get("input_size") or ())[1:]))
        words = [how.get("device", ""), f"{how['threads']} threads" if "threads" in how else "", "batch 1", size]
        costs = {name: model.get(name) for name in AXES}
        accuracy = model["figures"].get("top1")
        yield point_of(model["title"], costs, x, accuracy, data, ", ".join(filter(None, words)))


def _data_of(record: Mapping[str, Any]) -> str:
    """Which images: evaluations on different ones cannot be compared."""
    asked, found = record.get("asked", {}), record["data"]
    samples = f"{asked['samples']} images" if asked.get("samples") else ""
    words = (asked.get("data") or found.get("data") or found.get("kind"), found.get("part"), samples)
    return ", ".join(str(word) for word in words if word)


def _of_bench(record: Mapping[str, Any], x: str, path: Path, sized: bool = False) -> Iterable[Point]:
    settings, rows = record["settings"], record["rows"]
    if settings.get("head_only"):
        raise ValueError(f"{path} holds times of pools alone; run bench without --head-only")
    if settings.get("train") and x == "latency_ms":
        raise ValueError(f"{path} holds times of training steps; run bench without --train")
    size, batch = "x".join(map(str, settings["size"])), settings["batch"]
    several = len({row["runtime"] for row in rows}) > 1
    words = [settings["device"], f"{settings['threads']} threads", f"batch {batch}", size, settings["dtype"]]
    for row in rows:
        model = row["model"].replace(" + ", "-")  # as the folders of runs are named
        label = model + (f", {row['runtime']}" if several else "") + (f" at {size}" if sized else "")
        latency = {"median": row["wall_ms"]["median"] / batch, "minimum": 0.0, "spread": row["wall_ms"]["spread"]}
        samples = [one / batch for one in row.get("wall_samples_ms", ())]
        if len(samples) > 1:
            latency["quartiles"] = statistics.quantiles(samples, n=4, method="inclusive")[::2]
        costs = {"latency_ms": latency, "macs": row["macs"], "parameters": row["params"]}
        yield replace(point_of(label, costs, x, None, "", ", ".join(words)), model=model)


def _of_run(path: Path, x: str, measured: Measured | None) -> Point:
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} holds neither an evaluation nor a run; give what eval or train wrote")
    try:
        run = dict(read_config(path).get("broadsight", {}))
        task, data = run.get("task", "classify"), dict(run.get("settings", {})).get("data")
        metrics = path / "metrics.jsonl"
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
        found = [json.loads(line) for line in lines]
        best = max((line["val_top1"] for line in found if line.get("val_top1") is not None), default=None)
        best = next((line["best"] for line in reversed(found) if "best" in line), best)  # None: epochs do not compare
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} holds a damaged run ({error})") from None
    if task != "classify":
        raise ValueError(f"{path} holds a run of --task {task}; expected one that classifies")
    costs: dict[str, Any] = {"parameters": run.get("parameters")}
    if measured is not None:
        costs |= {name: value for name, value in measured(path).items() if value is not None}
    data = ", ".join(filter(None, [str(data or ""), "val"]))
    return point_of(costs.get("title") or path.absolute().name, costs, x, best, data, costs.get("conditions", ""))


def point_of(label: str, costs: Mapping[str, Any], x: str, accuracy: float | None, data: str, conditions: str) -> Point:
    """A point of our own. Without quartiles, half of a latency's spread lies to either side, from the minimum on.

    Args:
        costs: By axis: None, a number, or a latency with "median", "minimum", "spread" and perhaps "quartiles".
        conditions: Of a latency.
    """
    cost = costs.get(x)
    if cost is None or isinstance(cost, int | float):
        at, low, high = None if cost is None else float(cost), None, None
    else:
        cost = cost if isinstance(cost, Mapping) else vars(cost)
        at, half = cost["median"], cost["median"] * cost["spread"] / 2
        low, high = cost.get("quartiles", (min(at, max(at - half, cost["minimum"])), at + half))
    return Point(label, at, accuracy, "ours", data, low, high, conditions if x == "latency_ms" else "")
