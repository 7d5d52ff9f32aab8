"""Evaluation of dense runs: AP as COCO has it, or mIoU; result files, and images of what was found."""

import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..data.dense.loading import DenseDataset
from ..data.dense.pose_geometry import PoseCrops
from ..data.dense.resolve import DensePart, open_dense_part
from ..data.dense.transforms import DenseTransforms
from ..data.dense.view import DenseView, labels_are_quick, labels_of_images, without_labels
from ..data.loading import EvalOrder, close, default_workers, load
from ..dense.average_precision import to_results
from ..dense.scoring import Views, known_or_none, make_scorer, moved_keypoints, why_missing
from ..inspection.precision import remark
from ..provenance import header
from ..runs.dense_model import DenseModel, pixels_of
from ..runs.opening import open_asked
from ..training.dense import LARGEST, SCENES, crop_size
from ..visual.canvas import CaptionedImage
from ..visual.objects import draw_objects, draw_semantic, side_by_side
from .request import Request

Progress = Callable[[int, int | None, str], None]  # how many are done, of how many, and what is done now
Tell = Callable[[str], None]
SHOWN = 12  # images in a report
BATCH = 4  # images per call, unless asked for otherwise: they are large


@dataclass
class DenseEvaluation:
    """How good a dense model is."""

    run: DenseModel
    part: DensePart  # what it was asked about
    views: Views
    figures: dict[str, float | None] = field(default_factory=dict)  # in per cent; None where nothing is to be found
    per_class: list[dict[str, Any]] = field(default_factory=list)  # likewise
    coverage: tuple[int, int] = (0, 0)  # how many classes occur, over which means are taken, and how many there are
    results: list[dict[str, Any]] = field(default_factory=list)  # what was found, as COCO has it; none for pixels
    skipped: dict[str, str] = field(default_factory=dict)  # images that could not be read, and why
    latencies: list[float] = field(default_factory=list)  # seconds of each batch, per image
    shown: list[CaptionedImage] = field(default_factory=list)  # what was found beside the truth
    interrupted: bool = False
    command: str = ""  # how it was asked
    record: Mapping[str, Any] = field(default_factory=dict)  # of evaluation.json; `write_evaluation` adds it
    folder: Path | None = None  # where that is

    @property
    def title(self) -> str:
        return self.run.title

    @property
    def data(self) -> Mapping[str, Any]:
        return self.part.description

    @property
    def notes(self) -> tuple[str, ...]:
        return self.part.notes


def evaluate_dense(
    request: Request, progress: Progress = lambda done, total, doing: None, tell: Tell = lambda note: None
) -> DenseEvaluation:
    """Ask a dense run about labelled images; `tell` is given what the user should know before that begins."""
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    run = open_asked(request)
    part = _part_of(run, request)
    if labels_are_quick(part.images):  # classes that none of them shows, unless the run's own data says so
        shown, place = labels_of_images(part.images), str(part.description.get("place") or part.description.get("val"))
        known = {note.replace("validate on", "evaluate on") for note in part.notes}
        more = [note for note in without_labels(part.images, shown, "evaluate on", place) if note not in known]
        part = part._replace(notes=(*part.notes, *more))
    for note in filter(None, (*part.notes, remark(request.precision, run))):
        tell(note)
    return _score(run, part, request, progress)


def _part_of(run: DenseModel, request: Request) -> DensePart:
    """The images that are asked about."""
    if request.data is None:
        splits = run.own_data()
        part = DensePart(splits.val, splits.notes, {**splits.description, "part": "val", "images": len(splits.val)})
    else:
        options: dict[str, Any] = {name: getattr(run, name) for name in ("classes", "category_ids", "keypoint_names")}
        options |= dict(channels=run.channels, split=request.split, scenes_size=run.recipe.image_size or SCENES)
        seed, method = run.settings["seed"] if request.seed is None else request.seed, run.settings.get("hold_out", 1)
        task: Any = run.task
        part = open_dense_part(request.data, task, request.part, **options, seed=seed, method=method)
    if request.samples is None or request.samples >= len(part.images):
        return part
    drawn = np.random.default_rng(request.seed or 0).choice(len(part.images), request.samples, replace=False)
    images = DenseView(part.images, np.sort(drawn))
    return DensePart(images, part.notes, {**part.description, "images": len(images), "samples": request.samples})


