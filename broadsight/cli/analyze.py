"""The command that measures what models do inside: analyze."""

from typing import Any

from .. import api
from ..analysis.request import Request
from ..files import check_writable
from ..visual.terminal import print_json, show
from .parser import DONE, INTERRUPTED
from .tables import NAME, NUMBER, TEXT, columns, table


def analyze(request: Request) -> int:
    """Measure, write the record and the figures, and show tables."""
    if request.measure in (None, "list"):
        check_writable(request.json)
        request.refuse_all(("measure", "json"), "analyze list shows all measures alone")
        return _list(request.json)
    found = api.analyze(request, progress=True, keep=True)
    if request.json != "-":
        for label, result in found.results.items():
            (first, *others), rows = found.measure.rows(result)
            shown = {first: NAME, **columns(NUMBER, *others)}
            show(table(shown, [map(_cell, row) for row in rows], f"{found.measure.name}: {label}"), whole=True)
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
    rows = [(one.name, one.about, one.thing, one.source, ", ".join(one.options) or "-") for one in MEASURES.values()]
    show(table({"measure": NAME, **columns(TEXT, "says", "needs", "from", "options")}, rows))
    print("broadsight analyze MEASURE MODEL|RUN... --data DATA    # docs/analysis.md says how to read them")
    return DONE


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
