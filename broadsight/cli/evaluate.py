"""The command that measures how good a model is: eval."""

import sys
from typing import Any

from .. import api
from ..evaluation.request import Request
from ..visual.terminal import note, show
from .parser import DONE, INTERRUPTED


def eval(request: Request) -> int:
    """Evaluate, write the record and the report, and show the figures."""
    found = api.evaluate(request, progress=True, keep=True)
    from ..evaluation.dense import DenseEvaluation
    from .evaluation_tables import dense_tables, terminal_tables

    code, record = INTERRUPTED if found.interrupted else DONE, found.record
    if isinstance(found, DenseEvaluation):
        also = "evaluation.json and results.json" if found.results else "evaluation.json"
        tables: Any = dense_tables
    else:
        if found.interrupted:
            note(found.notes[-1])
        also, tables = "evaluation.json and predictions.csv", terminal_tables
    if request.json == "-":
        return code
    for table in tables(record):
        show(table, whole=True)
    if record["skipped"]:
        print(f"{len(record['skipped'])} images could not be read; the report names them", file=sys.stderr)
    print(f"report: {found.folder / 'report.html'} (with {also})")
    return code
