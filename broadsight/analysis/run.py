"""Runs a measure over models that all see the same images, a batch at a time."""

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..benchmark.run import fixed_threads
from ..data.sources import Source
from ..data.sources.evaluation import Found
from ..data.sources.sample_table import some
from ..prediction.classification import useful_workers
from .images import Batches, images_for
from .measures import Measure, find_measure, refuse_unsuited
from .request import RANDOM, Asked, Subject, open_subjects

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
    """

    asked: Asked
    measure: Measure
    subjects: tuple[Subject, ...]
    results: dict[str, Any]
    seconds: dict[str, float]
    settings: dict[str, Any]
    found: Found
    skipped: dict[str, str]
    how: dict[str, Any]

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


def analyze(asked: Asked, progress: Progress = lambda done, total, doing: None) -> Analysis:
    """Measure all models; everything is checked before the first image passes one.

    An interrupt ends it early: the models that are done count, if there is any.
    """
    started = time.monotonic()
    measure = find_measure(asked.measure)
    settings = measure.settings(asked.options)
    if not asked.models:
        raise ValueError(f"analyze {measure.name} needs MODEL|RUN: folders of runs, or timm names")
    if "seed" in inspect.signature(measure.run).parameters:
        settings["seed"] = asked.seed or 0
    threads = asked.threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1
    with fixed_threads(threads):
        subjects = open_subjects(asked)
        for subject in subjects:
            _check_suits(measure, subject)
        found, sources = images_for(asked, measure, subjects, settings)
        count, batch = len(sources[0][0]), asked.batch or measure.batch
        workers = useful_workers(count, batch) if asked.workers is None else asked.workers
        counter = _Counter(progress, count * len(subjects))
        results: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        skipped: dict[str, str] = {}
        interrupted = False
        for subject, (source, labels) in zip(subjects, sources, strict=True):
            start = time.monotonic()
            how: dict[str, Any] = dict(batch=batch, workers=workers, strict=asked.strict, skipped=skipped)
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
    return Analysis(asked, measure, tuple(subjects), results, seconds, settings, found, skipped, how)


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
