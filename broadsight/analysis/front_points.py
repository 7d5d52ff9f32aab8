"""Points of a front: cost and accuracy of models, from the files that other commands wrote and the papers' tables."""

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import unknown
from ..models.from_run import read_config
from ..papers.tables import published

AXES = ("latency_ms", "macs", "parameters")


@dataclass(frozen=True)
class Point:
    """Cost and accuracy of one model."""

    label: str  # its name in the figure
    x: float | None  # milliseconds for an image, MACs, or parameters
    accuracy: float | None  # top-1 in per cent
    source: str = "ours"  # or "paper" for a published accuracy
    data: str = ""  # the images of the accuracy
    low: float | None = None  # quartiles of the cost, if known
    high: float | None = None
    conditions: str = ""  # how the cost was measured
    model: str = ""  # the model's name in other files; the label if empty
    size: int | None = None  # side of the images in pixels, if known
    machine: str = ""  # that a paper timed the cost on; costs of one share no front with those of another
    highlight: bool = False  # among a paper's rows: one of its own models

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


def read_points(path: str | Path, x: str = "latency_ms", measured: Mapping[str, Any] | None = None) -> list[Point]:
    """The models that a file of `eval`, `bench --json` or `list --json`, or the folder of a run or `eval` describes.

    Args:
        x: One of AXES.
        measured: "title", "macs", "latency_ms", "input_size" and "conditions" of a run, as far as known; its folder
            holds parameters.
    """
    check_axis(x)
    path = Path(path)
    if path.is_dir() and (path / "evaluation.json").is_file():
        path /= "evaluation.json"
    if path.is_dir():
        return [_of_run(path, x, measured or {})]
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; give an evaluation.json, a bench --json file or a run's folder")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); give an evaluation.json or a bench --json file") from None
    keys = set(record) if isinstance(record, dict) else set()
    rows = record if isinstance(record, list) else []
    try:
        if rows and all(isinstance(row, dict) and "paper_top1" in row for row in rows):
            return paper_points(rows, x)
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
    """Published accuracies and costs, from rows of `papers.verify.catalogue`; latency is of other machines."""
    column, unit = {"macs": ("paper_macs_g", 1e9), "parameters": ("paper_params_m", 1e6)}.get(check_axis(x), ("", 1.0))

    def point(row: Mapping[str, Any]) -> Point:
        cost = None if row.get(column) is None else unit * float(row[column])
        about: dict[str, Any] = dict(conditions="as published", size=224)  # which our models' papers publish for
        return Point(row["model"], cost, row.get("paper_top1"), "paper", "ImageNet-1K", **about)

    return [point(row) for row in rows]


def find_tables(names: str | Sequence[str], x: str = "all") -> dict[str, dict[str, Any]]:
    """The papers' tables of comparison of those names, or "all"; a ValueError for unknown ones, or without times."""
    known = published("competitors.yaml")["tables"]
    timed = [name for name, table in known.items() if "machines" in table]
    named: list[Any] = list(names) if isinstance(names, list | tuple) else [names]
    for name in named:
        if name not in ("all", *known):
            raise unknown("table of competitors", name, ("all", *known))
        if x == "latency_ms" and name not in ("all", *timed):
            raise ValueError(f"competitors={name} prints no times; take x=macs or parameters, or {', '.join(timed)}")
    return {name: table for name, table in known.items() if name in named or "all" in named}


def competitor_points(tables: Iterable[Mapping[str, Any]], x: str = "latency_ms") -> list[Point]:
    """All rows of tables that `find_tables` gives; times once for each machine that a table names, of one image."""
    units, points = {"macs": ("macs", 1e9), "parameters": ("params", 1e6)}, []
    for table in tables:
        machines = table.get("machines", {}) if check_axis(x) == "latency_ms" else {units[x][0]: ""}
        for cells in table["rows"]:
            row = {name: cell for name, cell in zip(table["columns"], cells, strict=True) if cell}
            about: dict[str, Any] = dict(conditions="as published", highlight=fnmatch(row["model"], table["ours"]))
            about |= dict(size=int(row["size"]) if "size" in row else None)
            for column, machine in machines.items():
                cost = float(row[column]) if column in row else None
                if cost is not None:
                    cost = 1000 / cost if column == "throughput" else cost * units.get(x, ("", 1.0))[1]
                data = f"ImageNet-1K ({table['source']})"
                points.append(Point(row["model"], cost, float(row["top1"]), "paper", data, machine=machine, **about))
    return points


