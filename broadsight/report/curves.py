"""Sections of figures along an axis: training by epoch, calibration by confidence, robustness by strength.

Every function gives plain data that `templates/sections.html` writes; an empty answer leaves the section out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..visual.metrics import GOALS, figure, meaning
from ..visual.plots import PALETTE
from ..visual.words import NOTHING, known, number, numbers, percent, plural
from .charts import DASHES, Axis, Bar, Chart, Point, Series, axis, finite
from .colours import LEVELS
from .tables import Cell, Table, numeric

_HIDDEN = {"kind", "epoch", "updates", "best", "best_epoch", "skipped", "val_classes"}
# Charts of a run's metrics: title, label, limits; and their lines: key, name, colour, dash
_CURVES = {
    ("Loss", "loss", None): (("train_loss", "training", 0, 0), ("val_loss", "validation", 5, 0)),
    ("Accuracy", "accuracy, %", (0.0, 100.0)): (
        ("train_top1", "training, top-1", 0, 0),
        ("val_top1", "validation, top-1", 5, 0),
        ("val_top5", "validation, top-5", 5, 2),
    ),
    ("Quality", "%", (0.0, 100.0)): (
        ("val_box_ap", "box AP", 1, 0),
        ("val_box_ap50", "box AP50", 1, 2),
        ("val_mask_ap", "mask AP", 5, 0),
        ("val_mask_ap50", "mask AP50", 5, 2),
        ("val_keypoint_ap", "keypoint AP", 3, 0),
        ("val_miou", "mIoU", 5, 0),
        ("val_macc", "mAcc", 0, 2),
    ),
    ("Learning rate", "learning rate", None): (),
}
_HUNDRED = tuple(float(tick) for tick in range(0, 101, 20))

Rows = Sequence[Mapping[str, Any]]
Models = Sequence[tuple[str, Rows]]  # names of models, and their rows of a suite


def curves(lines: Rows) -> dict[str, Any]:
    """Charts and a table of a run's metrics, the lines of `metrics.jsonl`."""
    epochs = [line for line in lines if line.get("kind") == "epoch" and known(line.get("epoch"))]
    steps = [line for line in lines if line.get("kind") == "updates" and known(line.get("updates"))]
    unit, scale = ("epoch", _updates_of_an_epoch(epochs)) if epochs else ("updates", 1.0)

    def during(key: str) -> list[Point]:
        return finite([(line["updates"] / scale, line.get(key)) for line in steps]) if scale else []

    charts = []
    for (title, label, within), keys in _CURVES.items():
        series = [
            Series(name, finite([(line["epoch"], line.get(key)) for line in epochs]), colour, dash)
            for key, name, colour, dash in keys
        ]
        if title == "Loss":
            series.insert(0, Series("during the epoch", during("loss")))
        elif title == "Learning rate":
            series.append(Series("learning rate", during("lr"), 2, marked=False))
        charts += _over_epochs(title, label, unit, within, [line for line in series if line.points])
    if not charts:
        return {}
    goals = [f"val_{name}" for name in GOALS.values()]
    goal = next((key for key in goals if any(known(line.get(key)) for line in epochs)), None)
    best = None
    if goal:
        top = max((line for line in epochs if known(line.get(goal))), key=lambda line: line[goal])
        best = dict(epoch=top["epoch"], value=top[goal], label=meaning(_bare(goal)).label)
    unknown = bool(epochs) and "best" in epochs[-1] and not known(epochs[-1]["best"])
    return dict(charts=charts, best=best, best_unknown=unknown, numbers=_epoch_table(epochs))


def _updates_of_an_epoch(epochs: Rows) -> float | None:
    for line in epochs:
        if known(line.get("updates")) and line["updates"] > 0 and line["epoch"] > 0:
            return line["updates"] / line["epoch"]
    return None


def _over_epochs(title: str, label: str, unit: str, within: Point | None, series: Sequence[Series]) -> Iterator[Chart]:
    if not series:
        return
    xs, ys = zip(*(point for line in series for point in line.points), strict=True)
    low = 0.0 if title == "Learning rate" else min(ys)
    across = axis(unit, 0.0, max(1.0, *xs))
    if across.high < 5:
        across = Axis(unit, tuple(tick for tick in across.ticks if float(tick).is_integer()))
    yield Chart(title, across, axis(label, low, max(ys), within=within), lines=series)


