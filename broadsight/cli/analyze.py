"""The command that measures what models do inside: analyze."""

from typing import TYPE_CHECKING, Any

from .. import api
from ..analysis.request import Request
from ..files import check_writable
from ..visual.terminal import print_json, show
from .parser import DONE, INTERRUPTED

if TYPE_CHECKING:
    from rich.table import Table

    from ..analysis.run import Analysis


def analyze(request: Request) -> int:
    """Measure, write the record and the figures, and show tables."""
    if request.measure in (None, "list"):
        check_writable(request.json)
        request.refuse_all(("measure", "json"), "analyze list shows all measures alone")
        return _list(request.json)
    found = api.analyze(request, progress=True, keep=True)
    if request.json != "-":
        for table in _tables(found):
            show(table, whole=True)
        print(f"written: {found.folder} (figure.png, figure.svg, analysis.json)")
    return INTERRUPTED if found.interrupted else DONE


def _list(path: str | None) -> int:
    """A table of all measures."""
    from ..analysis.measures import MEASURES

    if path is not None:
        entries = [
            dict(name=one.name, about=one.about, needs=one.thing, examples=one.examples, source=one.source)
            | dict(images=one.samples, least=one.least, labels=one.labels, options=dict(one.options))
            for one in MEASURES.values()
        ]
        print_json(entries, path)
        return DONE
    from rich.table import Table

    table = Table()
    table.add_column("measure", no_wrap=True)
    for name in ("says", "needs", "from", "options"):
        table.add_column(name)
    for one in MEASURES.values():
        table.add_row(one.name, one.about, one.thing, one.source, ", ".join(one.options) or "-")
    show(table)
    print("broadsight analyze MEASURE MODEL|RUN... --data DATA    # docs/analysis.md says how to read them")
    return DONE


def _tables(analysis: "Analysis") -> list["Table"]:
    """For each model what was measured."""
    from rich.table import Table

    tables = []
    for label, result in analysis.results.items():
        columns, rows = analysis.measure.rows(result)
        table = Table(title=f"{analysis.measure.name}: {label}", title_justify="left")
        for place, name in enumerate(columns):
            table.add_column(name, justify="right" if place else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(_cell, row))
        tables.append(table)
    return tables


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.4g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
