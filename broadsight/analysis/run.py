"""Runs a measure over models that all see the same images, a batch at a time."""

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import timm

from ..benchmark.run import fixed_threads
from ..data.inside import outside_allowed
from ..data.sources import Source
from ..data.sources.evaluation import Found
from ..data.sources.sample_table import some
from ..errors import UsageError, nearest
from ..options import TIMM_NAMES
from ..prediction.classification import useful_workers
from .images import Batches, images_for
from .measures import MEASURES, Measure, find_measure, refuse_unsuited
from .request import SHOWN, Request
from .subjects import RANDOM, Subject, open_subjects

Progress = Callable[[int, int | None, str], None]
NAMED = 5  # images that could not be read, in a note; the record has all


@dataclass(frozen=True)
class Analysis:
    """What was measured.

    Args:
        results: By the labels of the models.
        seconds: Likewise.
        settings: Of the measure, all of them.
        skipped: Images that could not be read, and why.
        how: In what way it was done, as plain types.
        record, folder: What analysis.json holds, and where it is; see `broadsight.analysis.record.write_analysis`.
    """

    request: Request
    measure: Measure
    subjects: tuple[Subject, ...]
    results: dict[str, Any]
    seconds: dict[str, float]
    settings: dict[str, Any]
    found: Found
    skipped: dict[str, str]
    how: dict[str, Any]
    record: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def interrupted(self) -> bool:
        return self.how["interrupted"]

    @property
    def notes(self) -> tuple[str, ...]:
        return self.found.notes


class _Counter:
    """Adds up over models what each reports of itself."""

    def __init__(self, progress: Progress, total: int):
        self.progress, self.total, self.before = progress, total, 0

    def of(self, label: str) -> Callable[[int], None]:
        self.progress(self.before, self.total, label)
        return lambda done: self.progress(min(self.before + done, self.total), self.total, label)


def analyze(request: Request, progress: Progress = lambda done, total, doing: None) -> Analysis:
    """Measure all models; everything is checked before the first image passes one.

    An interrupt ends it early: the models that are done count, if there is any.
    """
    _check_order(request)
    measure = find_measure(str(request.measure))
    request.refuse_ignored(facts_of_analysis(measure, request))
    with outside_allowed(request.allow_outside):
        if measure.takes == "files":
            from .measured_fronts import analyze_front

            return analyze_front(request, progress)
        return analyze_models(request, measure, progress)


def facts_of_analysis(measure: Measure, request: Request) -> dict[str, str | None]:
    """What options are for, see `Option.of`: None, or why it does not hold of this analysis."""
    named = [one for one in request.models if isinstance(one, str)]
    written = [one for one in named if measure.takes == "files" and Path(one).is_file()]
    timm_names = [one for one in named if one not in written and not Path(one).is_dir()]
    shown = measure.takes != "files" or request.data is not None or bool(timm_names)
    first = " ".join(map(str, named[:3]))
    return {
        SHOWN: None if shown else "front reads what training and eval have found; give --data to ask again",
        TIMM_NAMES: None if timm_names or not named else f"{first} brings weights and arguments of its own",
    }


def _check_order(request: Request) -> None:
    """Whoever names a model first is told that the measure comes first."""
    measure = request.measure
    if measure is None:
        raise UsageError(f"analyze needs MEASURE: one of {', '.join(MEASURES)}")
    if measure in MEASURES or nearest(measure, MEASURES, alike=0.7):
        return
    named = [one for one in request.models if one in MEASURES]
    if named or Path(measure).is_dir() or timm.is_model(measure.partition("@")[0].partition(".")[0]):
        first = named[0] if named else "MEASURE"
        raise UsageError(
            f"{measure} is a model, the measure comes first: broadsight analyze {first} {measure}; "
            f"measures are {', '.join(MEASURES)}"
        )


def analyze_models(request: Request, measure: Measure, progress: Progress) -> Analysis:
    """Run a measure over models that it is shown images of; see `analyze`."""
    started = time.monotonic()
    settings = measure.settings(request.set)
    if not request.models:
        raise ValueError(f"analyze {measure.name} needs MODEL|RUN: folders of runs, or timm names")
    if "seed" in inspect.signature(measure.run).parameters:
        settings["seed"] = request.seed or 0
    threads = request.threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1
    with fixed_threads(threads):
        subjects = open_subjects(request)
        for subject in subjects:
            _check_suits(measure, subject)
        found, sources = images_for(request, measure, subjects, settings)
        count, batch = len(sources[0][0]), request.batch or measure.batch
        workers = useful_workers(count, batch) if request.workers is None else request.workers
        counter = _Counter(progress, count * len(subjects))
        results: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        skipped: dict[str, str] = {}
        interrupted = False
        for subject, (source, labels) in zip(subjects, sources, strict=True):
            start = time.monotonic()
            how: dict[str, Any] = dict(batch=batch, workers=workers, strict=request.strict, skipped=skipped)
            try:
                results[subject.label] = _measured(
                    measure, subject, source, labels, measure.of_run(settings), counter, how
                )
            except KeyboardInterrupt:
                if not results:
                    raise
                interrupted = True
                break
            seconds[subject.label] = time.monotonic() - start
            counter.before += count
    notes = [*found.notes, *skip_notes(skipped), *random_notes(subjects)]
    if interrupted:
        left_out = [one.label for one in subjects if one.label not in results]
        notes.append(f"interrupted: {some(left_out)} left out")
    how = dict(batch=batch, threads=threads, workers=workers, device=subjects[0].normalise.device.type)
    how |= dict(seconds=time.monotonic() - started, interrupted=interrupted)
    found = replace(found, notes=tuple(dict.fromkeys(notes)))
    return Analysis(request, measure, tuple(subjects), results, seconds, settings, found, skipped, how)


def _check_suits(measure: Measure, subject: Subject) -> None:
    if not measure.suits(subject.model) or (subject.dense is not None and not measure.dense):
        refuse_unsuited(measure, subject.model, subject.source, dense=subject.dense is not None)


def _measured(
    measure: Measure,
    subject: Subject,
    source: Source,
    labels: bool,
    settings: Mapping[str, Any],
    counter: _Counter,
    how: Mapping[str, Any],
) -> Any:
    seen = counter.of(subject.label)
    try:
        if measure.takes == "classifier":
            rest = {name: how[name] for name in ("workers", "strict")}
            result = measure.run(subject.classifier, source, batch_size=how["batch"], seen=seen, **rest, **settings)
            how["skipped"].update(getattr(result, "skipped", {}))
            return result
        images = Batches(subject, source, labels=labels, **how)
        result = measure.run(subject.model, images, batch_size=how["batch"], seen=seen, **settings)
    except ValueError as error:
        raise ValueError(f"{subject.label}: {error}") from None
    left = len(source) - len(how["skipped"])
    if left < measure.least:
        raise ValueError(
            f"{left} of {len(source)} images can be read, {measure.name} needs {measure.least} or more; "
            f"unreadable: {some(list(how['skipped']))}"
        )
    return result


def skip_notes(skipped: Mapping[str, str]) -> list[str]:
    if not skipped:
        return []
    shown = [f"{name} ({reason})" for name, reason in skipped.items()]
    count = f"{len(skipped):,} image{'s' if len(skipped) > 1 else ''}"
    return [f"{count} could not be read and left out: {some(shown, NAMED)}"]


def random_notes(subjects: Sequence[Subject]) -> list[str]:
    untrained = [one.source for one in subjects if one.weights == RANDOM]
    if not untrained:
        return []
    return [f"{some(list(dict.fromkeys(untrained)))}: random weights, so the figures say nothing about a trained model"]
