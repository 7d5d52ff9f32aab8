"""Runs a measure over models that all see the same images, a batch at a time; and fronts of accuracy over cost."""

import inspect
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
from ..evaluation.classification import figures
from ..evaluation.run import ask
from ..evaluation.run import measure as costs_of
from ..evaluation.tasks import Task
from ..options import TIMM_NAMES
from ..prediction.classification import useful_workers
from ..runs.classifier import Classifier
from .front_points import Point, competitor_points, find_tables, paper_points, point_of, read_points
from .images import Batches, images_for
from .measures import MEASURES, Measure, check_suits, find_measure
from .measures.base import taken
from .request import SHOWN, Request
from .subjects import RANDOM, Subject, open_subjects

Progress = Callable[[int, int | None, str], None]
NAMED = 5  # images that could not be read, in a note; the record has all


@dataclass(frozen=True)
class Analysis:
    """What was measured."""

    request: Request
    measure: Measure
    subjects: tuple[Subject, ...]
    results: dict[str, Any]  # by the labels of the models; of a front by the costs
    seconds: dict[str, float]  # by the labels of the models
    settings: dict[str, Any]  # of the measure, all of them
    found: Found
    skipped: dict[str, str]  # images that could not be read, and why
    how: dict[str, Any]  # in what way it was done, as plain types
    record: Mapping[str, Any] = field(default_factory=dict)  # what analysis.json holds, once it is written
    folder: Path | None = None  # where that is

    @property
    def interrupted(self) -> bool:
        return self.how["interrupted"]

    @property
    def notes(self) -> tuple[str, ...]:
        return self.found.notes


def analyze(request: Request, progress: Progress = lambda done, total, doing: None) -> Analysis:
    """Measure all models; everything is checked before the first image passes one.

    An interrupt ends it early: the models that are done count, if there is any.
    """
    _check_order(request)
    measure = find_measure(str(request.measure))
    named = [one for one in request.models if isinstance(one, str)]
    written = [one for one in named if measure.takes == "files" and Path(one).is_file()]
    timm_names = [one for one in named if one not in written and not Path(one).is_dir()]
    shown = measure.takes != "files" or request.data is not None or bool(timm_names)
    found = "front reads what training and eval have found; give --data to ask again"
    brings = f"{' '.join(named[:3])} brings weights and arguments of its own"
    request.refuse_ignored({SHOWN: None if shown else found, TIMM_NAMES: None if timm_names or not named else brings})
    with outside_allowed(request.allow_outside):
        return (analyze_front if measure.takes == "files" else analyze_models)(request, measure, progress)


def _check_order(request: Request) -> None:
    """Whoever names a model first is told that the measure comes first."""
    if (measure := request.measure) is None:
        raise UsageError(f"analyze needs MEASURE: one of {', '.join(MEASURES)}")
    if measure in MEASURES or nearest(measure, MEASURES, alike=0.7):
        return
    named = [one for one in request.models if one in MEASURES]
    if named or Path(measure).is_dir() or timm.is_model(measure.partition("@")[0].partition(".")[0]):
        right = f"broadsight analyze {named[0] if named else 'MEASURE'} {measure}; measures are {', '.join(MEASURES)}"
        raise UsageError(f"{measure} is a model, the measure comes first: {right}")


def analyze_models(request: Request, measure: Measure, progress: Progress) -> Analysis:
    """Run a measure over models that it is shown images of; see `analyze`."""
    started = time.monotonic()
    settings = measure.settings(request.set)
    if not request.models:
        raise ValueError(f"analyze {measure.name} needs MODEL|RUN: folders of runs, or timm names")
    if "seed" in inspect.signature(measure.run).parameters:
        settings["seed"] = request.seed or 0
    results: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    skipped: dict[str, str] = {}
    notes: list[str] = []
    with fixed_threads(threads := request.used_threads):
        subjects = open_subjects(request)
        for subject in subjects:
            check_suits(measure, subject.model, subject.source, dense=subject.dense is not None)
        found, sources = images_for(request, measure, subjects, settings)
        count, loading = len(sources[0][0]), _loading(request, measure, sources[0][0])
        for number, (subject, (source, labels)) in enumerate(zip(subjects, sources, strict=True)):

            def seen(done: int, before: int = number * count, label: str = subject.label) -> None:
                progress(min(before + done, count * len(subjects)), count * len(subjects), label)

            seen(0)
            start = time.monotonic()
            images = Batches(subject, source, labels=labels, strict=request.strict, skipped=skipped, **loading)
            try:
                results[subject.label] = _measured(measure, images, measure.of_run(settings), seen)
            except KeyboardInterrupt:
                if not results:
                    raise
                notes = [f"interrupted: {some([one.label for one in subjects[number:]])} left out"]
                break
            seconds[subject.label] = time.monotonic() - start
    how: dict[str, Any] = dict(batch=loading["batch"], threads=threads, workers=loading["workers"])
    how |= dict(device=subjects[0].normalise.device.type, seconds=time.monotonic() - started, interrupted=bool(notes))
    found = _noted(found, skipped, subjects, [*notes, *measure.notes(results)])
    return Analysis(request, measure, tuple(subjects), results, seconds, settings, found, skipped, how)


def _measured(measure: Measure, images: Batches, settings: Mapping[str, Any], seen: Callable[[int], None]) -> Any:
    subject, source = images.subject, images.source
    options = dict(batch_size=images.batch, seen=seen, **settings) | taken(measure.run, {"series": subject.series})
    try:
        if measure.takes == "classifier":
            result = measure.run(subject.classifier, source, workers=images.workers, strict=images.strict, **options)
            images.skipped.update(getattr(result, "skipped", {}))
            return result
        result = measure.run(subject.model, images, **options)
    except ValueError as error:
        raise ValueError(f"{subject.label}: {error}") from None
    left = len(source) - len(images.skipped)
    if left < measure.least:
        needs = f"{measure.name} needs {measure.least} or more; unreadable: {some(list(images.skipped))}"
        raise ValueError(f"{left} of {len(source)} images can be read, {needs}")
    return result


