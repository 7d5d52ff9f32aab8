"""The command that measures how good a model is: eval."""

import sys
from typing import Any

from .. import api
from ..evaluation.request import Request
from ..visual.metrics import HEADLINES, MEANS, label, meaning
from ..visual.terminal import note, number, show
from .parser import DONE, INTERRUPTED
from .tables import FIGURE, NAME, NUMBER, TEXT, columns, table

WORST = 5  # classes that are shown


def eval(request: Request) -> int:
    """Evaluate, write the record and the report, and show the figures."""
    found = api.evaluate(request, progress=True, keep=True)
    from ..evaluation.dense import DenseEvaluation

    code, record, dense = INTERRUPTED if found.interrupted else DONE, found.record, isinstance(found, DenseEvaluation)
    if found.interrupted and not dense:
        note(found.notes[-1])
    if request.json == "-":
        return code
    for one in (_dense_tables if dense else _tables)(record):
        show(one, whole=True)
    if record["skipped"]:
        print(f"{len(record['skipped'])} images could not be read; the report names them", file=sys.stderr)
    also = "evaluation.json" + ((" and results.json" if found.results else "") if dense else " and predictions.csv")
    print(f"report: {found.folder / 'report.html'} (with {also})")
    return code


def _tables(record: dict[str, Any]) -> list[Any]:
    """Of classifiers: all of them, the worst classes, the suites."""
    from ..evaluation.record import ORDER

    names = [name for name in ORDER if name in record["figures"]]
    shown = [label(name) + ("" if name == "loss" else " %") for name in names]
    rows = []
    for model in [{**record["model"], "figures": record["figures"]}, *record["beside"]]:
        latency = model["latency_ms"]
        latency = latency["median"] if isinstance(latency, dict) else latency
        cells = [number(model["parameters"], 1e6), number(model["macs"], 1e9, 3), number(latency)]
        rows.append([model["title"], *cells, *(number(model["figures"].get(name)) for name in names)])
    head = {"model": TEXT, **columns(NUMBER, "parameters M", "MACs G", "latency ms"), **columns(FIGURE, *shown)}
    tables = [table(head, rows)]
    if means := [label(name) for name in names if name in MEANS]:
        _say_absent(tables[0], record, ", ".join(means), "images")
    seen = [row for row in record["per_class"] if row["images"]]
    rows = []
    for row in sorted(seen, key=lambda row: row["recall"])[:WORST]:
        other = f"{row['most_confused_with']} ({row['confused']})" if row["confused"] else "-"
        shares = [number(row[name], digits=1) for name in ("recall", "precision")]
        rows.append([row["class"], str(row["images"]), *shares, other])
    head = {"class": TEXT, **columns(FIGURE, "images", "recall %", "precision %"), "most often taken for": TEXT}
    names = dict.fromkeys(suite["name"] for suite in record["suites"])
    suites = [[suite for suite in record["suites"] if suite["name"] == name] for name in names]
    return [*tables, *_worst(head, rows, len(seen)), *map(_suite_table, suites)]


def _say_absent(shown: Any, record: dict[str, Any], means: str, amount: str) -> None:
    """Below a table, over how many of the classes its means are."""
    there, classes = record["coverage"]["occurring"], record["coverage"]["classes"]
    if there < classes:
        shown.caption = f"{means} over {there} of {classes:,} classes: the others have no {amount} here"
        shown.caption_justify = "left"


def _worst(head: dict[str, Any], rows: list[Any], classes: int) -> list[Any]:
    """The worst classes, if there are several."""
    return [table(head, rows, f"the {len(rows)} worst of {classes} classes")] if classes > 1 else []


def _suite_table(suites: list[dict[str, Any]]) -> Any:
    """One suite of all classifiers: their cases down, values of the axis across."""
    rows = [(suite["model"], row) for suite in suites for row in suite["rows"]]
    places = list(dict.fromkeys(row["at"] for _, row in rows))
    head = {"model": NAME, "case": NAME, **{"top-1" if one is None else f"{one:g}": FIGURE for one in places}}
    shown = []
    for model, case in dict.fromkeys((model, row["case"]) for model, row in rows):
        found = {row["at"]: row["top1"] for name, row in rows if (name, row["case"]) == (model, case)}
        shown.append([model, case, *(number(found.get(place), digits=1) for place in places)])
    return table(head, shown, f"{suites[0]['title']}: top-1 % by {suites[0]['axis']}")


def _dense_tables(record: dict[str, Any]) -> list[Any]:
    """Of a dense run: all figures, and the worst classes."""
    figures, amount = record["figures"], "pixels" if record["task"] == "segment" else "objects"
    order = [name for name in HEADLINES[record["task"]] if name in figures]
    order += [name for name in figures if name not in order and ("_ap_" in name or name.endswith("_ap"))]
    shown = [f"{meaning(name).label} %" for name in order]
    cells = [f"{record['data']['images']:,}", *(number(figures[name]) for name in order)]
    head = {"model": TEXT, **columns(FIGURE, "images", *shown, "ms an image")}
    whole = table(head, [[record["model"]["title"], *cells, number(record["latency_ms"], digits=1)]])
    _say_absent(whole, record, "means", amount)
    names = ["iou", "acc"] if record["task"] == "segment" else [*order[:1], *(f"{name}50" for name in order[:1])]
    known = [row for row in record["per_class"] if names and row.get(names[0]) is not None]
    known = sorted(known, key=lambda row: row[names[0]])
    worst = [[x["name"], f"{x[amount]:,}", *(number(x.get(name), digits=1) for name in names)] for x in known[:WORST]]
    head = {"class": TEXT, **columns(FIGURE, amount, *(f"{meaning(name).label} %" for name in names))}
    return [whole, *_worst(head, worst, len(known))]
