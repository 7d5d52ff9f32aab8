"""Answers of models to one image, side by side, and the time that each takes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..benchmark.timing import Summary, interleave, summarize
from ..evaluation.run import synchronise
from ..prediction.dense import finder, told
from ..runs.classifier import Classifier
from ..runs.dense_model import DenseModel
from ..visual.objects import draw_objects, draw_semantic
from .candidates import Candidate

TOP = 5
ROUNDS, SECONDS = 7, 2.0  # timed passes of each model: so many, or fewer if all together would take longer
THRESHOLD = 0.5
ROWS = 20  # objects that a table lists


@dataclass(frozen=True)
class Answer:
    """The answer of one model.

    Args:
        latency: Milliseconds of one pass of the model, without reading and resizing the image.
        rounds, threads, device: How that was measured.
        top: Of a classifier, its most probable classes and how probable they are, 0 to 1.
        words: Of a dense run, what it found, in words;
        rows: its objects: class, score, box in pixels as text; or classes of pixels and their share;
        drawn: the image with all of it drawn in.
    """

    name: str
    task: str
    trained: bool
    latency: Summary
    rounds: int
    threads: int
    device: str
    top: tuple[tuple[str, float], ...] = ()
    words: str = ""
    rows: tuple[tuple[str, ...], ...] = ()
    drawn: Image.Image | None = None


def answer(asked: Sequence[Candidate], image: Image.Image, threshold: float = THRESHOLD) -> list[Answer]:
    """Ask models about an image in RGB; times are taken in turns, after a first pass that gives the answers.

    Whoever calls sees to it that nothing else computes meanwhile.
    """
    with torch.inference_mode():
        passes = [_pass_of(one, image) for one in asked]
        started = time.perf_counter()
        found = [run() for run in passes]
        took = time.perf_counter() - started
        rounds = max(1, min(ROUNDS, int(SECONDS / max(took, 1e-9))))

        def timed(place: int, _: int) -> float:
            device = asked[place].device
            synchronise(device)
            start = time.perf_counter()
            passes[place]()
            synchronise(device)
            return 1e3 * (time.perf_counter() - start)

        samples = interleave(range(len(asked)), timed, rounds)
    return [
        _answer(one, image, result, summarize(times), rounds, threshold)
        for one, result, times in zip(asked, found, samples, strict=True)
    ]


def image_of(classifier: Classifier, image: Image.Image) -> Tensor:
    """Turn an image in RGB into the model's input: normalised, (1, C, H, W), on its device."""
    shown = image.convert("L") if classifier.transforms.channels == 1 else image
    pixels = torch.as_tensor(classifier.transforms.build(training=False)(shown))
    return classifier.normalise(pixels[None])


def _pass_of(one: Candidate, photo: Image.Image) -> Callable[[], Any]:
    if one.run is not None:
        find, shown = finder(one.run), photo.convert("L") if one.run.channels == 1 else photo
        return lambda: find(shown, None)
    classifier: Any = one.classifier
    image = image_of(classifier, photo)
    return lambda: classifier.logits(image)


def _answer(one: Candidate, image: Image.Image, found: Any, latency: Summary, rounds: int, threshold: float) -> Answer:
    options: dict[str, Any] = dict(threads=torch.get_num_threads(), device=one.device.type)
    if one.run is not None:
        options |= dict(words=told(one.run, found, threshold), rows=_rows(one.run, found, threshold))
        options["drawn"] = _drawn(one.run, image, found, threshold)
    else:
        options["top"] = top_classes(one.classifier, found)  # ty: ignore[invalid-argument-type]
    return Answer(one.name, one.task, one.trained, latency, rounds, **options)


def top_classes(classifier: Classifier, logits: Tensor, top: int = TOP) -> tuple[tuple[str, float], ...]:
    """Names and probabilities of the most probable classes by logits (1, classes); of equals the first class."""
    names = classifier.classes
    order = logits[0].argsort(descending=True, stable=True)[:top].tolist()
    probabilities = logits[0].softmax(0).tolist()
    return tuple((names[place], probabilities[place]) for place in order)


def _rows(run: DenseModel, found: Any, threshold: float) -> tuple[tuple[str, ...], ...]:
    if run.task == "segment":
        shares = torch.bincount(found.flatten(), minlength=len(run.classes)).double() / found.numel()
        order = shares.argsort(descending=True, stable=True).tolist()
        return tuple((run.classes[i], f"{100 * shares[i]:.1f} %") for i in order if shares[i] > 0.0005)[:ROWS]
    sure = (found["scores"] >= (0 if run.top_down else threshold)).nonzero().flatten()[:ROWS].tolist()
    rows = []
    for place in sure:
        x0, y0, x1, y1 = (round(value) for value in found["boxes"][place].tolist())
        name = run.classes[int(found["labels"][place]) - 1]
        rows.append((name, f"{found['scores'][place]:.2f}", f"{x0}, {y0}", f"{x1 - x0} x {y1 - y0}"))
    return tuple(rows)


def _drawn(run: DenseModel, image: Image.Image, found: Any, threshold: float) -> Image.Image:
    if run.task == "segment":
        return draw_semantic(image, found, run.classes)
    options: dict[str, Any] = dict(skeleton=run.skeleton, keypoint_threshold=run.keypoint_threshold)
    # boxes of a pose model are given, not found
    return draw_objects(image, found, run.classes, threshold=0.0 if run.top_down else threshold, **options)
