"""Sections of figures along an axis, as plain data like those of `sections`: training, calibration, robustness."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ..visual.metrics import GOALS, figure, meaning
from ..visual.plots import PALETTE
from ..visual.words import known, number, numbers, percent, plural
from .charts import DASHES, Axis, Bar, Chart, Point, Series, axis, finite
from .colours import LEVELS

_HIDDEN = {"kind", "epoch", "updates", "best", "best_epoch", "skipped", "val_classes"}
# Charts of a run's metrics: title, label, limits, what lines are called, and the lines: key, colour and dash.
_CURVES: list[Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_WHERE = {"train": "training", "val": "validation"}
_HUNDRED = tuple(float(tick) for tick in range(0, 101, 20))

Record = Mapping[str, Any]
Rows = Sequence[Record]


def curves(lines: Rows | Mapping[str, Rows]) -> dict[str, Any]:
    """Charts and a table of a run's metrics, the lines of `metrics.jsonl`; of several runs by name, charts alone."""
    if isinstance(lines, Mapping):
        return dict(charts=of_runs(lines), best=None, best_unknown=False, numbers=[])
    epochs = [line for line in lines if line.get("kind") == "epoch" and known(line.get("epoch"))]
    steps = [line for line in lines if line.get("kind") == "updates" and known(line.get("updates"))]
    unit, scales = "updates", [1.0]
    if epochs:  # so many updates are one
        counted = [line for line in epochs if known(line.get("updates")) and line["updates"] > 0 and line["epoch"] > 0]
        unit, scales = "epoch", [line["updates"] / line["epoch"] for line in counted[:1]]

    def during(key: str) -> list[Point]:
        return finite([(line["updates"] / scale, line.get(key)) for scale in scales for line in steps])

    charts = []
    for title, label, within, name, keys in _CURVES:
        series = []
        for key, look in keys.items():
            named = name.format(where=_WHERE[key.partition("_")[0]], label=meaning(_bare(key)).label)
            series.append(Series(named, finite([(line["epoch"], line.get(key)) for line in epochs]), *look))
        if title == "Loss":
            series.insert(0, Series("during the epoch", during("loss")))
        elif title == "Learning rate":
            series.append(Series("learning rate", during("lr"), 2, marked=False))
        charts += _chart(title, unit, label, within, [line for line in series if line.points])
    if not charts:
        return {}
    best = None
    if name := next((goal for goal in GOALS.values() for line in epochs if known(line.get(f"val_{goal}"))), None):
        top = max((line for line in epochs if known(line.get(f"val_{name}"))), key=lambda line: line[f"val_{name}"])
        best = dict(epoch=top["epoch"], value=top[f"val_{name}"], label=meaning(name).label)
    unknown = bool(epochs) and "best" in epochs[-1] and not known(epochs[-1]["best"])
    keys = dict.fromkeys(key for line in epochs for key in line if key not in _HIDDEN and known(line[key]))
    # Losses have no unit: what a model is trained by may be the sum of several.
    written = {key: number if key.endswith("loss") else partial(figure, _bare(key)) for key in keys}
    shown = [[number(line["epoch"]), *(write(line.get(key)) for key, write in written.items())] for line in epochs]
    heads = [f"{_WHERE.get(key.partition('_')[0], '')} {meaning(_bare(key)).label}".strip() for key in keys]
    return dict(charts=charts, best=best, best_unknown=unknown, heads=["epoch", *heads], numbers=shown)