def _of_evaluation(record: Mapping[str, Any], x: str, path: Path) -> Iterator[Point]:
    if record.get("kind", "evaluation") != "evaluation" or not ({"title", "parameters"} <= set(record["model"])):
        raise ValueError(f"{path} is no evaluation of a classifier")
    if record["data"].get("task", "classify") != "classify":
        raise ValueError(f"{path} is of a model for {record['data']['task']}; expected one that classifies")
    asked, found, how = record.get("asked", {}), record["data"], record.get("how", {})
    samples = f"{asked['samples']} images" if asked.get("samples") else ""
    # which images: evaluations on different ones cannot be compared
    data = (asked.get("data") or found.get("data") or found.get("kind"), found.get("part"), samples)
    data = ", ".join(map(str, filter(None, data)))
    for model in ({**record["model"], "figures": record["figures"]}, *record.get("beside", ())):
        size = "x".join(map(str, (model.get("input_size") or ())[1:]))
        words = [how.get("device", ""), f"{how['threads']} threads" if "threads" in how else "", "batch 1", size]
        yield point_of(model["title"], model, x, model["figures"].get("top1"), data, ", ".join(filter(None, words)))


def _of_bench(record: Mapping[str, Any], x: str, path: Path, sized: bool = False) -> Iterator[Point]:
    settings, rows = record["settings"], record["rows"]
    if settings.get("head_only"):
        raise ValueError(f"{path} holds times of pools alone; run bench without --head-only")
    if settings.get("train") and x == "latency_ms":
        raise ValueError(f"{path} holds times of training steps; run bench without --train")
    size, batch = "x".join(map(str, settings["size"])), settings["batch"]
    runs = [" ".join(filter(None, (row["runtime"], row.get("precision", "fp32").replace("fp32", "")))) for row in rows]
    precisions = settings["dtype"] if "dtype" in settings else "/".join(settings["precisions"])
    words = [settings["device"], f"{settings['threads']} threads", f"batch {batch}", size, precisions]
    for row, run in zip(rows, runs, strict=True):
        model = row["model"].replace(" + ", "-")  # as the folders of runs are named
        label = model + (f", {run}" if len(set(runs)) > 1 else "") + (f" at {size}" if sized else "")
        latency = {"median": row["wall_ms"]["median"] / batch, "minimum": 0.0, "spread": row["wall_ms"]["spread"]}
        samples = [one / batch for one in row.get("wall_samples_ms", ())]
        if len(samples) > 1:
            latency["quartiles"] = statistics.quantiles(samples, n=4, method="inclusive")[::2]
        costs = {"latency_ms": latency, "macs": row["macs"], "parameters": row["params"]}
        costs["input_size"] = [0, *(row.get("size") or settings["size"])]
        yield replace(point_of(label, costs, x, None, "", ", ".join(words)), model=model)


def _of_run(path: Path, x: str, measured: Mapping[str, Any]) -> Point:
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} holds neither an evaluation nor a run; give what eval or train wrote")
    try:
        config = read_config(path)
        run, takes = dict(config.get("broadsight", {})), dict(config.get("pretrained_cfg") or {})
        takes = [int(side) for side in takes.get("input_size") or ()]
        task, data = run.get("task", "classify"), dict(run.get("settings", {})).get("data")
        metrics = path / "metrics.jsonl"
        found = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()] if metrics.is_file() else []
        best = max((line["val_top1"] for line in found if line.get("val_top1") is not None), default=None)
        best = next((line["best"] for line in reversed(found) if "best" in line), best)  # None: epochs do not compare
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} holds a damaged run ({error})") from None
    if task != "classify":
        raise ValueError(f"{path} holds a run of --task {task}; expected one that classifies")
    known = {key: one for key, one in measured.items() if one is not None}
    costs: dict[str, Any] = dict(parameters=run.get("parameters"), input_size=takes) | known
    data = ", ".join(filter(None, [str(data or ""), "val"]))
    return point_of(costs.get("title") or path.absolute().name, costs, x, best, data, costs.get("conditions", ""))


def point_of(label: str, costs: Mapping[str, Any], x: str, accuracy: float | None, data: str, conditions: str) -> Point:
    """A point of our own. Without quartiles, half of a latency's spread lies to either side, from the minimum on.

    Costs are by axis: None, a number, or a latency with "median", "minimum", "spread" and perhaps "quartiles"; the
    "input_size" beside them is (C, H, W).
    """
    cost = costs.get(x)
    at, low, high = None, None, None
    if isinstance(cost, int | float):
        at = float(cost)
    elif cost is not None:
        cost = cost if isinstance(cost, Mapping) else vars(cost)
        at, half = cost["median"], cost["median"] * cost["spread"] / 2
        low, high = cost.get("quartiles", (min(at, max(at - half, cost["minimum"])), at + half))
    size = round(math.prod(costs["input_size"][1:]) ** 0.5) if costs.get("input_size") else None
    return Point(label, at, accuracy, "ours", data, low, high, conditions if x == "latency_ms" else "", size=size)
