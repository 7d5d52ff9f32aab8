"""The model beside others: on the same images, or as the twin of the same run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..visual.metrics import figure, meaning
from ..visual.words import NOTHING, SPACE, amount, escape, known, number, numbers, percent
from .charts import Chart, Dot, axis
from .tables import Cell, Column, numeric, share, table

_COSTS = ("parameters", "macs", "latency_ms")
_ACROSS = (("macs", 1e9, "MACs, G"), ("latency_ms", 1.0, "latency, ms"))

Model = Mapping[str, Any]


def beside(record: Mapping[str, Any]) -> str:
    """A table of this model and the others, the best of every column in bold, and accuracy over cost; or nothing.

    This model's row is made from the record itself, unless a row of the same title is given. Figures that only one
    model has are left out: there is nothing to compare.
    """
    others = list(record.get("beside") or ())
    if not others:
        return ""
    title = record.get("model") or record["title"]
    ours = next((model for model in others if model.get("title") == title), None)
    if ours is None:
        ours = {key: record.get(key) for key in (*_COSTS, "figures")} | {"title": title}
    models = [ours, *(model for model in others if model is not ours)]
    costs = [key for key in _COSTS if any(known(model.get(key)) for model in models)]
    counts = Counter(key for model in models for key, value in (model.get("figures") or {}).items() if known(value))
    figures = [key for key, count in counts.items() if count > 1]
    values = [[*(m.get(key) for key in costs), *((m.get("figures") or {}).get(key) for key in figures)] for m in models]
    keys = [*costs, *figures]
    best = [_best(key, column) for key, column in zip(keys, zip(*values, strict=True), strict=True)]
    rows = [
        (
            f'<span class="number">{index}</span>{escape(model.get("title", ""))}',
            *(_cell(key, value, top) for key, value, top in zip(keys, row, best, strict=True)),
        )
        for index, (model, row) in enumerate(zip(models, values, strict=True), 1)
    ]
    columns = [Column("model"), *(Column(meaning(key).label, True) for key in keys)]
    return (
        f"<p>All on the same images; this report's model is number 1. The best of each column is bold.</p>\n"
        f"{table(columns, rows, caption='This model beside others', kind='sortable names', marked=0)}{_charts(models)}"
    )


def twins(record: Mapping[str, Any]) -> str:
    """A small table of the run and those it was compared with, or nothing."""
    runs = record.get("twins") or ()
    if not runs:
        return ""
    timed = any(known(run.get("minutes")) for run in runs)
    columns = [Column("run"), Column("top-1", True), Column("parameters", True)]
    columns += [Column("training time", True), Column("folder")] if timed else [Column("folder")]
    rows = [
        (
            escape(run.get("title", "")),
            share(run.get("top1")),
            numeric(amount(run.get("parameters"))),
            *([numeric(_minutes(run.get("minutes")))] if timed else []),
            f"<code>{escape(run['folder'])}</code>" if run.get("folder") else NOTHING,
        )
        for run in runs
    ]
    return table(columns, rows, caption="Runs that were compared")


def _minutes(value: Any) -> str:
    return f"{number(value)}{SPACE}min" if known(value) else NOTHING


def _best(key: str, column: Sequence[Any]) -> Any:
    """The best value if values differ and it is known which way is better."""
    found, better = [value for value in column if known(value)], meaning(key).better
    if not better or len(set(found)) < 2:
        return None
    return max(found) if better > 0 else min(found)


def _cell(key: str, value: Any, top: Any) -> Cell:
    text = figure(key, value)
    return numeric(f"<strong>{text}</strong>" if top is not None and value == top else text)


def _charts(models: Sequence[Model]) -> str:
    charts = []
    for key, unit, label in _ACROSS:
        dots = [
            Dot(
                model[key] / unit,
                model["figures"]["top1"],
                str(index),
                f"{index} {model.get('title', '')}: {percent(model['figures']['top1'])}, {figure(key, model[key])}",
                index == 1,
            )
            for index, model in enumerate(models, 1)
            if numbers(model, key) and numbers(model.get("figures") or {}, "top1")
        ]
        if len(dots) < 2:
            continue
        heights = [dot.y for dot in dots]
        margin = max((max(heights) - min(heights)) / 10, 0.5)
        up = axis("top-1, %", min(heights) - margin, max(heights) + margin, within=(0.0, 100.0))
        across = axis(label, 0.0, 1.04 * max(dot.x for dot in dots))
        title = f"Accuracy over {meaning(key).label}"
        charts.append(Chart(title, across, up, dots=list(reversed(dots))).html())
    return f'<div class="charts">\n{"".join(charts)}</div>\n' if charts else ""
