"""From a model to an artefact that has been opened again, compared, timed, and only then put in its place."""

import json
import os
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import timm
import torch

from ..benchmark.machine import fixed_threads
from ..benchmark.runtimes import file_bytes
from ..benchmark.timing import Summary, interleave, paired_ratio, summarize
from ..errors import UsageError, first_line
from ..files import move_together, write_json
from ..inspection.precision import cast
from ..options import CLASSIFIERS
from ..runs.classifier import Classifier
from ..runs.opening import facts_of, is_dense, open_asked
from .agreement import Agreement, compare, rounding_of
from .formats import FORMATS, Format, need
from .graph import capture, prepare
from .request import BATCHES, TOLERANCE, Request
from .session import Description, Session
from .subject import Subject, of_classifier

INT8_TOLERANCE = 0.05  # as `TOLERANCE`, of two runtimes with the same integers, which may round to neighbouring ones
RECORD = ".export.json"  # behind the artefact's name: how it came about

Progress = Callable[[int, int | None, str], None]
Tell = Callable[[str], None]
# From a float artefact to the name of the int8 one, by a session: its description, and what to report
Quantise = Callable[[Path, Path, Session], tuple[Description, dict[str, Any]]]


class Disagreement(RuntimeError):
    """An artefact that does not compute what its model does."""


