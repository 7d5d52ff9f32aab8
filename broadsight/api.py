"""The verbs: every command as a function, with the command's options as keywords, or with its Request.

They print nothing unless asked by `progress=True`, and raise a UsageError, which is a ValueError, where the command
would exit with 2. What is found is returned; files are written where an option names a place, or with `keep=True` where
the command line puts them. A run and an exported model are always written.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

from .analysis.request import Request as Analyze
from .benchmark.request import Request as Bench
from .deployment.request import Request as Export
from .errors import UsageError, is_usage, one_line
from .evaluation.request import Request as Evaluate
from .explanation.request import Request as Explain
from .files import check_new_folder, check_writable, next_folder
from .options import Options
from .prediction.request import Request as Predict
from .training.request import Request as Train
from .visual.terminal import note, print_json, progress_bar

EVALUATIONS, EXPLANATIONS, ANALYSES = "evaluations", "explanations", "analyses"  # where results are put


def verb(kind: type[Options]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function of a Request take the options of the Request as keywords."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = [one for one in inspect.signature(function).parameters.values() if one.name != "request"]

        @wraps(function)
        def call(*values: Any, **options: Any) -> Any:
            of_call = {one.name: options.pop(one.name, one.default) for one in own}
            made = len(values) == 1 and isinstance(values[0], kind) and not options
            request = values[0] if made else kind.asked(*values, **options)
            try:
                return function(request, **of_call)
            except Exception as error:
                if isinstance(error, UsageError) or not is_usage(error):
                    raise
                raise UsageError(one_line(error)) from error

        parameters = []
        for one in kind.settings().values():
            how = inspect.Parameter.POSITIONAL_OR_KEYWORD if one.how.positional else inspect.Parameter.KEYWORD_ONLY
            default = inspect.Parameter.empty if one.required else one.default
            parameters.append(inspect.Parameter(one.name, how, default=default))
        call.__signature__ = inspect.Signature([*parameters, *own])  # ty: ignore[missing-attribute]
        lines = [f"    {one.name}: {one.how.help}" for one in kind.settings().values()]
        lines += [f"    {one.name}: {OF_CALL[one.name]}" for one in own]
        call.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Args:", *lines])
        return call

    return decorate


OF_CALL = {
    "progress": "show a progress bar, and notes",
    "keep": "where `out` names no folder, write the result into a new one, as the command line does",
}


@contextmanager
def _shown(progress: bool, json: str | None = None) -> Any:
    """A progress bar and what shows notes, or neither; no bar on a terminal that JSON is printed to."""
    silent = nullcontext(lambda *_: None)
    with progress_bar() if progress and not (json == "-" and sys.stdout.isatty()) else silent as shown:
        yield shown, note if progress else lambda note: None


def _write_record(record: Any, json: str | None) -> None:
    if json is not None:
        print_json(record, json)


@verb(Train)
def train(request: Train, *, progress: bool = False) -> Any:
    """Train a model, or continue a run. Returns the run, opened: a Classifier or a DenseModel."""
    from .report.run import report_run
    from .runs.opening import open_run
    from .training.run import train as run

    return open_run(run(request, reporter=report_run, quiet=not progress).folder, device=request.device)


@verb(Evaluate)
def evaluate(request: Evaluate, *, progress: bool = False, keep: bool = False) -> Any:
    """Measure how good a run is. Returns an Evaluation or a DenseEvaluation, with its `figures`."""
    check_writable(request.json)
    folder = check_new_folder(request.out, EVALUATIONS) if request.out or keep else None
    from .evaluation.run import evaluate as run
    from .report.run import write_evaluation

    with _shown(progress, request.json) as (shown, tell):
        found = run(request, shown, tell)
    if keep and folder is None:
        data = Path(str(found.data.get("data") or found.data.get("kind"))).name or "data"
        folder = next_folder(EVALUATIONS, data.replace(".", "-"), found.title)
    if folder is not None or request.json is not None:
        found = write_evaluation(found, folder)
        _write_record(found.record, request.json)
    return found


@verb(Predict)
def predict(request: Predict, *, progress: bool = False) -> Any:
    """Say what images show. Returns a list of Predictions, or of a dense run its Findings."""
    check_writable(*request.outputs.values())
    from .prediction.run import predict as run

    with _shown(progress) as (shown, tell):
        return run(request, shown, tell)


@verb(Explain)
def explain(request: Explain, *, progress: bool = False, keep: bool = False) -> Any:
    """Look at what a classifier sees. Returns what was found: the maps, or where files are written their record."""
    folder = check_new_folder(request.out, EXPLANATIONS) if request.out or keep else None
    check_writable(request.json)
    idle = [name for name in ("singles", "raw", "json") if getattr(request, name)]
    if idle and folder is None and not keep:  # they are about files
        raise UsageError(f"--{idle[0]} without a folder for files; give out=, or keep=True for a new one")
    from .explanation.run import explain as run
    from .prediction.classification import check_output

    check_output("--json", request.json)
    with _shown(progress, request.json) as (shown, tell):
        usual = (lambda title: folder or next_folder(EXPLANATIONS, title)) if keep else (lambda title: folder)
        found = run(request, shown, tell, usual)
    _write_record(found.record, request.json)
    return found


@verb(Analyze)
def analyze(request: Analyze, *, progress: bool = False, keep: bool = False) -> Any:
    """Measure what models do inside. Returns an Analysis, with its `results` by model."""
    check_writable(request.json, request.plot)
    folder = check_new_folder(request.out, ANALYSES) if request.out or keep else None
    from .analysis.record import write_analysis
    from .analysis.run import analyze as run
    from .visual.plots import need_matplotlib, plot_format

    if keep or folder is not None or request.plot is not None:
        need_matplotlib()
        plot_format(request.plot or "x.png")
    with _shown(progress, request.json) as (shown, tell):
        found = run(request, shown)
    for one in found.notes:
        tell(one)
    if keep and folder is None:
        title = found.subjects[0].label.partition(",")[0] if found.subjects else ""
        more = f"and-{len(request.models) - 1}-more" if len(request.models) > 1 else ""
        folder = next_folder(ANALYSES, *filter(None, (found.measure.name, title, more)))
    found = write_analysis(found, folder, request.plot)
    _write_record(found.record, request.json)
    return found


@verb(Export)
def export(request: Export, *, progress: bool = False) -> Any:
    """Write a model for another runtime. Returns what was Exported: its path, agreement and times."""
    check_writable(request.json)
    from .deployment.run import export as run

    with _shown(progress, request.json) as (shown, tell):
        found = run(request, shown, tell)
    _write_record({"command": request.command, **found.record()}, request.json)
    return found


@verb(Bench)
def bench(request: Bench, *, progress: bool = False) -> Any:
    """Time models side by side. Returns a Report, or with several sizes how costs grow."""
    check_writable(request.json, request.plot, request.scatter)
    from .benchmark.bench import bench as run
    from .benchmark.bench import draw, record_of

    with _shown(progress, request.json) as (shown, _):
        found = run(request, shown)
    _write_record(record_of(found, request), request.json)
    draw(found, request)
    return found