def _loading(request: Request, measure: Measure, source: Source) -> dict[str, int]:
    batch = request.batch or measure.batch
    workers = useful_workers(len(source), batch) if request.workers is None else request.workers
    return dict(batch=batch, workers=workers)


def _noted(found: Found, skipped: Mapping[str, str], subjects: Sequence[Subject], more: Sequence[str]) -> Found:
    """What was found, with notes on images that could not be read, on random weights and more."""
    notes = list(found.notes)
    if skipped:
        shown = [f"{name} ({reason})" for name, reason in skipped.items()]
        count = f"{len(skipped):,} image{'s' if len(skipped) > 1 else ''}"
        notes.append(f"{count} could not be read and left out: {some(shown, NAMED)}")
    if untrained := list(dict.fromkeys(one.source for one in subjects if one.weights == RANDOM)):
        notes.append(f"{some(untrained)}: random weights, so the figures say nothing about a trained model")
    return replace(found, notes=tuple(dict.fromkeys([*notes, *more])))


def analyze_front(request: Request, measure: Measure, progress: Progress) -> Analysis:
    """Accuracy over latency, MACs and parameters, also of models in files of `eval` or `bench --json`.

    Runs count with the accuracy of their training; with data, or beside timm names, all see the same images.
    """
    started = time.monotonic()
    settings = measure.settings(request.set)
    tables = find_tables(settings["competitors"], settings["x"])
    if not request.models and not settings["paper"] and not tables:
        wanted = "runs, timm names, what eval or bench --json wrote; or --set paper='mat_*' or competitors=mat"
        raise ValueError(f"analyze front needs MODEL|RUN: {wanted}")
    named = {one: Path(one) for one in request.models if isinstance(one, str)}
    read = [one for one, path in named.items() if path.is_file() or (path / "evaluation.json").is_file()]
    skipped: dict[str, str] = {}
    found = Found((), "", (), dict(kind="files", data=", ".join([*read, *tables])))  # ty: ignore[invalid-argument-type]
    with fixed_threads(threads := request.used_threads):
        subjects = open_subjects(replace(request, models=tuple(one for one in request.models if one not in read)))
        classifiers = [_classifier(subject) for subject in subjects]
        accuracies: dict[str, float] = {}
        if request.data is not None or any(one.weights != "run" for one in subjects):
            if request.data is None and not any(one.own_data for one in subjects):
                more = "or give runs, folders that eval wrote and files of bench --json"
                why = "labelled images to find its accuracy with"
                raise ValueError(f"front of {subjects[0].source} needs --data, {why}; {more}")
            found, accuracies = _accuracies(request, measure, subjects, progress, skipped)
        costs = costs_of(classifiers) if classifiers else []
    device = classifiers[0].device.type if classifiers else None
    how: dict[str, Any] = dict(threads=threads, device=device, interrupted=False)
    data = ", ".join(str(found.description[key]) for key in ("data", "part") if found.description.get(key))
    published: list[dict[str, Any]] = []
    if settings["paper"]:
        from ..papers.verify import catalogue

        published = catalogue(settings["paper"], progress)
        if not published:
            raise ValueError(f"paper={settings['paper']}: none of our models has such a name; try 'mat_*'")

    def points(axis: str) -> list[Point]:
        known = [point for name in read for point in read_points(name, axis)]
        for subject, classifier, cost in zip(subjects, classifiers, costs, strict=True):
            about = dict(parameters=classifier.parameters, macs=cost["macs"], latency_ms=cost["latency"])
            about["input_size"] = (subject.transforms.channels, *[subject.transforms.size] * 2)
            label, timed = subject.label, f"{device}, {threads} threads, batch 1"
            if label in accuracies:
                known.append(point_of(label, about, axis, accuracies[label], data, timed))
            else:
                known += read_points(subject.source, axis, about | dict(title=label, conditions=timed))
        return known + paper_points(published, axis) + competitor_points(tables.values(), axis)

    results = measure.run(points, **measure.of_run(settings))
    found = _noted(found, skipped, subjects, measure.notes(results))
    how["seconds"] = time.monotonic() - started
    return Analysis(request, measure, tuple(subjects), results, {}, settings, found, skipped, how)


def _classifier(subject: Subject) -> Classifier:
    if subject.classifier is None:
        raise ValueError(f"{subject.source} is a dense run; fronts are of classifiers, by their top-1")
    return subject.classifier


def _accuracies(
    request: Request, measure: Measure, subjects: Sequence[Subject], progress: Progress, skipped: dict[str, str]
) -> tuple[Found, dict[str, float]]:
    """Top-1 of each model, in per cent, on the same images."""
    found, sources = images_for(request, measure, subjects, {})
    count, loading = len(sources[0][0]), _loading(request, measure, sources[0][0])
    accuracies, done = {}, 0
    for subject, (source, _) in zip(subjects, sources, strict=True):

        def seen(images: int, doing: str) -> None:
            nonlocal done
            done += images
            progress(done, count * len(subjects), doing)

        task = Task(_classifier(subject), source, tuple(source.classes))
        said = ask(task, **loading, strict=request.strict, seen=seen)
        skipped.update(said.skipped)
        accuracies[subject.label] = figures(said, ("top1",))[0]["top1"]
    return found, accuracies
