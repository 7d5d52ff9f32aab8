"""From a model to an artefact that has been opened again, compared, timed, and only then put in its place."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..benchmark.machine import fixed_threads
from ..benchmark.timing import Summary, interleave, paired_ratio, summarize
from ..errors import first_line
from ..files import move_together, write_json
from . import FORMATS, Agreement, Description, Session, capture, compare, need, rounding_of
from .formats import Format
from .prepare import prepare
from .subject import Subject

TOLERANCE = 1e-3  # of outputs, relative to the largest of them
INT8_TOLERANCE = 0.05  # likewise between two runtimes of the same integers, which may round to neighbouring ones
RECORD = ".export.json"  # behind the artefact's name: how it came about
ROUNDS = 11

Progress = Callable[[int, int | None, str], None]


class Disagreement(RuntimeError):
    """An artefact that does not compute what its model does."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for.

    Args:
        format: Key of FORMATS.
        any_batch: Any number of images at once, where the format can.
        any_size: Any image size, where format and model can.
        tolerance: The largest difference of outputs over the largest output.
        threads: While comparing and timing.
        rounds: Of timing; 0 for none.
        options: Further arguments of the format.
    """

    format: str
    any_batch: bool = True
    any_size: bool = False
    tolerance: float = TOLERANCE
    threads: int = 1
    rounds: int = ROUNDS
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Times:
    """Milliseconds of one image, in torch and in the artefact's runtime, paired within rounds."""

    torch_ms: Summary
    artefact_ms: Summary
    speedup: Summary


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        path: The file or folder; of several files the one to open.
        bytes: Of all its files.
        agreement: With the model in torch; of an int8 artefact that of its float form.
        times: None if none were taken.
        int8: What quantisation reports.
        seconds: That the export took.
        shown: What images it was compared on.
        findings: Of a dense model how far apart what artefact and model find in these images is.
    """

    path: Path
    bytes: int
    description: Description
    agreement: Agreement
    times: Times | None
    int8: dict[str, Any] | None
    seconds: float
    shown: str
    notes: tuple[str, ...]
    findings: dict[str, float] | None = None

    def record(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {
            "artefact": self.path.name,
            "bytes": self.bytes,
            "compared_on": self.shown,
            "agreement": asdict(self.agreement),
            "findings": self.findings,
            "times": asdict(self.times) if self.times else None,
            "int8": self.int8,
            "seconds": round(self.seconds, 2),
            "notes": list(self.notes),
            "description": json.loads(self.description.to_json()),
        }


def check_request(wanted: Wanted, int8: bool = False) -> Format:
    """Refuse what cannot be, before the model is opened."""
    form = need(wanted.format, int8)
    if wanted.any_size and not form.sizes:
        raise ValueError(f"--any-size with the format {wanted.format}, which takes one size; leave it out")
    if not wanted.tolerance > 0:
        raise ValueError(f"--tolerance {wanted.tolerance}; expected a positive number, such as {TOLERANCE}")
    if wanted.threads < 1 or wanted.rounds < 0:
        raise ValueError(f"--threads {wanted.threads} --rounds {wanted.rounds}; expected 1 or more, and 0 or more")
    return form


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


Quantise = Callable[[Path, Path, Session], tuple[Description, dict[str, Any]]]


def export(
    subject: Subject,
    target: Path,
    wanted: Wanted,
    *,
    quantise: Quantise | None = None,
    progress: Progress = lambda *_: None,
) -> Exported:
    """Write an artefact, and let it stay only if it computes what the model does.

    Args:
        target: Name of the file with its format's suffix, or of the folder.
        quantise: From the float artefact to the name of the int8 one, which gets its description; also given the
            float artefact's session. None: no int8.

    Raises:
        ValueError: The model cannot be captured or written so.
        Disagreement: The artefact differs by more than the tolerance.
    """
    form = check_request(wanted, quantise is not None)
    check_target(target, form)
    started, notes = time.perf_counter(), list(subject.notes)
    any_size = wanted.any_size
    if any_size and subject.obstacle:
        raise ValueError(f"--any-size, but {subject.description.title} takes one size: {subject.obstacle}")
    any_batch = wanted.any_batch and (form.batches if quantise is None else form.int8_batches)
    image = {**subject.description.image, "any_batch": any_batch, "any_size": any_size}
    description = replace(subject.description, image=image)
    if wanted.format == "web":  # before minutes are spent on what cannot be
        from .formats.web import require

        require(description, **dict(wanted.options))
    steps = 6 if quantise else 5
    progress(0, steps, "folding what inference allows")
    made = prepare(subject.model, None if any_size else description.shape[1:])
    progress(1, steps, "capturing the graph")
    shape, example = description.shape, subject.example_size if any_size else None
    program = capture(
        made,
        shape if example is None else (shape[0], *example),
        any_batch=any_batch or (form.narrows and not any_size),
        any_size=any_size,
        single_cells=example is not None and form.guarded,
    )
    with _scratch(target) as folder, fixed_threads(wanted.threads):
        progress(2, steps, f"writing {wanted.format}")
        artefact = folder / target.name
        with _named(subject, wanted.format):
            artefact = _write(program, description, artefact, wanted, quantise is not None)
        progress(3, steps, "comparing with torch on images")
        session = _open(artefact, wanted)
        agreement = _agreed(subject, session, image, wanted, wanted.format)
        int8, small = None, folder / ("int8-" + artefact.name)
        if quantise is not None:
            progress(4, steps, "quantising")
            description, int8 = quantise(artefact, small, session)
            artefact = small
        if wanted.format == "web":
            page = folder / "page"
            form.write(artefact, description, page, **dict(wanted.options))
            artefact = page
        if int8 is not None or wanted.format == "web":
            session = form.open(artefact, wanted.threads)
            if int8 is None:  # in the browser's own runtime, and no longer in ONNX Runtime's
                agreement = _agreed(subject, session, image, wanted, "the browser's runtime")
            elif wanted.format == "web":
                _as_measured(subject, session, FORMATS["onnx"].open(small, wanted.threads), image)
        findings = subject.findings(session) if subject.findings is not None else None
        progress(steps - 1, steps, "taking times")
        times = _times(subject, session, wanted.rounds) if wanted.rounds else None
        size = _move(artefact, target, form)
    progress(steps, steps, "done")
    took = time.perf_counter() - started
    found = Exported(target, size, description, agreement, times, int8, took, subject.shown, tuple(notes), findings)
    write_json(found.record(), target.with_name(target.name + RECORD))
    return found


def _agreed(subject: Subject, session: Session, image: dict[str, Any], wanted: Wanted, where: str) -> Agreement:
    """How far an artefact is from its model, which is not too far."""
    title = subject.description.title
    try:
        found = compare(session, subject.reference, _batches(subject, image), subject.follow)
    except (ValueError, OSError):
        raise
    except Exception as error:  # runtimes have errors of their own for what they cannot run
        raise Disagreement(
            f"{title} was exported but does not run in {where}: {first_line(error)}; nothing was written"
        ) from error
    strict = wanted.tolerance < TOLERANCE or subject.follow is not None
    if found.relative > wanted.tolerance and not strict:  # is that the artefact, or any rounding?
        found = replace(found, rounding=rounding_of(subject.model, _batches(subject, image)))
    if not found.within(wanted.tolerance):
        raise Disagreement(
            f"{title} in {where} differs from torch by {found.largest:.3g}, {found.relative:.3g} of the largest output "
            f"on {found.images} images; expected at most {wanted.tolerance:g}: nothing was written"
        )
    return found


def _as_measured(subject: Subject, session: Session, measured: Session, image: dict[str, Any]) -> None:
    """Refuse an int8 artefact that answers otherwise than it did where its accuracy was measured."""
    found = compare(session, lambda images: [*measured(images).values()], _batches(subject, image))
    if not found.within(INT8_TOLERANCE):
        raise Disagreement(
            f"{subject.description.title} in int8 differs by {found.relative:.3g} of the largest output between the "
            f"browser's runtime and ONNX Runtime; expected at most {INT8_TOLERANCE:g}: nothing was written"
        )


def _write(program: Any, description: Description, artefact: Path, wanted: Wanted, int8: bool) -> Path:
    """The float artefact; a page is made of an ONNX file, which comes first."""
    if wanted.format == "web":
        artefact = artefact.with_name("model.onnx")
        FORMATS["onnx"].write(program, description, artefact)
    else:
        FORMATS[wanted.format].write(program, description, artefact)
    if int8 and wanted.format == "openvino":  # which drops the names that layers are kept in float by
        from .int8.openvino import name_layers

        name_layers(artefact, program)
    return artefact


def _open(artefact: Path, wanted: Wanted) -> Session:
    return FORMATS["onnx" if wanted.format == "web" else wanted.format].open(artefact, wanted.threads)


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
    for call in calls:
        call()

    def timed(call: Callable[[], Any], _: int) -> float:
        before = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - before)

    ours, theirs = interleave(calls, timed, rounds)
    return Times(summarize(ours), summarize(theirs), paired_ratio(ours, theirs))


@contextmanager
def _scratch(target: Path) -> Generator[Path, None, None]:
    """A folder beside the target, so that moving from it is renaming; gone in the end, whatever happens, as are the
    folders above that were made for nothing."""
    above = [parent for parent in target.absolute().parents if not parent.exists()]  # the nearest first
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in above:
            with suppress(OSError):  # something was written
                parent.rmdir()


@contextmanager
def _named(subject: Subject, format: str) -> Generator[None, None, None]:
    """A failure of an exporter in one line."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise RuntimeError(
            f"{subject.description.title} cannot be written as {format}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _move(artefact: Path, target: Path, form: Format) -> int:
    """Put all files of an artefact in their place; their size. The one to open comes last: it names the others."""
    if not form.suffix:
        size = sum(file.stat().st_size for file in artefact.rglob("*") if file.is_file())
        replaced = artefact.with_name("replaced")
        if target.exists():
            target.rename(replaced)
        artefact.rename(target)
        return size
    size = sum(artefact.with_suffix(suffix).stat().st_size for suffix in form.files)
    move_together(artefact, target, form.files)
    return size
