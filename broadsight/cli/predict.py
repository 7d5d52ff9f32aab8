"""The command that names what images show, or finds it in them: predict."""

import sys
from contextlib import ExitStack, closing, nullcontext
from typing import Any

from ..errors import printable
from ..files import check_writable
from ..prediction.request import Request
from ..visual.terminal import note, print_json, progress_bar, show
from .parser import DONE, FAILED
from .tables import PATH, columns, table

FEW = 50  # images that are all shown


def predict(request: Request) -> int:
    """Predict image by image, write what is asked for, and show a table."""
    for path in request.outputs.values():
        check_writable(path)
    from ..prediction.run import opened
    from ..runs.dense_model import DenseModel

    with opened(request, note) as (run, source):
        return (_find if isinstance(run, DenseModel) else _classify)(request, run, source)


def _classify(request: Request, classifier: Any, source: Any) -> int:
    from ..prediction.classification import FEW, Summary
    from ..prediction.run import classify

    files, images = list(request.outputs.values()), len(source)
    printed, many = "-" in files, images > FEW
    summary = Summary(images)
    with ExitStack() as stack:
        here = printed and sys.stdout.isatty()  # where predictions are printed, it would be in the way
        bar: Any = nullcontext(lambda *_: None) if here else progress_bar()
        progress = stack.enter_context(bar)
        for _ in stack.enter_context(closing(classify(request, classifier, source, progress, summary))):
            pass
    if not printed:
        if not (many and files):
            show(summary.table())
        if many and summary.read:
            show(summary.class_table())
        if many and not files:
            print(f"the first {len(summary.first)} of {images:,} images; --csv FILE or --json FILE has all of them")
        for path in files:
            print(f"written: {path}")
    for line in summary.complaints():
        print(line, file=sys.stderr)
    return DONE if summary.read else FAILED


def _find(request: Request, run: Any, source: Any) -> int:
    from ..prediction.run import find

    with progress_bar() as progress:
        findings = find(request, run, source, progress)
    if request.json == "-":
        print_json(findings.entries, "-")
    else:
        show(table(columns(PATH, "file", "found"), [map(printable, row) for row in findings.rows[:FEW]]))
        if len(findings.rows) > FEW:
            print(f"and {len(findings.rows) - FEW:,} more")
    for name, reason in findings.errors.items():
        print(f"cannot be read: {printable(name)}: {printable(reason)}", file=sys.stderr)
    if request.out is not None:
        what = "images and masks/" if run.task == "segment" else "images and results.json"
        print(f"drawn: {request.out} ({what})")
    return DONE if findings.rows else FAILED
