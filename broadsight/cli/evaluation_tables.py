"""What `eval` shows in the terminal: the classifiers side by side, the worst classes, the suites."""

from typing import TYPE_CHECKING, Any

from ..evaluation.record import ORDER
from ..visual.metrics import HEADLINES, MEANS, label
from ..visual.terminal import number

WORST = 5  # classes that are shown

if TYPE_CHECKING:
    from rich.table import Table


def terminal_tables(record: dict[str, Any]) -> list["Table"]:
    """What the terminal shows of a record: all classifiers, the worst classes, the suites."""
    from rich.table import Table

    models = [{**record["model"], "figures": record["figures"]}, *record["beside"]]
    table = Table()
    table.add_column("model")
    for name in ("parameters M", "MACs G", "latency ms"):
        table.add_column(name, justify="right", no_wrap=True)
    names = [name for name in ORDER if name in record["figures"]]
    for name in names:
        table.add_column(label(name) + ("" if name == "loss" else " %"), justify="right")
    for model in models:
        latency = model["latency_ms"]
        latency = latency["median"] if isinstance(latency, dict) else latency
        cells = [number(model["parameters"], 1e6), number(model["macs"], 1e9, 3), number(latency)]
        table.add_row(model["title"], *cells, *(number(model["figures"].get(name)) for name in names))
    there, classes = record["coverage"]["occurring"], record["coverage"]["classes"]
    if there < classes and len(means := [label(name) for name in names if name in MEANS]):
        table.caption = f"{', '.join(means)} over {there} of {classes:,} classes: the others have no images here"
        table.caption_justify = "left"
    tables = [table]
    seen = [row for row in record["per_class"] if row["images"]]
    if len(seen) > 1:
        worst = Table(title=f"the {min(WORST, len(seen))} worst of {len(seen)} classes")
        worst.add_column("class")
        for name in ("images", "recall %", "precision %"):
            worst.add_column(name, justify="right")
        worst.add_column("most often taken for")
        for row in sorted(seen, key=lambda row: row["recall"])[:WORST]:
            other = f"{row['most_confused_with']} ({row['confused']})" if row["confused"] else "-"
            cells = [str(row["images"]), number(row["recall"], digits=1), number(row["precision"], digits=1)]
            worst.add_row(row["class"], *cells, other)
        tables.append(worst)
    names = dict.fromkeys(suite["name"] for suite in record["suites"])
    return tables + [_suite_table([suite for suite in record["suites"] if suite["name"] == name]) for name in names]


def _suite_table(suites: list[dict[str, Any]]) -> "Table":
    """One suite of all classifiers: their cases down, values of the axis across."""
    from rich.table import Table

    table = Table(title=f"{suites[0]['title']}: top-1 % by {suites[0]['axis']}", title_justify="left")
    rows = [(suite["model"], row) for suite in suites for row in suite["rows"]]
    places = list(dict.fromkeys(row["at"] for _, row in rows))
    table.add_column("model", no_wrap=True)
    table.add_column("case", no_wrap=True)
    for place in places:
        table.add_column("top-1" if place is None else f"{place:g}", justify="right")
    for model, case in dict.fromkeys((model, row["case"]) for model, row in rows):
        found = {row["at"]: row["top1"] for name, row in rows if (name, row["case"]) == (model, case)}
        table.add_row(model, case, *(number(found.get(place), digits=1) for place in places))
    return table


def dense_tables(record: dict[str, Any]) -> list[Any]:
    """All figures, and the worst classes."""
    from rich.table import Table

    from ..visual.metrics import meaning

    table = Table()
    table.add_column("model")
    table.add_column("images", justify="right")
    figures = record["figures"]
    order = [name for name in HEADLINES[record["task"]] if name in figures]
    order += [name for name in figures if name not in order and ("_ap_" in name or name.endswith("_ap"))]
    for name in order:
        table.add_column(f"{meaning(name).label} %", justify="right")
    table.add_column("ms an image", justify="right")
    cells = [number(figures[name]) for name in order]
    title, images = record["model"]["title"], f"{record['data']['images']:,}"
    table.add_row(title, images, *cells, number(record["latency_ms"], digits=1))
    columns: list[str] = ["iou", "acc"] if record["task"] == "segment" else [*order[:1], *(f"{n}50" for n in order[:1])]
    rows = [row for row in record["per_class"] if columns and row.get(columns[0]) is not None]
    there, classes = record["coverage"]["occurring"], record["coverage"]["classes"]
    if there < classes:
        amount = "pixels" if record["task"] == "segment" else "objects"
        table.caption = f"means over {there} of {classes} classes: the others have no {amount} here"
        table.caption_justify = "left"
    if len(rows) < 2:
        return [table]
    worst = Table(title=f"the {min(WORST, len(rows))} worst of {len(rows)} classes")
    worst.add_column("class")
    amount = "pixels" if record["task"] == "segment" else "objects"
    for name in (amount, *columns):
        worst.add_column(name if name == amount else f"{meaning(name).label} %", justify="right")
    for row in sorted(rows, key=lambda row: row[columns[0]])[:WORST]:
        worst.add_row(row["name"], f"{row[amount]:,}", *(number(row.get(name), digits=1) for name in columns))
    return [table, worst]
