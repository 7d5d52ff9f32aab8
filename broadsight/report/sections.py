"""Sections of figures, classes, models and details: of a record what `templates/sections.html` writes, or nothing."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from heapq import nsmallest
from typing import Any

from ..visual.metrics import MEANS, figure, meaning
from ..visual.words import NOTHING, known, number, percent
from .charts import Chart, Dot, axis
from .colours import LEVELS

ALL_SHOWN = 40  # classes up to here are one table
WORST, BEST = 20, 5
MATRIX, ROOMY = 60, 20  # classes up to here are a matrix, with cells wide enough for any count
CONFUSIONS, SKIPPED = 30, 100  # pairs of classes that are listed, and images that are named
_COSTS = ("parameters", "macs", "latency_ms")

Record = Mapping[str, Any]


def figures(record: Record, sections: Collection[str]) -> list[dict[str, Any]]:
    """Rows of all figures with their meaning, then of absent ones with the reason; `sections` say theirs in place."""
    measured = {key: value for key, value in (record.get("figures") or {}).items() if value is not None}
    covered, rows = record.get("coverage") or {}, []
    there, classes = covered.get("occurring"), covered.get("classes")
    for key, value in measured.items():
        about = meaning(key).about
        if there != classes and (key in MEANS or key.startswith(("box_", "mask_", "keypoint_"))):
            about += f"; over {there} of {classes} classes, since the others do not occur"
        rows.append(dict(label=meaning(key).label, value=figure(key, value), about=about, absent=None))
    for key, why in (record.get("absent") or {}).items():
        if key not in (*sections, *measured):
            rows.append(dict(label=meaning(key).label, value=NOTHING, absent=why))
    return rows


def beside(record: Record) -> dict[str, Any]:
    """Rows of this model and the others, the best of every column marked, and charts of accuracy over cost."""
    others = list(record.get("beside") or ())
    if not others:
        return {}
    title = record.get("model") or record["title"]
    ours = next((model for model in others if model.get("title") == title), None)
    if ours is None:
        ours = {key: record.get(key) for key in (*_COSTS, "figures")} | {"title": title}
    models = [ours, *(model for model in others if model is not ours)]
    costs = [key for key in _COSTS if any(known(model.get(key)) for model in models)]
    counts = Counter(key for model in models for key, value in (model.get("figures") or {}).items() if known(value))
    keys = [*costs, *(key for key, count in counts.items() if count > 1 and key not in costs)]
    values = [(model.get("figures") or {}) | {key: model.get(key) for key in costs} for model in models]
    best: dict[str, Any] = {}  # of the columns whose values differ, where it is known which way is better
    for key in (key for key in keys if meaning(key).better):
        column: set[Any] = {mine[key] for mine in values if known(mine.get(key))}
        if len(column) > 1:
            best[key] = max(column) if meaning(key).better > 0 else min(column)
    rows = []
    for model, mine in zip(models, values, strict=True):
        cells = [(figure(key, mine.get(key)), key in best and mine.get(key) == best[key]) for key in keys]
        rows.append(dict(title=str(model.get("title", "")), cells=cells))
    return dict(heads=["model", *(meaning(key).label for key in keys)], rows=rows, charts=_cost_charts(models))


def _cost_charts(models: Sequence[Record]) -> list[Chart]:
    charts = []
    for key, unit, label in (("macs", 1e9, "MACs, G"), ("latency_ms", 1.0, "latency, ms")):
        dots = []
        for index, model in enumerate(models, 1):
            top1: Any = (model.get("figures") or {}).get("top1")
            if known(model.get(key)) and known(top1):
                about = f"{index} {model.get('title', '')}: {percent(top1)}, {figure(key, model[key])}"
                dots.append(Dot(model[key] / unit, top1, str(index), about, index == 1))
        if len(dots) > 1:
            heights = [dot.y for dot in dots]
            margin = max((max(heights) - min(heights)) / 10, 0.5)
            up = axis("top-1, %", min(heights) - margin, max(heights) + margin, within=(0.0, 100.0))
            across = axis(label, 0.0, 1.04 * max(dot.x for dot in dots))
            charts.append(Chart(f"Accuracy over {meaning(key).label}", across, up, dots=dots[::-1]))
    return charts


def class_figures(record: Record) -> dict[str, Any]:
    """Figures of each class that a detector or segmenter finds, the weakest first."""
    rows = record.get("class_figures") or ()
    named = dict.fromkeys(key for row in rows for key in row if known(row[key]))
    counts = [key for key in named if key in ("objects", "pixels")]
    figures = [key for key in named if key not in counts]
    if not named:
        return {}
    first = (*figures, *counts)[0]
    ranked = sorted(rows, key=lambda row: row[first] if known(row.get(first)) else float("inf"))
    return dict(counts=counts, figures=figures, labels=[meaning(key).label for key in figures], rows=ranked)


def per_class(record: Record) -> dict[str, Any]:
    """All classes in one table, or the weakest and the strongest, with the others folded away."""
    rows = record.get("per_class") or ()
    if not rows:
        return {}
    ranked = sorted((row for row in rows if known(row.get("recall"))), key=lambda row: row["recall"])
    ends = dict(low=ranked[0], high=ranked[-1]) if ranked else dict(low=None)
    if len(rows) <= ALL_SHOWN or len(ranked) < WORST + BEST:
        return dict(count=len(rows), tables={"": rows}, others=(), **ends)
    tables = {f"The {WORST} weakest": ranked[:WORST], f"The {BEST} strongest": ranked[: -BEST - 1 : -1]}
    shown = {id(row) for some in tables.values() for row in some}
    return dict(count=len(rows), tables=tables, others=[row for row in rows if id(row) not in shown], **ends)


def confusion(record: Record) -> dict[str, Any]:
    """The confusion matrix if it can be read, and the most frequent confusions."""
    matrix = record.get("confusion") or ()
    names = [str(name) for name in record.get("classes") or ()]
    names += [str(i) for i in range(len(names), len(matrix))]
    wrong = ((-count, i, j) for i, row in enumerate(matrix) for j, count in enumerate(row) if count and i != j)
    frequent = record.get("confused") or [
        {"class": names[i], "as": names[j], "count": -less, "share": -100 * less / sum(matrix[i])}
        for less, i, j in nsmallest(CONFUSIONS, wrong)
    ]
    if not matrix and not frequent:
        return {}
    shown = dict(too_large=len(matrix)) if len(matrix) > MATRIX else dict(too_large=0, **_matrix(matrix))
    faultless = not frequent and any(map(any, matrix))
    common = dict(names=names[: len(matrix)], faultless=faultless, levels=LEVELS, roomy=ROOMY)
    return dict(frequent=frequent[:CONFUSIONS], **common, **shown)


def _matrix(matrix: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Counts with the CSS classes of their colours, and the largest share of a row that is wrong, in per cent."""
    shares = [[count / (sum(row) or 1) for count in row] for row in matrix]
    worst = max((s for i, row in enumerate(shares) for j, s in enumerate(row) if i != j), default=0) or 1

    def colour(i: int, j: int) -> str:
        kind, full = ("h", 1) if i == j else ("e", worst)
        return f"{kind}{max(round(shares[i][j] / full * LEVELS), 1)}"

    rows = [[(count, colour(i, j)) for j, count in enumerate(row)] for i, row in enumerate(matrix)]
    return dict(matrix=rows, worst=100 * worst)


def skipped(record: Record) -> dict[str, Any]:
    """Number of images that could not be read, and the first of them with the reasons."""
    left_out = list((record.get("skipped") or {}).items())
    return dict(count=len(left_out), first=left_out[:SKIPPED]) if left_out else {}


def facts(record: Record) -> dict[str, Any]:
    """Groups of facts, the last of them of versions and commit; and the command."""
    groups = [(str(group.get("group", "")), group.get("rows") or ()) for group in record.get("facts") or ()]
    made: list[tuple[str, Any]] = [("seed", number(record["seed"]))] if record.get("seed") is not None else []
    made += [("commit", record["commit"] or "unknown: not run from a checkout")] if "commit" in record else []
    made += (record.get("versions") or {}).items()
    groups = [(title, rows) for title, rows in [*groups, ("Made with", made)] if rows]
    command = record.get("command")
    return dict(groups=groups, command=command) if groups or command else {}
