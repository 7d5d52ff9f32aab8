"""Evaluation of dense runs: AP as COCO has it, or mIoU; result files, and images of what was found."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..data.dense.loading import DenseDataset
from ..data.dense.pose_crops import PoseCrops
from ..data.dense.resolve import DensePart, open_dense_part
from ..data.dense.transforms import DenseTransforms
from ..data.dense.view import DenseView, labels_of_images, told_quickly, without_labels
from ..data.loading import EvalOrder, close, default_workers, load
from ..dense.average_precision import to_results
from ..dense.scoring import Views, known_or_none, make_scorer, moved_keypoints, why_missing
from ..provenance import header
from ..runs.dense_model import DenseModel, pixels_of
from ..runs.opening import open_asked
from ..training.dense import LARGEST, SCENES, crop_size
from ..visual.canvas import CaptionedImage
from ..visual.objects import draw_objects, draw_semantic, side_by_side
from .request import Request

SHOWN = 12  # images in a report
BATCH = 4  # images per call, unless asked for otherwise: they are large


@dataclass
class DenseEvaluation:
    """How good a dense model is.

    Args:
        run, part, views: What was asked, what about, and how.
        figures, per_class: In per cent; None where nothing is there to be found.
        coverage: How many classes occur, over which means are taken, and how many there are.
        results: What was found, as COCO has it; none for pixels.
        skipped: Images that could not be read, and why.
        latencies: Seconds of each batch, per image.
        shown: Images of what was found beside the truth.
        interrupted: Not all images were asked about.
        command: What records say of how it was asked.
        record, folder: What evaluation.json holds, and where it is; see `broadsight.report.run.write_evaluation`.
    """

    run: DenseModel
    part: DensePart
    views: Views
    figures: dict[str, float | None] = field(default_factory=dict)
    per_class: list[dict[str, Any]] = field(default_factory=list)
    coverage: tuple[int, int] = (0, 0)
    results: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    shown: list[CaptionedImage] = field(default_factory=list)
    interrupted: bool = False
    command: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def title(self) -> str:
        return self.run.title

    @property
    def data(self) -> Mapping[str, Any]:
        """What the images are."""
        return self.part.description

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""
        return self.part.notes


def evaluate_dense(
    request: Request,
    progress: Callable[[int, int, str], None] = lambda done, total, doing: None,
    tell: Callable[[str], None] = lambda note: None,
) -> DenseEvaluation:
    """Ask a dense run about labelled images; `tell` is given what the user should know before that begins."""
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    run = open_asked(request)
    part = labelled(find_part(run, request))
    for note in part.notes:
        tell(note)
    views = run.views(flip=request.flip, scales=request.scales, slide=request.slide)
    return score(run, part, views, request, progress)


def find_part(run: DenseModel, request: Request) -> DensePart:
    """The images that are asked about."""
    if request.data is None:
        splits = run.own_data()
        part = DensePart(splits.val, splits.notes, {**splits.description, "part": "val", "images": len(splits.val)})
    else:
        part = open_dense_part(
            request.data,
            run.task,  # ty: ignore[invalid-argument-type]
            request.part,
            classes=run.classes,
            category_ids=run.category_ids,
            keypoint_names=run.keypoint_names,
            split=request.split,
            seed=run.settings["seed"] if request.seed is None else request.seed,
            channels=run.channels,
            scenes_size=run.recipe.image_size or SCENES,
            method=run.settings.get("hold_out", 1),
        )
    if request.samples is None or request.samples >= len(part.images):
        return part
    drawn = np.random.default_rng(request.seed or 0).choice(len(part.images), request.samples, replace=False)
    images = DenseView(part.images, np.sort(drawn))
    return DensePart(images, part.notes, {**part.description, "images": len(images), "samples": request.samples})


def labelled(part: DensePart) -> DensePart:
    """The same images, with notes on classes that none of them shows; a ValueError if there is no label at all."""
    if not told_quickly(part.images):
        return part
    about = part.description
    shown, place = labels_of_images(part.images), str(about.get("place") or about.get("val"))
    told = {note.replace("validate on", "evaluate on") for note in part.notes}  # by the run's own data
    more = [note for note in without_labels(part.images, shown, "evaluate on", place) if note not in told]
    return replace(part, notes=(*part.notes, *more))


def score(
    run: DenseModel, part: DensePart, views: Views, request: Request, progress: Callable[[int, int, str], None]
) -> DenseEvaluation:
    """Figures of a run on images; an interruption leaves those of what was seen until then."""
    evaluation = DenseEvaluation(run, part, views, command=request.command)
    scorer = make_scorer(
        run.task,
        part.images,
        run.classes,
        top_down=run.top_down,
        flip_pairs=run.flip_pairs,
        keypoint_offset=run.keypoint_offset,
        views=views,
        device=run.device,
        keep=True,
    )
    if run.top_down:
        source: Any = PoseCrops(part.images, input_size=crop_size(run.recipe), training=False, pairs=run.flip_pairs)
        transform = None
    else:
        source, transform = part.images, DenseTransforms(run.task, LARGEST).build(False)  # ty: ignore[invalid-argument-type]
    images = DenseDataset(source, transform, strict=request.strict)
    workers = default_workers() if request.workers is None else request.workers
    loader = load(
        images, EvalOrder(source, request.batch or BATCH), workers=workers, pin_memory=run.device.type == "cuda"
    )
    done = 0
    progress(0, len(source), run.title)
    try:
        with torch.inference_mode():
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
    evaluation.per_class = [known_or_none(row) for row in scorer.per_class()]
    evaluation.coverage = scorer.coverage()
    _look(evaluation, scorer)
    return evaluation


def _look(evaluation: DenseEvaluation, scorer: Any) -> None:
    """Draw some images, truth beside prediction, and keep all results of objects."""
    run, images = evaluation.run, evaluation.part.images
    chosen = {round(place) for place in np.linspace(0, len(images) - 1, min(SHOWN, len(images))).tolist()}
    with torch.inference_mode():
        for index in sorted(chosen):
            if images.name(index) in evaluation.skipped:
                continue
            image, target = images[index]
            found = found_in(run, scorer, image, index)
            evaluation.shown.append(
                CaptionedImage(truth_and(run, image, target, found), images.name(index), _told(run, found))
            )
    if run.task != "segment":
        evaluation.results = results_of(run, scorer)


def found_in(run: DenseModel, scorer: Any, image: Image.Image, index: int) -> Any:
    """What a model says of an image of the evaluated ones."""
    if run.top_down:
        return scorer.predictions(index)
    pixels = pixels_of(image)
    if run.task == "segment":
        return scorer.find(run.model, pixels).argmax(0).cpu()
    return {key: value.cpu() for key, value in scorer.find(run.model, [pixels])[0].items()}


def truth_and(run: DenseModel, image: Image.Image, target: Any, found: Any) -> Image.Image:
    """An image twice: with what is there, and with what was found."""
    if run.task == "segment":
        drawn = [draw_semantic(image, classes, run.classes) for classes in (target, found)]
    else:
        options: dict[str, Any] = dict(skeleton=run.skeleton, keypoint_threshold=run.keypoint_threshold)
        options["threshold"] = 0.0 if run.top_down else 0.5  # boxes of a pose model are given, not found
        drawn = [draw_objects(image, objects, run.classes, **options) for objects in (target, found)]
    return side_by_side(dict(zip(("truth", "found"), drawn, strict=True)))


def _told(run: DenseModel, found: Any) -> str:
    if run.task == "segment":
        names = [run.classes[int(index)] for index in found.unique() if int(index) < len(run.classes)]
        return f"truth beside what was found: {', '.join(names)}"
    sure = found["labels"][found["scores"] >= 0.5].tolist()
    return f"truth beside what was found: {', '.join(run.classes[label - 1] for label in sure) or 'nothing'}"


def results_of(run: DenseModel, scorer: Any) -> list[dict[str, Any]]:
    """Everything that was found, as COCO's results have it; keypoints in the file's own coordinates."""
    if run.top_down:
        entries = []
        for index in range(len(scorer.dataset)):
            found = moved_keypoints(scorer.predictions(index), -run.keypoint_offset)
            image_id = scorer.dataset.target(index)["image_id"]
            entries += to_results(image_id, found, scorer.dataset.category_ids)
        return entries
    return scorer.results


def record_of(evaluation: DenseEvaluation) -> dict[str, Any]:
    """What evaluation.json holds."""
    run, views = evaluation.run, evaluation.views
    return {
        "task": run.task,
        "model": {"title": run.title, "source": str(run.path), "parameters": run.parameters},
        "data": evaluation.part.description,
        "figures": evaluation.figures,
        "absent": {
            name: why_missing(name, evaluation.coverage[0])
            for name, value in evaluation.figures.items()
            if value is None
        },
        "coverage": {"occurring": evaluation.coverage[0], "classes": evaluation.coverage[1]},
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