def _epoch_table(epochs: Rows) -> Table:
    keys = list(dict.fromkeys(key for line in epochs for key in line if key not in _HIDDEN and known(line[key])))
    rows = [[number(line["epoch"]), *(numeric(_metric(key, line.get(key))) for key in keys)] for line in epochs]
    return Table("Numbers of every epoch", ["epoch", *map(_metric_name, keys)], rows)


def _bare(key: str) -> str:
    return key.removeprefix("train_").removeprefix("val_")


def _metric(key: str, value: Any) -> str:
    """Value of a metric with its unit. Losses have none: what a model is trained by may be the sum of several."""
    return number(value) if key.endswith("loss") else figure(_bare(key), value)


def _metric_name(key: str) -> str:
    where = "training " if key.startswith("train_") else "validation " if key.startswith("val_") else ""
    return where + meaning(_bare(key)).label


def calibration(record: Mapping[str, Any]) -> dict[str, Any]:
    """The reliability diagram, the spread of confidences, their table, and how far they are off."""
    found = record.get("calibration") or {}
    bins = [one for one in found.get("bins") or () if numbers(one, "low", "high")]
    filled = [one for one in bins if one.get("count") and numbers(one, "count", "accuracy")]
    if not filled:
        return {}
    columns = {
        "images": ("count", number),
        "mean confidence": ("confidence", percent),
        "accuracy": ("accuracy", percent),
    }
    rows = [(_range(one), *(numeric(say(one.get(key))) for key, say in columns.values())) for one in bins]
    return dict(
        excess=_excess(filled),
        errors={key: found[key] for key in ("ece", "mce") if known(found.get(key))},
        charts=[_reliability(filled), _spread(filled)],
        bins=Table("Calibration by bin", ("confidence", *columns), rows),
    )


def _excess(filled: Rows) -> float | None:
    """Points by which confidence exceeds accuracy, mean over the images; None if no confidence is known."""
    sure = [one for one in filled if known(one.get("confidence"))]
    images = sum(one["count"] for one in sure)
    return sum(one["count"] * (one["confidence"] - one["accuracy"]) for one in sure) / images if images else None


def _reliability(filled: Rows) -> Chart:
    bars = [
        _bin(one, one["accuracy"], f"{percent(one['accuracy'])} right of {plural(one['count'], 'image')}")
        for one in filled
    ]
    return Chart(
        "Reliability",
        Axis("confidence, %", _HUNDRED),
        Axis("accuracy, %", _HUNDRED),
        bars=bars,
        lines=[Series("", [(0.0, 0.0), (100.0, 100.0)])],
        ticks=[_bin(one, one["confidence"]) for one in filled if known(one.get("confidence"))],
        legend=[("box c0", "accuracy"), ("stroke", "mean confidence: where the bar should end")],
    )


def _spread(filled: Rows) -> Chart:
    total = sum(one["count"] for one in filled)
    bars = [_bin(one, 100 * one["count"] / total, plural(one["count"], "image")) for one in filled]
    up = axis("share of the images, %", 0.0, max(bar.value for bar in bars), within=(0.0, 100.0))
    return Chart("How sure it is", Axis("confidence, %", _HUNDRED), up, bars=bars)


def _bin(one: Mapping[str, Any], value: float, about: str = "") -> Bar:
    return Bar(100 * one["low"], 100 * one["high"], value, f"{_range(one)}: {about}")


def _range(one: Mapping[str, Any]) -> str:
    return f"{100 * one['low']:.0f} to {percent(100 * one['high']).replace('.0', '')}"


