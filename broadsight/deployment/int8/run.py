"""From a float artefact to one in int8: what it is calibrated on, what it loses, and which layers stay in float."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...benchmark.runtimes import file_bytes
from ...data.loading import EvalOrder, SourceDataset, load
from ...data.sources.sample_table import some
from ...evaluation.predictions import collect
from ...evaluation.tasks import Task
from ...files import move_together
from ...runs.classifier import Classifier
from ..formats import of_file
from ..request import Request
from ..run import Progress, Quantise, failing
from ..session import Description, Session
from .calibration import NormalisedImages, read_images, sources_of
from .layers import matching, moved

RANKED = 32  # images by which layers are put in order
BATCH = 16
KEPT_IN_MEMORY = 2**29  # bytes of decoded images; more are decoded again each time
SHOWN = 20  # layers that the terminal names


@dataclass(frozen=True)
class Answers:
    """What a session says of the images."""

    predicted: np.ndarray  # (N,) the first class of each
    top1: float | None  # per cent that are right; None without labels


@dataclass(frozen=True)
class Attempt:
    """A file in int8."""

    path: Path
    kept: tuple[str, ...]  # names of the layers in float
    answers: Answers
    lost: float  # points of accuracy; without labels, per cent of images with another first class


Measure = Callable[[Session, str], Answers]  # a session, and what it is called while progress is shown


def quantiser(classifier: Classifier, title: str, request: Request, progress: Progress = lambda *_: None) -> Quantise:
    """What `deployment.run.export` quantises with. Images are found and read here, before anything slow begins."""
    kept, max_drop, threads = request.keep_float, request.max_drop, request.threads
    sources = sources_of(classifier, request.data, request.calibrate, request.calibration_images)
    progress(0, None, "reading images to calibrate on")
    calibration, unread = read_images(classifier, sources, request.calibration_images)
    sources = replace(sources, notes=(*sources.notes, *unread))
    measure = _on_labelled(sources.task, progress) if sources.task else _on_unlabelled(calibration)

    def quantise(source: Path, target: Path, session: Session) -> tuple[Description, dict[str, Any]]:
        form = of_file(source)
        progress(0, None, "calibrating")
        with failing(f"{title} cannot be quantised"):
            calibrated = form.calibrated(source, calibration, threads)
        if not calibrated.layers:
            raise ValueError(f"{title} has no layer that int8 is good for; leave --int8 out")
        meant = set(matching(kept, [*calibrated.layers, *calibrated.passed_over]))
        asked = [name for name in calibrated.layers if name in meant]
        if len(asked) == len(calibrated.layers):
            raise ValueError(f"--keep-float {','.join(kept)} leaves none of {len(asked)} layers to be int8; keep fewer")
        before = measure(session, "in float")

        def attempt(more: Sequence[str]) -> Attempt:
            path = target.with_name(f"{len(more)}-{target.name}")
            progress(0, None, "quantising" + (f" with {len(more)} more layers in float" if more else ""))
            calibrated.write(path, (*asked, *more))
            after = measure(form.open(path, threads), "in int8")
            if before.top1 is None or after.top1 is None:
                lost = 100 * float((before.predicted != after.predicted).mean())
            else:
                lost = round(before.top1 - after.top1, 9)  # or 36.7 - 35.7 would be more than 1
            return Attempt(path, (*asked, *more), after, lost)

        def rank() -> dict[str, float]:
            """By layer how far the logits move if it alone is int8."""
            names = [name for name in calibrated.layers if name not in asked]
            images, found = calibration[:RANKED], {}
            (expected,) = session(images).values()
            for place, name in enumerate(names):
                progress(place, len(names), f"what {name} costs")
                run = calibrated.alone(name)
                (logits,) = Session(session.description, lambda batch, run=run: [run(batch)])(images).values()
                found[name] = moved(logits, expected)
            return found

        with failing(f"{title} cannot be quantised"):
            best, errors = settle(attempt, rank, max_drop)
        if sources.task and best.lost > max_drop:
            points = f"{best.lost:.1f} points of accuracy ({before.top1:.1f} to {best.answers.top1:.1f} %) at best"
            limit = f"--max-drop allows {max_drop:g}: nothing was written"
            remedy = "allow more, calibrate on more images, or leave --int8 out"
            half = f"with up to half of its {len(calibrated.layers)} layers in float"
            raise RuntimeError(f"{title} in int8 loses {points}, {half}; {limit}; {remedy}")
        move_together(best.path, target, form.files)
        costs = {name: {"moves_logits_by": round(moves, 6)} for name, moves in errors.items()}
        reasons = {name: "int8 loses too much" if name in costs else "asked for" for name in best.kept}
        floats: list[Any] = [{"layer": name, "reason": why, **costs.get(name, {})} for name, why in reasons.items()]
        count, after = len(calibrated.layers), best.answers
        found: dict[str, Any] = {"calibration": {"images": len(calibration), "from": sources.said}}
        found |= dict(layers=count, in_int8=count - len(floats), kept_in_float=floats)
        found["always_in_float"] = dict(calibrated.passed_over)
        found["top1"] = None if before.top1 is None else {"float": before.top1, "int8": after.top1}
        found |= dict(max_drop=max_drop, same_class=float((before.predicted == after.predicted).mean()))
        found["measured_on"] = {"images": len(before.predicted), "from": sources.place or sources.said}
        description = replace(session.description, quantised=found)
        form.describe(target, description)
        sizes = {"float": file_bytes(source), "int8": file_bytes(target)}
        return description, {**found, "bytes": sizes, "lines": _lines(found, sizes, sources.notes)}

    return quantise


def settle(
    attempt: Callable[[Sequence[str]], Attempt], rank: Callable[[], dict[str, float]], limit: float
) -> tuple[Attempt, dict[str, float]]:
    """Put as few layers back to float as bring the loss under a limit: that which moves the logits most by `rank`, then
    two, four and so on up to half of all, and back by halves. -> the attempt within the limit with the fewest layers in
    float, or else the one that lost least; and what `rank` found, empty if it was not needed."""
    tried, count = {0: attempt(())}, 1
    if tried[0].lost <= limit:
        return tried[0], {}
    errors = rank()
    order = sorted(errors, key=lambda name: -errors[name])
    most = max(1, len(order) // 2)  # with more of them in float little would be left of int8
    while count <= min(most, len(order)) and min(one.lost for one in tried.values()) > limit:
        tried[count] = attempt(order[:count])
        count = max(count + 1, min(2 * count, most))
    *_, too_few, enough = [0, *tried]
    if tried[enough].lost > limit:
        return min(tried.values(), key=lambda one: one.lost), errors
    while enough - too_few > 1:
        count = (too_few + enough) // 2
        tried[count] = attempt(order[:count])
        too_few, enough = (too_few, count) if tried[count].lost <= limit else (count, enough)
    return tried[enough], errors


def _on_labelled(task: Task, progress: Progress) -> Measure:
    classifier, count, transforms = task.classifier, len(task.source), task.classifier.transforms

    @cache
    def batches() -> Any:
        images = SourceDataset(task.source, transforms.build(training=False))
        loader = load(images, EvalOrder(task.source, BATCH))
        return loader if count * transforms.channels * transforms.size**2 > KEPT_IN_MEMORY else list(loader)

    def measure(session: Session, what: str) -> Answers:
        done = 0

        def seen(more: int) -> None:
            nonlocal done
            done += more
            progress(done, count, f"accuracy {what}")

        def logits(images: Tensor) -> Tensor:
            (found,) = session(images.numpy()).values()
            return torch.from_numpy(np.nan_to_num(found))  # which int8 may answer if a layer is lost: then it is wrong

        # a session as `collect` asks classifiers
        asked: Any = SimpleNamespace(normalise=classifier.normalise, num_classes=classifier.num_classes, logits=logits)
        said = collect(asked, batches(), count=count, kept=task.kept, seen=seen)
        return Answers(said.predicted, 100 * float((said.ranks == 0).mean()))

    return measure


def _on_unlabelled(images: NormalisedImages) -> Measure:
    def measure(session: Session, what: str) -> Answers:
        found = [session(images[start : start + BATCH]) for start in range(0, len(images), BATCH)]
        return Answers(np.concatenate([next(iter(one.values())).argmax(1) for one in found]), None)

    return measure


def _lines(found: dict[str, Any], sizes: dict[str, int], notes: Sequence[str]) -> list[str]:
    """What a user wants to know of it."""
    calibration, measured, top1 = found["calibration"], found["measured_on"], found["top1"]
    shrunk = f"{sizes['float'] / 1e6:.1f} MB to {sizes['int8'] / 1e6:.1f} MB"
    images = f"{calibration['images']:,} images of {calibration['from']}"
    lines = [f"int8: {found['in_int8']} of {found['layers']} layers, {shrunk}, calibrated on {images}"]
    where = f"on {measured['images']:,} images of {measured['from']}"
    same, limit = f"{found['same_class']:.1%}", found["max_drop"]
    if top1 is None:
        lines.append(f"accuracy was not measured: no labelled images (--data); {where} the same class for {same}")
        if 100 * (1 - found["same_class"]) > limit:
            lines[-1] += f", though --max-drop {limit:g} asks for {1 - limit / 100:.1%}"
    else:
        lost = top1["float"] - top1["int8"]
        points = f"{abs(lost):.2f} points {'lost' if lost > 0 else 'gained'}" if lost else "nothing lost"
        both = f"{top1['float']:.2f} % in float, {top1['int8']:.2f} % in int8"
        lines.append(f"top-1 {where}: {both}, {points} (limit {limit:g}); the same class for {same}")
    ranked = [one for one in found["kept_in_float"] if "moves_logits_by" in one]
    asked = [one["layer"] for one in found["kept_in_float"] if "moves_logits_by" not in one]
    count = len(found["kept_in_float"])
    lines.append(f"kept in float: {count or 'no'} layer{'' if count == 1 else 's'}")
    lines += [f"  {one['layer']}: alone it moves the logits by {one['moves_logits_by']:.1%}" for one in ranked[:SHOWN]]
    if len(ranked) > SHOWN:
        lines.append(f"  and {len(ranked) - SHOWN} more that move them less")
    if asked:
        lines.append(f"  {len(asked)} as asked for: {some(asked)}")
    if always := Counter(found["always_in_float"].values()):
        reasons = ", ".join(f"{count} for {reason}" for reason, count in always.items())
        others = "other" if (count := sum(always.values())) == 1 else "others"
        lines.append(f"always in float: {count} {others} ({reasons})")
    return [*lines, *(f"note: {note}" for note in notes)]
