"""Accuracy under what was done to the images: a line chart where that has a strength, a heat table otherwise."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..visual.metrics import figure
from ..visual.plots import PALETTE
from ..visual.words import NOTHING, escape, known, number, percent, sentence
from .charts import DASHES, Chart, Series, axis, finite
from .colours import LEVELS
from .tables import Cell, Column, folded, numeric, table

Suite = Mapping[str, Any]


def suites(record: Mapping[str, Any]) -> str:
    """All suites, those of one name together, or nothing."""
    groups: dict[str, list[Suite]] = {}
    for suite in record.get("suites") or ():
        groups.setdefault(str(suite.get("name", "")), []).append(suite)
    return "".join(_suite(name, group, record) for name, group in groups.items())


def _suite(name: str, group: Sequence[Suite], record: Mapping[str, Any]) -> str:
    first = group[0]
    models = [
        (str(suite.get("model") or record.get("model") or record["title"]), list(suite.get("rows") or ()))
        for suite in group
    ]
    about = f"<p>{sentence(first['about'])}</p>\n" if first.get("about") else ""
    rows = [row for _, rows in models for row in rows]
    strengths = list(dict.fromkeys(row.get("at") for row in rows))
    cases = list(dict.fromkeys(str(row.get("case", "")) for row in rows))
    summary = _summaries(group, models)
    if not rows:
        view = "<p>No image could be used.</p>\n"
    elif all(map(known, strengths)) and len(strengths) > 1 and len(cases) <= len(PALETTE):
        charts = _lines(first, models, cases)
        view = f'<div class="pair">\n{charts}{summary}</div>\n{folded("Numbers", _numbers(models))}'
    elif len(strengths) == 1:
        view = summary + _grid("", cases, [model for model, _ in models], _by_model(models))
    else:
        what, several = str(first.get("axis", "")), len(models) > 1
        grids = "".join(
            _grid(what, cases, strengths, _by_strength(rows), model if several else "") for model, rows in models
        )
        view = f'{summary}<div class="pair">\n{grids}</div>\n'
    title = escape(first.get("title") or name)
    return f'<section class="suite"><h3>{title}</h3>\n{about}{view}</section>\n'


def _lines(first: Suite, models: Sequence[tuple[str, list]], cases: Sequence[str]) -> str:
    together = len(models) * len(cases) <= len(PALETTE) or (len(models) <= len(PALETTE) and len(cases) <= len(DASHES))
    every = [row for _, rows in models for row in rows if known(row.get("top1"))]
    if not every:
        return "<p>No accuracy was measured.</p>\n"
    across = axis(str(first.get("axis", "strength")), min(r["at"] for r in every), max(r["at"] for r in every))
    up = axis("top-1, %", min(r["top1"] for r in every), max(r["top1"] for r in every), within=(0.0, 100.0))
    charts = []
    for group in [models] if together else [[model] for model in models]:
        series = []
        for m, (model, rows) in enumerate(group):
            for c, case in enumerate(cases):
                points = finite([(row["at"], row.get("top1")) for row in rows if str(row.get("case", "")) == case])
                parts = [part for part in (model if len(group) > 1 else "", case if len(cases) > 1 else "") if part]
                name = ", ".join(parts) or case or model
                style = (m, c) if len(group) > 1 else (c, 0)
                series.append(Series(name, sorted(points), *style))
        title = group[0][0] if len(group) == 1 else "Top-1 accuracy"
        charts.append(Chart(title, across, up, lines=[line for line in series if line.points]).html())
    return "".join(charts)


def _numbers(models: Sequence[tuple[str, list]]) -> str:
    columns = (Column("model"), Column("case"), Column("at", True), Column("top-1", True), Column("images", True))
    rows = [
        (
            escape(model),
            escape(row.get("case", "")),
            numeric(f"{row['at']:g}"),
            numeric(percent(row.get("top1"))),
            numeric(number(row.get("images"))),
        )
        for model, rows in models
        for row in rows
    ]
    return table(columns, rows, caption="All measurements", kind="sortable")


def _by_model(models: Sequence[tuple[str, list]]) -> dict[tuple[str, Any], Any]:
    return {(str(row.get("case", "")), model): row.get("top1") for model, rows in models for row in rows}


def _by_strength(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, Any], Any]:
    return {(str(row.get("case", "")), row.get("at")): row.get("top1") for row in rows}


def _grid(
    what: str, cases: Sequence[str], columns: Sequence[Any], values: Mapping[tuple[str, Any], Any], model: str = ""
) -> str:
    """Top-1 of every case in every column, coloured; the mean of each row last where there are several."""
    several = len(columns) > 1 and all(map(known, columns))
    heads = [f"{column:g}" if known(column) else str(column if column is not None else "top-1") for column in columns]
    lines = []
    for case in cases:
        found = [values.get((case, column)) for column in columns]
        if not any(map(known, found)):
            continue
        cells = [_heat(value) for value in found]
        if several:
            present = [float(value) for value in found if known(value)]  # ty: ignore[invalid-argument-type]
            cells.append(_heat(sum(present) / len(present)))
        lines.append((escape(case), *cells))
    titles = [Column("case"), *(Column(head, True) for head in heads), *([Column("mean", True)] if several else [])]
    body = table(titles, lines, caption=f"Top-1 accuracy by case{f' and {what}' if what else ''}", kind="heat")
    note = f"Top-1 accuracy, %{f'; columns: {what}' if what else ''}"
    name = f"<strong>{escape(model)}</strong><br>" if model else ""
    return f"<figure><figcaption>{name}{escape(note)}</figcaption>\n{body}</figure>\n"


def _heat(value: Any) -> Cell:
    if not known(value):
        return Cell(NOTHING, "n")
    return Cell(f"{value:.1f}", f"n h{min(max(round(value / 100 * LEVELS), 0), LEVELS)}")


def _summaries(group: Sequence[Suite], models: Sequence[tuple[str, list]]) -> str:
    keys = list(dict.fromkeys(key for suite in group for key in suite.get("summary") or ()))
    if not keys:
        return ""
    rows = [
        (escape(model), *(numeric(_summary(key, (suite.get("summary") or {}).get(key))) for key in keys))
        for suite, (model, _) in zip(group, models, strict=True)
    ]
    columns = [Column("model"), *(Column(key, True) for key in keys)]
    return table(columns, rows, caption="Summary", kind="narrow")


def _summary(key: str, value: Any) -> str:
    """Summaries name themselves; what speaks of accuracy is a percentage."""
    return percent(value) if known(value) and ("top" in key or "accuracy" in key or "%" in key) else figure(key, value)
