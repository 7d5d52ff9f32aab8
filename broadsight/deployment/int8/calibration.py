"""The images that int8 files are calibrated on and measured with: found, kept apart, and read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.loading import Batch, SourceDataset
from ...data.sources import Source
from ...data.sources.evaluation import Found, open_part, same_data
from ...data.sources.unlabelled import find_images
from ...data.view import View
from ...errors import first_line
from ...evaluation.request import Request
from ...evaluation.tasks import Task, open_tasks, own_splits
from ...runs.classifier import Classifier


class NormalisedImages:
    """Decoded images, normalised where they are looked at: a quarter of the memory."""

    def __init__(self, pixels: Tensor, normalise: Callable[[Tensor], Tensor]):
        self.pixels, self.normalise = pixels, normalise

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, places: slice) -> np.ndarray:
        return self.normalise(self.pixels[places]).numpy()


@dataclass(frozen=True)
class Sources:
    """Where images come from."""

    calibration: Source
    said: str  # what those are
    task: Task | None = None  # what accuracy is measured on; None if nothing is labelled
    place: str = ""  # where that is
    notes: tuple[str, ...] = ()  # for the user


def sources_of(classifier: Classifier, data: str | None, calibrate: str | None, images: int) -> Sources:
    """Images to calibrate on, and to measure accuracy on where some are labelled."""
    given, notes = None, ()
    if calibrate is not None:
        try:
            found, notes = find_images([calibrate])
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"--calibrate {calibrate}: {error}; give a folder of images") from None
        given = Sources(found.in_channels(classifier.transforms.channels), calibrate, notes=tuple(notes))
    own = classifier.run.get("broadsight", {}).get("settings", {}).get("data")
    if data is None and own is None:
        if given is None:
            what = f"--int8 needs images to calibrate on, and {classifier.title} has none of its own"
            remedy = "give labelled ones by --data, which measures accuracy too, or any by --calibrate"
            raise ValueError(f"{what}; {remedy}")
        return given
    try:
        labelled, ((task,), *_) = open_tasks(Request(classifier, data=data), [classifier])
        other = _training_part(classifier, data, own, labelled) if given is None else None
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if data is not None:
            raise
        reason = f"the data that {classifier.title} was trained on ({own}) cannot be had: {first_line(error)}"
        if given is None:
            raise ValueError(f"{reason}; give labelled images by --data, or any by --calibrate") from None
        return replace(given, notes=(*given.notes, reason))
    place, notes = labelled.place, tuple(labelled.notes)
    if given is not None:
        return replace(given, task=task, place=place, notes=(*given.notes, *notes))
    if other is not None:
        return Sources(other.source, other.place, task, place, notes)
    if (count := len(task.source)) < 2:
        raise ValueError(f"{place} has one image; expected two, one of them to calibrate on; or give --calibrate")
    few = min(images, max(1, count // 4))
    parts = np.split(np.random.default_rng(0).permutation(count), [few])
    calibrated, measured = (View(task.source, np.sort(part)) for part in parts)
    note = f"{place} sets nothing apart to train on: accuracy is measured on what was not calibrated on"
    return Sources(calibrated, place, replace(task, source=measured, accepted=None), place, (*notes, note))


def _training_part(classifier: Classifier, data: str | None, own: str | None, labelled: Found) -> Found | None:
    """What belongs to labelled images to train on; None if nothing is set apart."""
    if own is not None and (data is None or same_data(data, own)):
        return Found(own_splits(classifier).train, f"the training part of {own}", (), {})
    if labelled.description.get("part") not in ("val", "test") or data is None:
        return None
    run, transforms = classifier.run.get("broadsight", {}), classifier.transforms
    settings, side = run.get("settings", {}), run.get("recipe", {}).get("image_size") or transforms.size
    options: dict[str, Any] = {"seed": settings.get("seed", 0), "root": settings.get("root"), "scenes_size": side}
    try:
        found = open_part(data, "train", channels=transforms.channels, **options)
    except ValueError:  # it has no such part
        return None
    return replace(found, place=f"the training part of {data}")


def read_images(classifier: Classifier, sources: Sources, images: int) -> tuple[NormalisedImages, tuple[str, ...]]:
    """A number of images, drawn at random, and a note of those that cannot be read."""
    source = sources.calibration
    photos = SourceDataset(source, classifier.transforms.build(training=False))
    found, skipped = list[Tensor](), list[tuple[str, str]]()
    for place in np.random.default_rng(0).permutation(len(source)).tolist():
        batch: Batch = photos.__getitems__([(0, place, place)])
        skipped += batch.skipped
        found += batch.images[:1]
        if len(found) == images:
            break
    if not found:
        why = f"; {': '.join(skipped[0])}" if skipped else ""
        raise ValueError(f"none of the {len(source)} images in {sources.said} can be read to calibrate on{why}")
    unread = [f"{len(skipped)} images to calibrate on cannot be read, such as {': '.join(one)}" for one in skipped[:1]]
    return NormalisedImages(torch.stack(found), classifier.normalise), tuple(unread)
