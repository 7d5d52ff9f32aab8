"""From what a user asks of `predict` to what the images show: classes, or what a dense run finds."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from ..data.inside import outside_allowed
from ..data.sources.unlabelled import Unlabelled, find_images
from ..deployment.exported import open_any
from ..errors import UsageError
from ..files import check_creatable
from ..inspection.precision import remark
from ..options import DENSE_RUNS
from ..runs.classifier import Classifier
from ..runs.dense_model import DenseModel
from ..runs.opening import facts_of
from .classification import Prediction, Summary, check_output, predict_images, useful_workers, write_settings, writing
from .dense import RESULTS, Findings, predict_dense, read_boxes, write_findings
from .request import Request

Progress = Callable[[int, int | None, str], None]
Tell = Callable[[str], None]


@contextmanager
def opened(request: Request, tell: Tell) -> Generator[tuple[Classifier | DenseModel, Unlabelled], None, None]:
    """The run and the images of a request, once everything that can be checked has been; notes go to `tell`."""
    facts = facts_of(request.run)
    request.refuse_ignored(facts)
    for form, path in request.outputs.items():
        check_output(f"--{form}", path)
    if facts[DENSE_RUNS] is None and request.csv == "-":
        raise UsageError("--csv of a dense run goes to a file; expected --csv FILE")
    if request.out is not None:
        if Path(request.out).exists() and not Path(request.out).is_dir():
            raise UsageError(f"--out {request.out} is a file; expected a folder for the images")
        check_creatable(request.out)
    with outside_allowed(request.allow_outside):
        source, notes = find_images(request.images, request.list)
        if request.threads is not None:
            torch.set_num_threads(request.threads)
        run = open_any(request)
        if request.boxes and not run.top_down:
            raise UsageError(f"--boxes is for pose models; {run.head} finds objects by itself")
        if isinstance(run, DenseModel) and run.top_down and not request.boxes:
            notes.append("each image is taken for one object; --boxes FILE says where several are")
        for note in filter(None, (*notes, remark(request.precision, run))):
            tell(note)
        yield run, source


def predict(
    request: Request, progress: Progress = lambda done, total, doing: None, tell: Tell = lambda note: None
) -> list[Prediction] | Findings:
    """What all images show: of a classifier the classes of each, in order; of a dense run all that it finds."""
    with opened(request, tell) as (run, source):
        if isinstance(run, DenseModel):
            return find(request, run, source, progress)
        with closing(classify(request, run, source, progress, Summary(len(source)))) as found:
            return list(found)


def classify(
    request: Request, classifier: Classifier, source: Unlabelled, progress: Progress, summary: Summary
) -> Generator[Prediction, None, None]:
    """The classes of each image, one after the other, added to a summary and to the files that the request names."""
    total, batch, top = len(source), request.batch, min(request.top, classifier.num_classes)
    workers = useful_workers(total, batch) if request.workers is None else request.workers
    progress(0, total, classifier.title)
    with ExitStack() as stack:
        writers = [stack.enter_context(writing(path, top, form)) for form, path in request.outputs.items()]
        found = predict_images(classifier, source, top=top, batch=batch, workers=workers)
        for prediction in stack.enter_context(closing(found)):
            for writer in writers:
                writer.write(prediction)
            summary.add(prediction)
            done = summary.read + summary.failed
            if done % batch == 0 or done == total:  # to draw the bar for each image would take longer than the image
                progress(done, total, classifier.title)
            yield prediction
    for path in request.outputs.values():
        write_settings(path, request.command, classifier, summary)


def find(request: Request, run: DenseModel, source: Unlabelled, progress: Progress) -> Findings:
    """What a dense run finds in all images, drawn and written where the request names a place."""
    folder = Path(request.out) if request.out else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    progress(0, len(source), run.title)
    options: dict[str, Any] = dict(flip=request.flip, scales=request.scales, slide=request.slide)
    options |= dict(threshold=request.threshold, boxes=read_boxes(request.boxes) if request.boxes else None)
    options["seen"] = lambda done: progress(done, len(source), run.title)
    findings = predict_dense(run, source, folder, **options)
    results = Path(request.json) if request.json and request.json != "-" else folder and folder / RESULTS
    table = Path(request.csv) if request.csv else None
    write_findings(findings, run, results=results, table=table, command=request.command)
    return findings
