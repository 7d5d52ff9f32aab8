"""What is exported: a model, what it says of itself, and images to try it on."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.loading import SourceDataset
from ..data.sources.unlabelled import find_images
from ..evaluation.tasks import own_splits
from ..provenance import header
from ..runs.classifier import Classifier
from ..runs.images import drawn_scenes
from ..weights.reading import weights_digest
from .agreement import listed
from .graph import why_one_size
from .session import Description, Session


@dataclass(frozen=True)
class Subject:
    """A model and all that goes into an artefact beside it."""

    model: nn.Module  # in eval mode on the CPU; (B, C, H, W) -> a tensor or a tuple of them
    description: Description  # for a fixed size and any number of images; the format changes that
    # Pixels of a side (None: the description's) -> a few normalised images (1, C, H, W), without a crop of any sizes
    images: Callable[[int | None], list[np.ndarray]]
    shown: str  # what the images are, for the report
    notes: tuple[str, ...] = ()  # what the user should know
    obstacle: str = ""  # why it cannot take any image size
    example_size: tuple[int, int] | None = None  # (height, width) to capture it at for any size; None: `capture` knows
    follow: Callable[[np.ndarray, dict[str, np.ndarray]], list[np.ndarray]] | None = None  # see `compare`
    findings: Callable[[Session], dict[str, float]] | None = None  # how far what an artefact finds is from the model's

    def reference(self, images: np.ndarray) -> list[np.ndarray]:
        """What the model itself answers. (B, C, H, W) -> the outputs in order."""
        return answers(self.model, images)


def answers(model: Callable[..., Any], *inputs: np.ndarray) -> list[np.ndarray]:
    """What a model in torch answers to arrays: its outputs in order."""
    with torch.inference_mode():
        return [one.float().numpy() for one in listed(model(*map(torch.from_numpy, inputs)))]


def of_classifier(classifier: Classifier, command: str, images: Sequence[str] = (), count: int = 8) -> Subject:
    """A classifier, on the CPU, as `command` asks for it. images: Files, folders or patterns to try it on, `count` of
    them; none: what the run validated on, or drawn scenes."""
    transforms = classifier.transforms
    size, channels = transforms.size, transforms.channels
    named = classifier.labels is not None or (classifier.num_classes == 1000 and not classifier.run)
    way = transforms.interpolation if transforms.interpolation != "random" else "bicubic"
    said: dict[str, Any] = dict(resize=math.floor(size / transforms.crop_pct), crop=size, crop_pct=transforms.crop_pct)
    said |= dict(interpolation=way, mean=list(transforms.mean), std=list(transforms.std))
    title, classes = classifier.title, classifier.classes if named else None
    image = {"channels": channels, "height": size, "width": size, "any_batch": True, "any_size": False}
    about = provenance(classifier.model, command, dict(classifier.run))
    source = Path(classifier.source).name or title
    description = Description("classify", title, source, classes, ("logits",), image, said, about)

    def own() -> tuple[Any, str]:
        if not classifier.run.get("broadsight", {}).get("settings"):
            return (), ""
        splits = own_splits(classifier)
        return splits.val, splits.description["val"]

    data, shown, notes = to_show(images, channels, own)
    data = drawn_scenes(count, classifier) if data is None else data

    def photos(side: int | None) -> list[np.ndarray]:
        seen = transforms if side is None else replace(transforms, size=side)
        read, places = SourceDataset(data, seen.build(training=False)), spread(len(data), count)
        batch: Any = read.__getitems__([(0, place, index) for place, index in enumerate(places)])
        if not len(batch.images):
            name, reason = batch.skipped[0]
            raise ValueError(f"none of the {len(places)} images to compare on can be read; {name}: {reason}")
        return [one.numpy() for one in classifier.normalise(batch.images).split(1)]

    return Subject(classifier.model, description, photos, shown, notes, why_one_size(classifier.model))


def spread(length: int, count: int) -> list[int]:
    """Some places from all over a list."""
    return np.linspace(0, length - 1, min(count, length)).round().astype(int).tolist()


def provenance(model: nn.Module, command: str, run: dict[str, Any]) -> dict[str, Any]:
    """Where an artefact comes from; `run` is what the folder of a run says of it."""
    known = run.get("architecture") or getattr(model, "pretrained_cfg", {}).get("architecture")
    count = sum(parameter.numel() for parameter in model.parameters())
    found: dict[str, Any] = {**header(command), "architecture": known, "parameters": count}
    found["weights_sha256"] = weights_digest(model.state_dict())
    if about := run.get("broadsight", {}):
        found["run"] = {key: about[key] for key in ("task", "recipe", "best", "metrics") if key in about}
        settings, chosen = about.get("settings", {}), ("model", "pool", "head", "neck", "broadcast", "seed")
        found["run"]["settings"] = {key: settings[key] for key in chosen if key in settings}
    return found


def to_show(images: Sequence[str], channels: int, own: Callable[[], Any]) -> tuple[Any, str, tuple[str, ...]]:
    """Images, what they are, and notes: those that are named, or those that the run validated on, by `own` with where
    they are from; None where there are none, and scenes are to be drawn."""
    if images:
        found, notes = find_images(images)
        return found.in_channels(channels), f"images of {' '.join(images)}", tuple(notes)
    with suppress(OSError, ValueError, KeyError, RuntimeError):  # its data may be elsewhere by now: scenes do
        val, place = own()
        if len(val):
            return val, f"images that the run validated on ({place})", ()
    return None, "drawn scenes", ()
