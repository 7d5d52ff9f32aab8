"""Fronts of accuracy over cost, of models that are evaluated and timed here and of files of other commands."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..benchmark.run import fixed_threads
from ..data.sources.evaluation import Found
from ..evaluation.classification import figures
from ..evaluation.run import ask, measure
from ..evaluation.tasks import Task
from ..prediction.classification import useful_workers
from ..runs.classifier import Classifier
from .front_points import Point, paper_points, point_of, read_points
from .images import images_for
from .measures import find_measure
from .request import Request
from .run import Analysis, Progress, random_notes, skip_notes
from .subjects import Subject, open_subjects

WRITTEN = "evaluation.json"


def analyze_front(request: Request, progress: Progress = lambda done, total, doing: None) -> Analysis:
    """Accuracy over latency, MACs and parameters.

    Args:
        request: Its models may be files of `eval` or `bench --json` too. Runs count with the accuracy of their
            training; with data, or beside timm names, all models are evaluated on the same images.
    """
    started = time.monotonic()
    entry = find_measure("front")
    settings = entry.settings(request.set)
    if not request.models and not settings["paper"]:
        raise ValueError(
            "analyze front needs MODEL|RUN: runs, timm names, what eval or bench --json wrote; or --set paper='mat_*'"
        )
    read = [name for name in request.models if isinstance(name, str) and _is_written(name)]
    names = [name for name in request.models if name not in read]
    threads = request.threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1
    skipped: dict[str, str] = {}
    found = Found((), "", (), dict(kind="files", data=", ".join(read)))  # ty: ignore[invalid-argument-type]
    with fixed_threads(threads):
        subjects = open_subjects(replace(request, models=tuple(names)))
        classifiers = [_classifier(subject) for subject in subjects]
        accuracies: dict[str, float] = {}
        if request.data is not None or any(one.weights != "run" for one in subjects):
            if request.data is None and not any(one.own_data for one in subjects):
                raise ValueError(
                    f"front of {subjects[0].source} needs --data, labelled images to find its accuracy with; or give "
                    "runs, folders that eval wrote and files of bench --json"
                )
            found, accuracies = _accuracies(request, subjects, classifiers, progress, skipped)
        figures_of = measure(classifiers) if classifiers else []
    costs = {
        subject.label: dict(parameters=classifier.parameters, macs=one["macs"], latency_ms=one["latency"])
        for subject, classifier, one in zip(subjects, classifiers, figures_of, strict=True)
    }
    published = _published(settings["paper"], progress)
    device = classifiers[0].device.type if classifiers else None
    how: dict[str, Any] = dict(threads=threads, device=device, interrupted=False)

    def points(axis: str) -> list[Point]:
        known = [point for name in read for point in read_points(name, axis)]
        for subject in subjects:
            label, how_timed = subject.label, f"{device}, {threads} threads, batch 1"
            about = costs[label] | dict(title=label, conditions=how_timed)
            if label in accuracies:
                known.append(point_of(label, about, axis, accuracies[label], _called(found), how_timed))
            else:
                known += read_points(subject.source, axis, lambda _, about=about: about)
        return known + paper_points(published, axis)

    results = entry.run(points, **entry.of_run(settings))
    notes = [*found.notes, *skip_notes(skipped), *random_notes(subjects)]
    notes += [note for one in results.values() for note in one.notes]
    found = replace(found, notes=tuple(dict.fromkeys(notes)))
    how["seconds"] = time.monotonic() - started
    return Analysis(request, entry, tuple(subjects), results, {}, settings, found, skipped, how)


def _is_written(name: str) -> bool:
    """Whether it is a file or folder of another command, and not a model."""
    path = Path(name)
    return path.is_file() or (path / WRITTEN).is_file()


def _classifier(subject: Subject) -> Classifier:
    if subject.classifier is None:
        raise ValueError(f"{subject.source} is a dense run; fronts are of classifiers, by their top-1")
    return subject.classifier


def _accuracies(
    request: Request,
    subjects: Sequence[Subject],
    classifiers: Sequence[Classifier],
    progress: Progress,
    skipped: dict[str, str],
) -> tuple[Found, dict[str, float]]:
    """Top-1 of each model, in per cent, on the same images."""
    entry = find_measure("front")
    found, sources = images_for(request, entry, subjects, {})
    count, batch = len(sources[0][0]), request.batch or entry.batch
    workers = useful_workers(count, batch) if request.workers is None else request.workers
    accuracies, done = {}, 0
    for subject, classifier, (source, _) in zip(subjects, classifiers, sources, strict=True):

        def seen(images: int, doing: str) -> None:
            nonlocal done
            done += images
            progress(done, count * len(subjects), doing)

        said = ask(Task(classifier, source, tuple(source.classes)), batch, workers, request.strict, seen)
        skipped.update(said.skipped)
        accuracies[subject.label] = figures(said, ("top1",))[0]["top1"]
    return found, accuracies


def _called(found: Found) -> str:
    about = found.description
    return ", ".join(str(about[key]) for key in ("data", "part") if about.get(key))


def _published(pattern: str, progress: Progress) -> list[dict[str, Any]]:
    """Published figures of our models whose names match."""
    if not pattern:
        return []
    from ..papers.verify import catalogue

    rows = catalogue(pattern, progress)
    if not rows:
        raise ValueError(f"paper={pattern}: none of our models has such a name; try 'mat_*'")
    return rows
