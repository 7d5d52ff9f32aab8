"""How each class fares, and which are taken for which."""

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import Any

from ..visual.metrics import meaning
from ..visual.words import NOTHING, escape, known, number, percent, plural
from .colours import LEVELS
from .tables import Cell, Column, folded, numeric, share, table

ALL_SHOWN = 40  # classes up to here are one table
WORST, BEST = 20, 5
MATRIX = 60  # classes up to here are a matrix
ROOMY = 20  # classes up to here have cells wide enough for any count
CONFUSIONS = 30

_COLUMNS = (
    Column("class"),
    Column("images", True),
    Column("recall", True),
    Column("precision", True),
    Column("F1", True),
    Column("most often taken for"),
)


def per_class(record: Mapping[str, Any]) -> str:
    """A table of all classes, or of the weakest and the strongest with the others folded away."""
    rows = record.get("per_class") or ()
    if not rows:
        return ""
    ranked = sorted((row for row in rows if known(row.get("recall"))), key=lambda row: row["recall"])
    lead = ""
    if ranked:
        low, high = ranked[0], ranked[-1]
        lead = (
            f"<p>{plural(len(rows), 'class', 'classes')}; recall from {percent(low['recall'])} "
            f"({escape(low.get('class', ''))}) to {percent(high['recall'])} ({escape(high.get('class', ''))}). "
            "Recall: of the images of a class, how many were named so. Precision: of the images named so, "
            "how many are of the class. F1 is their harmonic mean.</p>\n"
        )
    if len(rows) <= ALL_SHOWN or len(ranked) < WORST + BEST:
        return lead + _class_table(rows, "Every class")
    worst, best = ranked[:WORST], ranked[: -BEST - 1 : -1]
    shown = {id(row) for row in (*worst, *best)}
    others = [row for row in rows if id(row) not in shown]
    folded_rows = _class_table(others, "The other classes")
    return (
        f"{lead}<h3>The {WORST} weakest</h3>\n{_class_table(worst, f'The {WORST} weakest classes')}"
        f"<h3>The {BEST} strongest</h3>\n{_class_table(best, f'The {BEST} strongest classes')}"
        + (folded(f"The other {plural(len(others), 'class', 'classes')}", folded_rows) if others else "")
    )


def class_figures(record: Mapping[str, Any]) -> str:
    """A table of what is known of each class that a detector or segmenter finds; the weakest first."""
    rows = record.get("class_figures") or ()
    named = dict.fromkeys(key for row in rows for key in row if known(row[key]))
    counts = [key for key in named if key in ("objects", "pixels")]
    keys = [*counts, *(key for key in named if key not in counts)]
    if not keys:
        return ""
    first = next((key for key in keys if key not in counts), keys[0])
    ranked = sorted(rows, key=lambda row: row[first] if known(row.get(first)) else float("inf"))
    columns = [Column("class"), *(Column(key if key in counts else meaning(key).label, True) for key in keys)]
    lines = [
        (escape(row["name"]), *(numeric(number(row.get(k))) if k in counts else share(row.get(k)) for k in keys))
        for row in ranked
    ]
    return table(columns, lines, caption="Every class, the weakest first", kind="sortable")


def confusions(record: Mapping[str, Any]) -> str:
    """The confusion matrix if it can be read, and the most frequent confusions."""
    matrix = record.get("confusion") or ()
    names = [str(name) for name in record.get("classes") or ()]
    names += [str(i) for i in range(len(names), len(matrix))]
    frequent = record.get("confused") or _most_frequent(matrix, names)
    parts = []
    if len(matrix) > MATRIX:
        parts.append(f"<p>A matrix of {len(matrix):,} classes is too large to be read.</p>\n")
    elif matrix:
        parts.append(_matrix(matrix, names))
    if frequent:
        rows = [
            (
                escape(row.get("class", "")),
                escape(row.get("as", "")),
                numeric(number(row.get("count"))),
                numeric(percent(row.get("share"))),
            )
            for row in frequent[:CONFUSIONS]
        ]
        columns = (Column("class"), Column("taken for"), Column("images", True), Column("share", True))
        title = "Most frequent confusions"
        parts.append(f"<div><h3>{title}</h3>\n{table(columns, rows, caption=title, kind='sortable narrow')}</div>\n")
    elif matrix and any(map(any, matrix)):
        parts.append("<p>No image was taken for another class.</p>\n")
    return f'<div class="pair">\n{"".join(parts)}</div>\n' if parts else ""


def _class_table(rows: Sequence[Mapping[str, Any]], caption: str) -> str:
    lines = []
    for row in rows:
        other, count = row.get("most_confused_with"), row.get("confused")
        taken = f"<bdi>{escape(other)}</bdi> <small>{number(count)}</small>" if other is not None and count else NOTHING
        figures = [share(row.get(key)) for key in ("recall", "precision", "f1")]
        lines.append((escape(row.get("class", "")), numeric(number(row.get("images"))), *figures, taken))
    return table(_COLUMNS, lines, caption=caption, kind="sortable")


def _matrix(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    shares = [[count / (sum(row) or 1) for count in row] for row in matrix]
    worst = max((s for i, row in enumerate(shares) for j, s in enumerate(row) if i != j), default=0) or 1
    rows = []
    for i, row in enumerate(matrix):
        cells = []
        for j, count in enumerate(row):
            part = shares[i][j] if i == j else shares[i][j] / worst
            level = max(round(part * LEVELS), 1) if count else 0
            cells.append(Cell(number(count) if count else "", f"{'h' if i == j else 'e'}{level}" if count else ""))
        rows.append((f"<span>{escape(names[i])}</span>", *cells))
    columns = [Column("truth \\ prediction"), *(Column(name) for name in names[: len(matrix)])]
    kind = "heat matrix" if len(matrix) <= ROOMY else "heat matrix dense"
    return (
        "<figure><figcaption>Rows are the true classes, columns the predicted ones; the numbers are images. "
        f'<span class="key"><i class="h{LEVELS}" aria-hidden="true"></i>right, as a share of the row</span> '
        f'<span class="key"><i class="e{LEVELS}" aria-hidden="true"></i>wrong; strongest is {percent(100 * worst)} '
        f"of a row</span></figcaption>\n{table(columns, rows, caption='Confusion matrix', kind=kind)}</figure>\n"
    )


def _most_frequent(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> list[dict[str, Any]]:
    wrong = ((-count, i, j) for i, row in enumerate(matrix) for j, count in enumerate(row) if count and i != j)
    return [
        {"class": names[i], "as": names[j], "count": -less, "share": -100 * less / sum(matrix[i])}
        for less, i, j in nsmallest(CONFUSIONS, wrong)
    ]
