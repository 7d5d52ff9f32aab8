"""Answers of models to one image, side by side, the time that each takes, and all of it as cards of HTML."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..benchmark.timing import Summary, summarize
from ..evaluation.run import times_in_turns
from ..prediction.dense import finder, in_words
from ..runs.classifier import Classifier
from ..visual import html
from ..visual.metrics import TASKS
from ..visual.objects import draw_objects, draw_semantic
from ..visual.plots import PALETTE
from .candidates import Candidate

TOP = 5
ROUNDS, SECONDS = 7, 2.0  # timed passes of each model; fewer if all together would take longer
THRESHOLD = 0.5
ROWS = 20  # objects that a table lists
OBJECTS, SHARES = ("class", "score", "x, y", "size"), ("class", "share of the image")


@dataclass(frozen=True)
class Answer:
    """The answer of one model: `top` of a classifier; `words`, `rows` and `drawn` of a dense run."""

    name: str
    task: str
    trained: bool
    latency: Summary  # milliseconds of one pass of the model, without reading and resizing the image
    rounds: int
    threads: int
    device: str
    top: tuple[tuple[str, float], ...] = ()  # the most probable classes and their probabilities, 0 to 1
    words: str = ""
    rows: tuple[tuple[str, ...], ...] = ()  # of objects class, score, box in pixels; or classes of pixels, their share
    drawn: Image.Image | None = None  # the image with all of it drawn in


def answer(asked: Sequence[Candidate], image: Image.Image, threshold: float = THRESHOLD) -> list[Answer]:
    """Ask models about an image in RGB, with times taken in turns afterwards; nothing else may compute meanwhile."""
    with torch.inference_mode():
        passes = [_pass_of(one, image) for one in asked]
        started = time.perf_counter()
        found = [run() for run in passes]
        took = time.perf_counter() - started
        rounds = max(1, min(ROUNDS, int(SECONDS / max(took, 1e-9))))
        samples = times_in_turns(passes, [one.run.device for one in asked], rounds)
    answers = []
    for one, result, times in zip(asked, found, samples, strict=True):
        how = summarize(times), rounds, torch.get_num_threads(), one.run.device.type
        top = dict(top=top_classes(one.run, result)) if one.classifies else None
        said: dict[str, Any] = top or _said(one.run, image, result, threshold)
        answers.append(Answer(one.name, one.run.task, one.trained, *how, **said))
    return answers


def image_of(classifier: Classifier, image: Image.Image) -> Tensor:
    """Turn an image in RGB into the model's input: normalised, (1, C, H, W), on its device."""
    shown = image.convert("L") if classifier.transforms.channels == 1 else image
    return classifier.normalise(torch.as_tensor(classifier.transforms.build(training=False)(shown))[None])


def top_classes(classifier: Any, logits: Tensor, top: int = TOP) -> tuple[tuple[str, float], ...]:
    """Names and probabilities of the most probable classes by logits (1, classes); of equals the first class."""
    order = logits[0].argsort(descending=True, stable=True)[:top].tolist()
    probabilities = logits[0].softmax(0).tolist()
    return tuple((classifier.classes[place], probabilities[place]) for place in order)


def _pass_of(one: Candidate, photo: Image.Image) -> Callable[[], Any]:
    run: Any = one.run
    if one.classifies:
        image = image_of(run, photo)
        return lambda: run.logits(image)
    find, shown = finder(run), photo.convert("L") if run.channels == 1 else photo
    return lambda: find(shown, None)


def _said(run: Any, image: Image.Image, found: Any, threshold: float) -> dict[str, Any]:
    """What a dense run found: in words, as rows of a table, and drawn."""
    rows: list[tuple[str, ...]] = []
    if run.task == "segment":
        shares = torch.bincount(found.flatten(), minlength=len(run.classes)).double() / found.numel()
        order = shares.argsort(descending=True, stable=True).tolist()
        rows += [(run.classes[i], f"{100 * shares[i]:.1f} %") for i in order if shares[i] > 0.0005]
        drawn = draw_semantic(image, found, run.classes)
    else:
        lowest = 0.0 if run.top_down else threshold  # boxes of a pose model are given, not found
        for place in (found["scores"] >= lowest).nonzero().flatten()[:ROWS].tolist():
            x0, y0, x1, y1 = (round(value) for value in found["boxes"][place].tolist())
            name = run.classes[int(found["labels"][place]) - 1]
            rows.append((name, f"{found['scores'][place]:.2f}", f"{x0}, {y0}", f"{x1 - x0} x {y1 - y0}"))
        options = dict(skeleton=run.skeleton, keypoint_threshold=run.keypoint_threshold)
        drawn = draw_objects(image, found, run.classes, threshold=lowest, **options)
    return dict(words=in_words(run, found, threshold), rows=tuple(rows[:ROWS]), drawn=drawn)


def cards(answers: Sequence[Answer], order: Sequence[str]) -> str:
    """Write all answers side by side; a model has the colour of its place in `order`, here and in the comparison."""
    shown = []
    for one in answers:
        columns = SHARES if one.task == "segment" else OBJECTS
        look = dict(task=TASKS[one.task], colour=colour_of(one.name, order), columns=columns)
        shown.append(vars(one) | look | dict(drawn=one.drawn and data_uri(one.drawn)))
    return html.render("app/cards", cards=shown)


def colour_of(name: str, order: Sequence[str]) -> str:
    """Colour of a model by its place in `order`; the first for a name that is not there."""
    return PALETTE[order.index(name) % len(PALETTE)] if name in order else PALETTE[0]


def hint(text: str) -> str:
    """Write a quiet line for a place where something will appear."""
    return html.render("app/hint", text=text)


def data_uri(image: Image.Image) -> str:
    """Encode an image, at most 900 pixels wide and high, inside the page itself: nothing of it is left on the disk."""
    small = image.copy()
    small.thumbnail((900, 900))
    return html.data_uri(small, "WEBP", quality=90)