def of_runs(runs: Mapping[str, Rows]) -> list[Chart]:
    """A chart of each metric, with a line for each of several runs: by name the lines of their `metrics.jsonl`."""
    charts = []
    for _, label, within, _, keys in _CURVES:
        for key in keys:
            series = []
            for place, (name, lines) in enumerate(runs.items()):
                points = finite([(line["epoch"], line.get(key)) for line in lines if line.get("kind") == "epoch"])
                series.append(Series(name, points, place % len(PALETTE), place // len(PALETTE)))
            named = f"{_WHERE[key.partition('_')[0]]} {meaning(_bare(key)).label}"
            charts += _chart(named[0].upper() + named[1:], "epoch", label, within, series)
    return charts


def _chart(title: str, unit: str, label: str, within: Point | None, series: Sequence[Series]) -> list[Chart]:
    """One chart, or none if there is no point to draw."""
    points = [point for line in series for point in line.points]
    if not points:
        return []
    xs, ys = zip(*points, strict=True)
    across = axis(unit, 0.0, max(1.0, *xs))
    if across.high < 5:
        across = Axis(unit, tuple(tick for tick in across.ticks if float(tick).is_integer()))
    low = 0.0 if title == "Learning rate" else min(ys)
    return [Chart(title, across, axis(label, low, max(ys), within=within), lines=series)]


def _bare(key: str) -> str:
    return key.removeprefix("train_").removeprefix("val_")


def calibration(record: Record) -> dict[str, Any]:
    """The reliability diagram, the spread of confidences, their table, and how far they are off."""
    found = record.get("calibration") or {}
    bins = [one for one in found.get("bins") or () if numbers(one, "low", "high")]
    filled = [one for one in bins if one.get("count") and numbers(one, "count", "accuracy")]
    if not filled:
        return {}
    shares = [(percent(one.get("confidence")), percent(one.get("accuracy"))) for one in bins]
    rows = [(_range(one), number(one.get("count")), *both) for one, both in zip(bins, shares, strict=True)]
    # Points by which confidence exceeds accuracy, mean over the images; None if no confidence is known.
    sure = [one for one in filled if known(one.get("confidence"))]
    images = sum(one["count"] for one in sure)
    excess = sum(one["count"] * (one["confidence"] - one["accuracy"]) for one in sure) / images if images else None
    errors = {key: found[key] for key in ("ece", "mce") if known(found.get(key))}
    total, bars, counts = sum(one["count"] for one in filled), [], []
    for one in filled:
        some = plural(one["count"], "image")
        bars.append(_bin(one, one["accuracy"], f"{percent(one['accuracy'])} right of {some}"))
        counts.append(_bin(one, 100 * one["count"] / total, some))
    across, ideal = Axis("confidence, %", _HUNDRED), Series("", [(0.0, 0.0), (100.0, 100.0)])
    marks: Any = dict(bars=bars, lines=[ideal], ticks=[_bin(one, one["confidence"]) for one in sure])
    legend = [("box c0", "accuracy"), ("stroke", "mean confidence: where the bar should end")]
    up = axis("share of the images, %", 0.0, max(bar.value for bar in counts), within=(0.0, 100.0))
    reliability = Chart("Reliability", across, Axis("accuracy, %", _HUNDRED), legend=legend, **marks)
    charts = [reliability, Chart("How sure it is", across, up, bars=counts)]
    return dict(excess=excess, errors=errors, charts=charts, bins=rows)


def _bin(one: Mapping[str, Any], value: float, about: str = "") -> Bar:
    return Bar(100 * one["low"], 100 * one["high"], value, f"{_range(one)}: {about}")


def _range(one: Mapping[str, Any]) -> str:
    return f"{100 * one['low']:.0f} to {percent(100 * one['high']).replace('.0', '')}"


def suites(record: Record) -> dict[str, Any]:
    """Accuracy under changes of the images, suites of one name together: by strength as lines, else as a heat table."""
    groups: dict[str, list[Record]] = {}
    for suite in record.get("suites") or ():
        groups.setdefault(str(suite.get("name", "")), []).append(suite)
    shown = [_suite(name, group, record) for name, group in groups.items()]
    return dict(suites=shown, levels=LEVELS) if shown else {}


def _suite(name: str, group: Rows, record: Record) -> dict[str, Any]:
    first = group[0]
    models = [str(suite.get("model") or record.get("model") or record["title"]) for suite in group]
    rows: list[dict[str, Any]] = [
        {**row, "model": models[place], "place": place, "case": str(row.get("case", "")), "at": row.get("at")}
        for place, suite in enumerate(group)
        for row in suite.get("rows") or ()
    ]
    strengths = list(dict.fromkeys(row["at"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    found = [suite.get("summary") or {} for suite in group]
    keys = dict.fromkeys(key for summary in found for key in summary)
    summary = [
        (model, *(_summary(key, one.get(key)) for key in keys)) for model, one in zip(models, found, strict=True)
    ]
    shown = dict(title=first.get("title") or name, about=first.get("about"))
    shown |= dict(summary=summary if keys else [], summary_heads=["model", *keys])
    if not rows:
        return shown | dict(form="empty")
    if all(map(known, strengths)) and len(strengths) > 1 and len(cases) <= len(PALETTE):
        measured = []
        for row in rows:
            figures = percent(row.get("top1")), number(row.get("images"))
            measured.append((row["model"], row["case"], f"{row['at']:g}", *figures))
        return shown | dict(form="lines", charts=_lines(first, models, cases, rows), numbers=measured)
    if len(strengths) == 1:
        return shown | dict(form="grid", grids=[_grid("", cases, dict(enumerate(models)), "place", rows)])
    heads = {at: f"{at:g}" if known(at) else str("top-1" if at is None else at) for at in strengths}
    grids = []
    for place, model in enumerate(models):
        mine = [row for row in rows if row["place"] == place]
        grid = _grid(str(first.get("axis", "")), cases, heads, "at", mine)
        grids.append(grid | dict(model=model if len(models) > 1 else ""))
    return shown | dict(form="grids", grids=grids)


def _lines(first: Record, models: Sequence[str], cases: Sequence[str], rows: Rows) -> list[Chart]:
    """One chart of all models if its lines can be told apart, else one for each."""
    together = len(models) * len(cases) <= len(PALETTE) or (len(models) <= len(PALETTE) and len(cases) <= len(DASHES))
    measured = [row for row in rows if known(row.get("top1"))]
    if not measured:
        return []
    at, top1 = [row["at"] for row in measured], [row["top1"] for row in measured]
    across = axis(str(first.get("axis", "strength")), min(at), max(at))
    up = axis("top-1, %", min(top1), max(top1), within=(0.0, 100.0))
    charts = []
    for places in [range(len(models))] if together else [[place] for place in range(len(models))]:
        series, several = [], len(places) > 1
        for m in places:
            for c, case in enumerate(cases):
                points = [(row["at"], row["top1"]) for row in measured if (row["place"], row["case"]) == (m, case)]
                parts = (models[m] if several else "", case if len(cases) > 1 else "")
                name = ", ".join(filter(None, parts)) or case or models[m]
                series.append(Series(name, sorted(points), *((m, c) if several else (c, 0))))
        title = "Top-1 accuracy" if several else models[places[0]]
        charts.append(Chart(title, across, up, lines=[line for line in series if line.points]))
    return charts


def _grid(axis: str, cases: Sequence[str], heads: Mapping[Any, str], key: str, rows: Rows) -> dict[str, Any]:
    """Top-1 of every case in every column, titled by the value of `key`; of several strengths also the mean."""
    several = key == "at" and len(heads) > 1 and all(map(known, heads))
    values = {(row["case"], row[key]): row.get("top1") for row in rows}
    lines = []
    for case in cases:
        found = [values.get((case, column)) for column in heads]
        present: list[Any] = [value for value in found if known(value)]
        if present:
            lines.append([case, *found, *([sum(present) / len(present)] if several else [])])
    return dict(model="", axis=axis, heads=["case", *heads.values(), *(["mean"] if several else [])], rows=lines)


def _summary(key: str, value: Any) -> str:
    """Value of a summary, which names itself; one that speaks of accuracy is a percentage."""
    return percent(value) if known(value) and ("top" in key or "accuracy" in key or "%" in key) else figure(key, value)