def suites(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Accuracy under what was done to the images, suites of one name together.

    A suite whose cases have a strength is a line chart, any other a heat table.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for suite in record.get("suites") or ():
        groups.setdefault(str(suite.get("name", "")), []).append(suite)
    return [_suite(name, group, record) for name, group in groups.items()]


def _suite(name: str, group: Rows, record: Mapping[str, Any]) -> dict[str, Any]:
    first = group[0]
    models = [
        (str(suite.get("model") or record.get("model") or record["title"]), list(suite.get("rows") or ()))
        for suite in group
    ]
    every = [row for _, rows in models for row in rows]
    strengths = list(dict.fromkeys(row.get("at") for row in every))
    cases = list(dict.fromkeys(_case(row) for row in every))
    shown = dict(title=first.get("title") or name, about=first.get("about"), summary=_summaries(group, models))
    if not every:
        return shown | dict(form="empty")
    if all(map(known, strengths)) and len(strengths) > 1 and len(cases) <= len(PALETTE):
        return shown | dict(form="lines", charts=_lines(first, models, cases), numbers=_measurements(models))
    if len(strengths) == 1:
        values = {(_case(row), model): row.get("top1") for model, rows in models for row in rows}
        return shown | dict(form="grid", grids=[_grid("", cases, [model for model, _ in models], values)])
    grids = [
        _grid(
            str(first.get("axis", "")),
            cases,
            strengths,
            {(_case(row), row.get("at")): row.get("top1") for row in rows},
            model if len(models) > 1 else "",
        )
        for model, rows in models
    ]
    return shown | dict(form="grids", grids=grids)


def _case(row: Mapping[str, Any]) -> str:
    return str(row.get("case", ""))


def _lines(first: Mapping[str, Any], models: Models, cases: Sequence[str]) -> list[Chart]:
    """One chart of all models if its lines can be told apart, else one for each."""
    together = len(models) * len(cases) <= len(PALETTE) or (len(models) <= len(PALETTE) and len(cases) <= len(DASHES))
    every = [row for _, rows in models for row in rows if known(row.get("top1"))]
    if not every:
        return []
    across = axis(str(first.get("axis", "strength")), min(r["at"] for r in every), max(r["at"] for r in every))
    up = axis("top-1, %", min(r["top1"] for r in every), max(r["top1"] for r in every), within=(0.0, 100.0))
    charts = []
    for group in [models] if together else [[model] for model in models]:
        series = []
        for m, (model, rows) in enumerate(group):
            for c, case in enumerate(cases):
                points = finite([(row["at"], row.get("top1")) for row in rows if _case(row) == case])
                parts = (model if len(group) > 1 else "", case if len(cases) > 1 else "")
                name = ", ".join(filter(None, parts)) or case or model
                series.append(Series(name, sorted(points), *((m, c) if len(group) > 1 else (c, 0))))
        title = group[0][0] if len(group) == 1 else "Top-1 accuracy"
        charts.append(Chart(title, across, up, lines=[line for line in series if line.points]))
    return charts


def _measurements(models: Models) -> Table:
    rows = [
        (
            model,
            row.get("case", ""),
            *map(numeric, (f"{row['at']:g}", percent(row.get("top1")), number(row.get("images")))),
        )
        for model, rows in models
        for row in rows
    ]
    return Table("All measurements", ("model", "case", "at", "top-1", "images"), rows, "sortable")


def _grid(
    what: str, cases: Sequence[str], columns: Sequence[Any], values: Mapping[tuple[str, Any], Any], model: str = ""
) -> dict[str, Any]:
    """Top-1 of every case in every column, coloured; the mean of each row last where there are several."""
    several = len(columns) > 1 and all(map(known, columns))
    heads = [f"{column:g}" if known(column) else str(column if column is not None else "top-1") for column in columns]
    rows = []
    for case in cases:
        found = [values.get((case, column)) for column in columns]
        present: list[Any] = [value for value in found if known(value)]
        if present:
            found += [sum(present) / len(present)] if several else []
            rows.append((case, *map(_heat, found)))
    caption = f"Top-1 accuracy by case{f' and {what}' if what else ''}"
    table = Table(caption, ["case", *heads, *(["mean"] if several else [])], rows, "heat")
    return dict(model=model, axis=what, table=table)


def _heat(value: Any) -> Cell:
    if not known(value):
        return numeric(NOTHING)
    return Cell(f"{value:.1f}", f"n h{min(max(round(value / 100 * LEVELS), 0), LEVELS)}")


def _summaries(group: Rows, models: Models) -> Table | None:
    keys = list(dict.fromkeys(key for suite in group for key in suite.get("summary") or ()))
    if not keys:
        return None
    rows = [
        (model, *(numeric(_summary(key, (suite.get("summary") or {}).get(key))) for key in keys))
        for suite, (model, _) in zip(group, models, strict=True)
    ]
    return Table("Summary", ["model", *keys], rows, "narrow")


def _summary(key: str, value: Any) -> str:
    """Value of a summary, which names itself; one that speaks of accuracy is a percentage."""
    return percent(value) if known(value) and ("top" in key or "accuracy" in key or "%" in key) else figure(key, value)
