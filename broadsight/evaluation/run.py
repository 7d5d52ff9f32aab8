"""Asks classifiers about images, as they are and under harder conditions, and works out the figures."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..benchmark.machine import fixed_threads, synchronize
from ..benchmark.timing import Summary, interleave, summarize
from ..data.inside import outside_allowed
from ..data.loading import EvalOrder, SourceDataset, close, default_workers, load
from ..data.sources.evaluation import Found
from ..data.view import labels_of
from ..inspection.macs import executed_macs
from ..inspection.precision import remark
from ..runs.classifier import Classifier
from ..runs.opening import is_dense
from .classification import NotEnough, accepted_accuracy, figures, shortage
from .dense import DenseEvaluation, Progress, Tell, evaluate_dense
from .predictions import Predictions, collect
from .request import Request
from .robustness import Suite, run_suite
from .saliency import Saliency, from_name
from .tasks import Task, check, choices_of, facts_of_evaluation, open_classifiers, open_tasks, suites_of

BATCH = 64  # images per call, unless asked for otherwise


@dataclass(frozen=True)
class Result:
    """What one classifier said of the images."""

    task: Task
    predictions: Predictions
    figures: dict[str, float]  # those of METRICS, and real_top1 where several answers are right
    absent: dict[str, str]  # why others have no value
    suites: tuple[Suite, ...] = ()  # the same under harder conditions
    # Of each ImageNet set, where DATA holds several: title, classes that compete, images, top-1 in per cent
    sets: tuple[tuple[str, int, int, float | None], ...] = ()
    macs: int | None = None  # of one image, if they can be counted
    latency: Summary | None = None  # milliseconds of one image


@dataclass(frozen=True)
class Evaluation:
    """Results of all classifiers, the one asked for first; the images; and how it was done."""

    request: Request
    results: tuple[Result, ...]
    found: Found
    how: dict[str, Any]
    record: Mapping[str, Any] = field(default_factory=dict)  # of evaluation.json; `write_evaluation` adds it
    folder: Path | None = None  # where that is

    @property
    def title(self) -> str:
        return self.results[0].task.classifier.title

    @property
    def data(self) -> Mapping[str, Any]:
        return self.found.description

    @property
    def figures(self) -> dict[str, float]:
        return self.results[0].figures

    @property
    def notes(self) -> tuple[str, ...]:
        return self.found.notes

    @property
    def interrupted(self) -> bool:
        return self.how["interrupted"]


def evaluate(
    request: Request, progress: Progress = lambda done, total, doing: None, tell: Tell = lambda note: None
) -> Evaluation | DenseEvaluation:
    """Ask a run, and classifiers beside it, about all images; all is checked before. `tell` gets notes on that."""
    request.refuse_ignored(facts_of_evaluation(request))
    check(request)
    with outside_allowed(request.allow_outside):
        ask_all = evaluate_dense if is_dense(request.run) else evaluate_classifiers
        return ask_all(request, progress, tell)


def evaluate_classifiers(request: Request, progress: Progress, tell: Tell) -> Evaluation:
    """Ask classifiers alone; `evaluate` says what the arguments are."""
    started = time.monotonic()
    workers = default_workers() if request.workers is None else request.workers
    batch, choices, suites = request.batch or BATCH, choices_of(request), suites_of(request)
    with fixed_threads(threads := request.used_threads):
        classifiers = open_classifiers(request)
        remarks = [remark(request.precision, one) for one in classifiers]
        found, groups = open_tasks(request, classifiers)
        tasks = groups[0]
        for task in tasks:
            present = len(np.unique(labels_of(task.source)))
            for name in request.metrics:  # too few images for a figure are refused before any is asked about
                if why := shortage(name, len(task.source), _competing(task), present, request.bins):
                    raise NotEnough(f"{name} {why}")
            if task.accepted is not None and not any(task.accepted.values()):
                raise NotEnough(f"none of the {len(task.source):,} images of {found.place} has an accepted label")
        for note in filter(None, (*found.notes, *remarks)):
            tell(note)
        saliencies: list[Saliency | None] = [None] * len(tasks)
        if "salient" in suites:  # made before anything is asked, since they may be refused
            name, file = request.saliency, request.dino_checkpoint
            saliencies = [from_name(name, x.classifier, x.source, kept=x.kept, checkpoint=file) for x in tasks]
        total, done = sum(len(task.source) for group in groups for task in group), 0
        total += sum(len(task.source) * len(choices.cases(name)) for task in tasks for name in suites)

        def seen(count: int, doing: str) -> None:
            nonlocal done
            done += count
            progress(done, total, doing)

        said = [[ask(task, batch, workers, request.strict, seen) for task in group] for group in groups]
        results = []
        for place, (task, predictions) in enumerate(zip(tasks, said[0], strict=True)):
            values, absent = figures(predictions, request.metrics or None, request.bins)
            real, why = _real_top1(task, predictions)
            sets = tuple(_set_row(group[place], answers[place]) for group, answers in zip(groups, said, strict=True))
            sets = sets if len(sets) > 1 else ()
            results.append(Result(task, predictions, {**real, **values}, {**why, **absent}, sets=sets))
        with suppress(KeyboardInterrupt):  # the suites that were finished may have taken hours
            for place, (task, saliency) in enumerate(zip(tasks, saliencies, strict=True)):
                options: dict[str, Any] = dict(choices=choices, saliency=saliency, kept=task.kept, seen=seen)
                options |= dict(batch=batch, workers=workers, seed=request.seed or 0, strict=request.strict)
                for name in suites:
                    came = run_suite(name, task.classifier, task.source, **options)
                    results[place] = replace(results[place], suites=(*results[place].suites, came))
        stopped = len(results[-1].suites) < len(suites)
        measured = measure(classifiers, request.latency and not stopped)
    results = [replace(result, **more) for result, more in zip(results, measured, strict=True)]
    if stopped:
        note = "interrupted: suites that were not finished are missing, and no times were taken"
        found = replace(found, notes=(*found.notes, note))
    how: dict[str, Any] = dict(batch=batch, threads=threads, workers=workers, device=classifiers[0].device.type)
    how |= dict(seconds=time.monotonic() - started, interrupted=stopped)
    return Evaluation(request, tuple(results), found, how)


def _competing(task: Task) -> int:
    return task.classifier.num_classes if task.kept is None else len(task.kept)


def ask(
    task: Task, batch: int, workers: int, strict: bool = False, seen: Callable[[int, str], None] = lambda n, doing: None
) -> Predictions:
    """What the classifier says of every image of a task."""
    one = task.classifier
    images = SourceDataset(task.source, one.transforms.build(False), strict=strict)
    loader = load(images, EvalOrder(task.source, batch), workers=workers)
    try:
        return collect(one, loader, count=len(images), kept=task.kept, seen=lambda count: seen(count, one.title))
    finally:
        close(loader)


def _real_top1(task: Task, said: Predictions) -> tuple[dict[str, float], dict[str, str]]:
    """The share of answers that are among the accepted ones where there are some; and why it has no value."""
    try:
        return ({} if task.accepted is None else {"real_top1": accepted_accuracy(said, task.accepted)[0]}), {}
    except NotEnough as error:  # those that have some could not be read
        return {}, {"real_top1": str(error)}


def _set_row(task: Task, said: Predictions) -> tuple[str, int, int, float | None]:
    if task.accepted is not None and task.title.endswith("ReaL"):
        judged = sum(bool(task.accepted.get(int(row))) for row in said.rows)
        return task.title, _competing(task), judged, _real_top1(task, said)[0].get("real_top1")
    return task.title, _competing(task), len(said), 100 * float((said.ranks == 0).mean())


def measure(classifiers: Sequence[Classifier], latency: bool = True) -> list[dict[str, Any]]:
    """MACs and, if asked for, latency of each, taken in turns; both of one image as it is evaluated."""
    times = latencies(classifiers) if latency else [None] * len(classifiers)
    return [dict(macs=macs_of(one), latency=time_) for one, time_ in zip(classifiers, times, strict=True)]


def macs_of(classifier: Classifier) -> int | None:
    """Multiply-accumulates of one image, or None for a model that they cannot be counted of."""
    size, channels = classifier.transforms.size, classifier.transforms.channels
    try:
        return executed_macs(classifier.model, (size, size), channels)
    except Exception:  # whatever a foreign model does; the figure is a courtesy
        return None


def latencies(classifiers: Sequence[Classifier], rounds: int = 15) -> list[Summary]:
    """Milliseconds that each takes for one image, in turns, after a warm-up."""
    calls = []
    for one in classifiers:
        size = one.transforms.size
        image = one.normalise(torch.zeros((1, one.transforms.channels, size, size), dtype=torch.uint8))
        calls.append(partial(one.model, image))
    devices = [one.device for one in classifiers]
    with torch.inference_mode():
        times_in_turns(calls, devices, 3)
        return [summarize(samples) for samples in times_in_turns(calls, devices, rounds)]


def times_in_turns(calls: Sequence[Callable[[], Any]], devices: Sequence[Any], rounds: int) -> list[list[float]]:
    """Milliseconds of each round of each call, whose device is waited for."""

    def timed(place: int, _: int) -> float:
        synchronize(str(devices[place]))
        start = time.perf_counter()
        calls[place]()
        synchronize(str(devices[place]))
        return 1e3 * (time.perf_counter() - start)

    return interleave(range(len(calls)), timed, rounds)