def _score(run: DenseModel, part: DensePart, request: Request, progress: Progress) -> DenseEvaluation:
    """Figures of a run on images; an interruption leaves those of what was seen until then."""
    views = run.views(flip=request.flip, scales=request.scales, slide=request.slide)
    evaluation = DenseEvaluation(run, part, views, command=request.command)
    options: dict[str, Any] = {name: getattr(run, name) for name in ("top_down", "flip_pairs", "keypoint_offset")}
    scorer: Any = make_scorer(run.task, part.images, run.classes, **options, views=views, device=run.device, keep=True)
    source: Any = part.images
    transform = None if run.top_down else DenseTransforms(run.task, LARGEST).build(False)  # ty: ignore[invalid-argument-type]
    if run.top_down:
        source = PoseCrops(source, input_size=crop_size(run.recipe), training=False, pairs=run.flip_pairs)
    images, order = DenseDataset(source, transform, strict=request.strict), EvalOrder(source, request.batch or BATCH)
    workers = default_workers() if request.workers is None else request.workers
    loader = load(images, order, workers=workers, pin_memory=run.device.type == "cuda")
    done = 0
    progress(0, len(source), run.title)
    try:
        with torch.inference_mode(), run.autocast():
            for batch in loader:
                if batch.failure:
                    raise ValueError(batch.failure)
                evaluation.skipped.update(batch.skipped)
                if len(batch.images):
                    started = time.perf_counter()
                    done += scorer.add(run.model, batch)
                    evaluation.latencies.append((time.perf_counter() - started) / len(batch.images))
                progress(done, len(source), run.title)
    except KeyboardInterrupt:
        if not done:
            raise
        evaluation.interrupted = True
    finally:
        close(loader)
    if not done:
        raise ValueError(f"none of the {len(source)} images to evaluate on can be read; see what is wrong with them")
    evaluation.figures = known_or_none(scorer.compute())
    evaluation.per_class = [known_or_none(row) for row in scorer.metric.per_class()]
    evaluation.coverage = scorer.metric.coverage()
    with torch.inference_mode(), run.autocast():
        evaluation.shown = list(_shown(run, part.images, evaluation.skipped, scorer))
    if run.task != "segment" and not run.top_down:
        evaluation.results = scorer.results
    elif run.top_down:
        for index in range(len(scorer.dataset)):  # keypoints in the file's own coordinates
            found = moved_keypoints(scorer.predictions(index), -run.keypoint_offset)
            place = scorer.dataset.target(index)["image_id"]
            evaluation.results += to_results(place, found, scorer.dataset.category_ids)
    return evaluation


def _shown(run: DenseModel, images: Any, skipped: Container[str], scorer: Any) -> Iterator[CaptionedImage]:
    """Some of the images that could be read, truth beside what was found."""
    chosen = {round(place) for place in np.linspace(0, len(images) - 1, min(SHOWN, len(images))).tolist()}
    for index in sorted(place for place in chosen if images.name(place) not in skipped):
        image, target = images[index]
        found: Any
        if run.task == "segment":
            classes = found = scorer.find(run.model, pixels_of(image)).argmax(0).cpu()
            names = [run.classes[place] for place in classes.unique().tolist() if place < len(run.classes)]
        else:
            found = scorer.predictions(index) if run.top_down else scorer.find(run.model, [pixels_of(image)])[0]
            found = {key: value.cpu() for key, value in found.items()}
            names = [run.classes[label - 1] for label in found["labels"][found["scores"] >= 0.5].tolist()]
        words = f"truth beside what was found: {', '.join(names) or 'nothing'}"
        yield CaptionedImage(truth_and(run, image, target, found), images.name(index), words)


def truth_and(run: DenseModel, image: Image.Image, target: Any, found: Any) -> Image.Image:
    """An image twice: with what is there, and with what was found."""
    if run.task == "segment":
        drawn = [draw_semantic(image, classes, run.classes) for classes in (target, found)]
    else:
        options: dict[str, Any] = dict(skeleton=run.skeleton, keypoint_threshold=run.keypoint_threshold)
        options["threshold"] = 0.0 if run.top_down else 0.5  # boxes of a pose model are given, not found
        drawn = [draw_objects(image, objects, run.classes, **options) for objects in (target, found)]
    return side_by_side(dict(zip(("truth", "found"), drawn, strict=True)))


def record_of(evaluation: DenseEvaluation) -> dict[str, Any]:
    """What evaluation.json holds."""
    run, views, (occurring, classes) = evaluation.run, evaluation.views, evaluation.coverage
    missing = [name for name, value in evaluation.figures.items() if value is None]
    return {
        "task": run.task,
        "model": {name: getattr(run, name) for name in ("title", "source", "parameters", "precision")},
        "data": evaluation.part.description,
        "figures": evaluation.figures,
        "absent": {name: why_missing(name, occurring) for name in missing},
        "coverage": {"occurring": occurring, "classes": classes},
        "per_class": evaluation.per_class,
        "views": {"flip": views.flip, "scales": list(views.scales), "slide": views.slide, "size": views.short_side},
        "latency_ms": 1000 * median(evaluation.latencies) if evaluation.latencies else None,
        "skipped": evaluation.skipped,
        "interrupted": evaluation.interrupted,
        "notes": list(evaluation.part.notes),
        "device": run.device.type,
        "threads": torch.get_num_threads(),
        **header(evaluation.command),
    }