@dataclass(frozen=True)
class Times:
    """Of one image, in torch and in the artefact's runtime, paired within rounds."""

    torch_ms: Summary
    artefact_ms: Summary
    speedup: Summary


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path  # the file or folder; of several files the one to open
    bytes: int  # of all its files
    description: Description
    computes_in: str  # the precision, as the runtime says on this machine
    agreement: Agreement  # with the model in torch; of an int8 artefact that of its float form
    times: Times | None  # None if none were taken
    int8: dict[str, Any] | None  # what quantisation reports
    seconds: float  # that the export took
    shown: str  # what images it was compared on
    notes: tuple[str, ...]
    findings: dict[str, float] | None  # of a dense model how far apart what artefact and model find in these images is

    def record(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        found = asdict(self) | {"path": self.path.name, "seconds": round(self.seconds, 2)}
        found |= {"description": json.loads(self.description.to_json()), "notes": list(self.notes)}
        return {"artefact": found.pop("path"), "compared_on": found.pop("shown"), **found}


def check_request(request: Request) -> Format:
    """Refuse what cannot be, before the model is opened."""
    form = need(request.format, request.int8)
    if request.any_size and not form.sizes:
        raise ValueError(f"--any-size with the format {request.format}, which takes one size; leave it out")
    _precision(form, request, is_dense(request.run))
    return form


def _precision(form: Format, request: Request, dense: bool) -> str:
    """The precision that is asked for; a ValueError if there is none such."""
    found = form.precision(request.precision, request.int8)
    if not dense or form.chooses or found == "fp32":
        return found
    if request.precision == "auto":
        return "fp32"
    able = " or ".join(name for name, other in FORMATS.items() if other.chooses)
    what = f"--precision {found} with --format {request.format} of a dense run, whose anchors and boxes need float32"
    raise UsageError(f"{what}; expected --format {able}, which leaves the file as it is")


def check_target(target: Path, form: Format) -> None:
    """Refuse a place that an artefact cannot have."""
    if form.suffix and target.suffix != form.suffix:
        raise ValueError(f"--out {target}; expected a name ending in {form.suffix}")
    if form.suffix and target.is_dir():
        raise ValueError(f"--out {target} is a folder; give the name of a file in it")
    if not form.suffix:
        from .formats.web import check_folder

        check_folder(target)
    there = next(parent for parent in target.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "permission denied" if there.is_dir() else f"{there} is a file"
        raise ValueError(f"cannot write {target}: {what}; choose another --out")


def export(request: Request, progress: Progress = lambda *_: None, tell: Tell = lambda note: None) -> Exported:
    """Write a model for another runtime, and let it stay only if it computes what the model does.

    `tell` is given what the user should know, a line each, before the work begins.
    """
    form, facts = check_request(request), facts_of(request.run)
    facts["--int8"] = facts[CLASSIFIERS] or (None if request.int8 else "which is not given")
    facts["--format web"] = None if request.format == "web" else f"this is --format {request.format}"
    batches, how = (form.int8_batches, " in int8") if request.int8 else (form.batches, "")
    one = f"{request.format}{how} takes one image at a time"
    facts[BATCHES] = None if batches or not request.any_batch else one
    request.refuse_ignored(facts)
    if request.out is not None:
        check_target(Path(request.out), form)
    quantise, notes = None, []
    if is_dense(request.run):
        if request.format == "web":
            what = f"--format web is a page for classifiers; {facts[CLASSIFIERS]}"
            raise UsageError(f"{what}: expected onnx, openvino, pt2 or executorch")
        from .dense.subject import of_dense

        shown = request.command, request.images, request.compare
        subject = of_dense(request.run, *shown, size=request.size, any_size=request.any_size)
    else:
        classifier, notes = _classifier(request)
        subject = of_classifier(classifier, request.command, request.images, request.compare)
    name = re.sub(r"[^a-zA-Z0-9_.-]+", "-", subject.description.title).strip("-.") or "model"
    target = Path(request.out or name + ("-int8" if request.int8 else "") + (form.suffix or "-web"))
    check_target(target, form)
    for note in [*notes, *subject.notes]:
        tell(note)
    if request.int8:
        from .int8.run import quantiser

        quantise = quantiser(classifier, subject.description.title, request, progress)
    return write_artefact(subject, target, request, quantise=quantise, progress=progress)


def _classifier(request: Request) -> tuple[Classifier, list[str]]:
    """The classifier to export, on the CPU; random weights for a timm name that has none, with a note."""
    run, notes = request.run, []
    if isinstance(run, Classifier) and run.precision != "fp32":
        raise UsageError(f"{run.title} is open in {run.precision}; open it in fp32, and export it with precision=")
    options: dict[str, Any] = {"precision": "fp32"} | ({} if isinstance(run, Classifier) else {"device": "cpu"})
    plain = isinstance(run, str) and not Path(run).is_dir() and timm.is_model(run.split(".")[0])
    if plain and not request.checkpoint:
        config = timm.models.get_pretrained_cfg(run)
        if not (request.pretrained and config is not None and config.has_weights):
            options["pretrained"] = False
            notes.append(f"{run} has random weights: for the speed and a trial; --checkpoint gives it trained ones")
    torch.manual_seed(0)  # for weights that nobody has trained
    try:
        return open_asked(request, **options), notes
    except RuntimeError as error:
        if "cannot be had" not in str(error):
            raise
        remedy = "give some by --checkpoint, or export random ones, for the speed, by --no-pretrained"
        raise ValueError(f"{error}; {remedy}") from None


def write_artefact(
    subject: Subject,
    target: Path,
    request: Request,
    *,
    quantise: Quantise | None = None,
    progress: Progress = lambda *_: None,
) -> Exported:
    """Write an artefact, and let it stay only if it computes what the model does; the request says how, not which."""
    form, web, title = FORMATS[request.format], request.format == "web", subject.description.title
    started, any_size = time.perf_counter(), request.any_size
    if any_size and subject.obstacle:
        raise ValueError(f"--any-size, but {title} takes one size: {subject.obstacle}")
    precision = _precision(form, request, subject.description.task != "classify")
    any_batch = request.any_batch and (form.batches if quantise is None else form.int8_batches)
    image = {**subject.description.image, "any_batch": any_batch, "any_size": any_size}
    description = replace(subject.description, image=image, precision=precision)
    if web:  # before minutes are spent on what cannot be
        from .formats.web import require

        require(description, request.ort_web)
    steps = 6 if quantise else 5
    progress(0, steps, "folding what inference allows")
    made = prepare(subject.model, None if any_size else description.shape[1:])
    made = cast(made, "fp32" if form.chooses else precision)
    progress(1, steps, "capturing the graph")
    shape, example = description.shape, subject.example_size if any_size else None
    shape = shape if example is None else (shape[0], *example)
    more, single = any_batch or (form.narrows and not any_size), example is not None and form.guarded
    sizes: dict[str, Any] = dict(any_batch=more, any_size=any_size, single_cells=single)
    program = capture(made, shape, **sizes, dtype=None if precision == "fp32" else torch.float32)
    with _scratch(target) as folder, fixed_threads(request.threads):
        progress(2, steps, f"writing {request.format}")
        first = FORMATS["onnx"] if web else form  # of which a page is made
        artefact = folder / ("model.onnx" if web else target.name)
        with failing(f"{title} cannot be written as {request.format}"):
            first.write(program, description, artefact)
            if quantise is not None and request.format == "openvino":  # it drops the names that layers are kept by
                from .int8.openvino import name_layers

                name_layers(artefact, program)
        progress(3, steps, "comparing with torch on images")
        session = first.open(artefact, request.threads)
        agreement = _agreed(subject, session, image, request, request.format)
        int8, small = None, folder / ("int8-" + artefact.name)
        if quantise is not None:
            progress(4, steps, "quantising")
            description, int8 = quantise(artefact, small, session)
            artefact = small
        if web:
            page: Any = form
            page.write(artefact, description, folder / "page", ort_web=request.ort_web)
            artefact = folder / "page"
        if int8 is not None or web:
            session = form.open(artefact, request.threads)
            if int8 is None:  # in the browser's own runtime, and no longer in ONNX Runtime's
                agreement = _agreed(subject, session, image, request, "the browser's runtime")
            elif web:  # refused if it answers otherwise than where its accuracy was measured
                measured = first.open(small, request.threads)
                both = compare(session, lambda images: [*measured(images).values()], _batches(subject, image))
                if not both.within(INT8_TOLERANCE):
                    what = f"{title} in int8 differs by {both.relative:.3g} of the largest output between the browser's"
                    limit = f"expected at most {INT8_TOLERANCE:g}: nothing was written"
                    raise Disagreement(f"{what} runtime and ONNX Runtime; {limit}")
        findings = subject.findings(session) if subject.findings else None
        progress(steps - 1, steps, "taking times")
        times = _times(subject, session, request.rounds) if request.rounds else None
        if form.suffix:
            size = file_bytes(artefact)
            move_together(artefact, target, form.files)
        else:
            size = sum(file.stat().st_size for file in artefact.rglob("*") if file.is_file())
            if target.exists():
                target.rename(folder / "replaced")
            artefact.rename(target)
    progress(steps, steps, "done")
    took, shown = time.perf_counter() - started, (subject.shown, subject.notes)
    how = description, session.precision, agreement, times, int8, took
    found = Exported(target, size, *how, *shown, findings)
    write_json(found.record(), target.with_name(target.name + RECORD))
    return found


def _agreed(subject: Subject, session: Session, image: dict[str, Any], request: Request, where: str) -> Agreement:
    """How far an artefact is from its model, which is not too far."""
    title, strict = subject.description.title, request.tolerance < TOLERANCE
    try:
        found = compare(session, subject.reference, _batches(subject, image), subject.follow)
        found = replace(found, precision="fp32" if strict else session.description.precision)
    except (ValueError, OSError):
        raise
    except Exception as error:  # runtimes have errors of their own for what they cannot run
        what = f"{title} was exported but does not run in {where}"
        raise Disagreement(f"{what}: {first_line(error)}; nothing was written") from error
    if not (found.within(request.tolerance) or strict or subject.follow):  # is that the artefact, or any rounding?
        found = replace(found, rounding=rounding_of(subject.model, _batches(subject, image), found.precision))
    if not found.within(request.tolerance):
        far = f"{found.largest:.3g}, {found.relative:.3g} of the largest output on {found.images} images"
        limit = f"expected at most {found.limit(request.tolerance):.3g}: nothing was written"
        raise Disagreement(f"{title} in {where} differs from torch by {far}; {limit}")
    return found


def _batches(subject: Subject, image: dict[str, Any]) -> Generator[np.ndarray, None, None]:
    """All images: the first alone, the others together if any number is taken; of any size, some of another too."""
    first, *others = subject.images(None)
    yield first
    yield from [np.concatenate(others)] if image["any_batch"] and len(others) > 1 else others
    if image["any_size"]:  # a size that is a multiple of nothing
        yield from subject.images(image["height"] + image["height"] // 4 + 3)[:2]


def _times(subject: Subject, session: Session, rounds: int) -> Times:
    one = subject.images(None)[0]
    calls: list[Callable[[], Any]] = [lambda: subject.reference(one), lambda: session(one)]

    def timed(call: Callable[[], Any], _: int) -> float:
        before = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - before)

    for call in calls:
        call()
    ours, theirs = interleave(calls, timed, rounds)
    return Times(summarize(ours), summarize(theirs), paired_ratio(ours, theirs))


@contextmanager
def _scratch(target: Path) -> Generator[Path, None, None]:
    """A folder beside the target, so that moving from it is renaming; gone in the end, whatever happens, as are the
    folders above that were made for nothing."""
    above = [parent for parent in target.absolute().parents if not parent.exists()]  # the nearest first
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    finally:
        for parent in above:
            with suppress(OSError):  # something was written
                parent.rmdir()


@contextmanager
def failing(what: str) -> Generator[None, None, None]:
    """A failure of an exporter, a quantiser or a runtime in one line, which says first what failed."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise RuntimeError(f"{what}: {type(error).__name__}: {first_line(error)}") from error
