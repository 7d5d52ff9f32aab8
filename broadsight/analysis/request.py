"""What a user asks to be measured, and the models of that, opened from what he calls them."""

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.loading import Transforms
from ..data.normalising import Normalise
from ..data.sources.evaluation import Which
from ..runs import is_dense
from ..runs.classifier import Classifier, open_classifier
from ..runs.dense_model import DenseModel, open_dense
from ..training.dense import LARGEST

RANDOM = "random"  # instead of what the weights were read from


@dataclass(frozen=True)
class Asked:
    """What a user asks for.

    Args:
        measure: One of broadsight.analysis.measures.MEASURES.
        models: Run folders, timm names, and timm names with their weights as NAME@CHECKPOINT.
        data, part, root, download: As for `open_images`.
        samples: So many images, drawn by chance; what the measure usually takes if None.
        options: Of the measure.
        checkpoint: Weights of the one timm name that is given.
        pretrained, size: As for `open_classifier`.
        model_args: Arguments of every timm name.
        batch: Images that pass a model at once; what suits the measure if None.
        workers, threads, device, strict: How it is done.
        seed: Of the sample, of random weights and of what the measure draws; and of scenes, where it is the run's own
            if None.
    """

    measure: str
    models: tuple[str, ...]
    data: str | None = None
    part: Which = "auto"
    root: str | None = None
    download: bool = False
    samples: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    pretrained: bool = True
    model_args: Mapping[str, Any] = field(default_factory=dict)
    size: int | None = None
    batch: int | None = None
    workers: int | None = None
    threads: int | None = None
    device: str = "auto"
    strict: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("samples", 1), ("workers", 0), ("threads", 1), ("seed", 0)):
            given = getattr(self, name)
            if given is not None and given < least:
                raise ValueError(f"--{name} {given}; expected {least} or more")


@dataclass(frozen=True)
class Subject:
    """A model that is measured.

    Args:
        label: What tables and legends call it, no two alike.
        source: Where it is from: a run folder or a timm name.
        weights: "run", "timm", "random", or the checkpoint they were read from.
        model: In eval mode, takes normalised images (B, C, H, W).
        transforms, normalise: How an image becomes the model's input.
        classifier: As `open_classifier` gave it; None for the backbone of a dense run.
        dense: The dense run that it is the backbone of, if it is one.
    """

    label: str
    source: str
    weights: str
    model: nn.Module
    transforms: Transforms
    normalise: Normalise
    classifier: Classifier | None = None
    dense: DenseModel | None = None

    @property
    def own_data(self) -> str | None:
        """What it was trained on, if it says so."""
        settings = self.dense.settings if self.dense else _settings(self.classifier)
        return settings.get("data")


def open_subjects(asked: Asked) -> list[Subject]:
    """The models that are asked for."""
    names, checkpoint = asked.models, asked.checkpoint
    if checkpoint and len(names) > 1:
        raise ValueError(f"--checkpoint {checkpoint} with {len(names)} models; write NAME@{checkpoint} for the one")
    opened: list[Subject] = []
    for name in names:
        torch.manual_seed(asked.seed or 0)
        name, weights = (name, "") if Path(name).exists() else name.partition("@")[::2]
        if is_dense(name):
            one = _backbone(name, asked.size, asked.device)
        else:
            one = _classifier(asked, name, weights or checkpoint or "")
        opened.append(one)
    channels = {one.transforms.channels: one.label for one in opened}
    if len(channels) > 1:
        takes = ", ".join(f"{label} {count}" for count, label in channels.items())
        raise ValueError(f"the models take images of different channels: {takes}; measure them one by one")
    return _named_apart(opened)


def _classifier(asked: Asked, name: str, weights: str) -> Subject:
    folder = Path(name).is_dir()
    try:
        with _without_retries():
            classifier = open_classifier(
                name,
                checkpoint=weights or None,
                pretrained=asked.pretrained,
                # a run has arguments of its own, but those may be meant for the others
                model_args=None if folder and len(asked.models) > 1 else asked.model_args,
                size=asked.size,
                device=asked.device,
            )
    except RuntimeError as error:
        if "cannot be had" not in str(error):
            raise
        reason = str(error).rstrip(".")
        raise ValueError(f"{reason}; give others as {name}@FILE, or try random ones by --no-pretrained") from None
    origin = "run" if folder else weights or ("timm" if asked.pretrained else RANDOM)
    parts = classifier.model, classifier.transforms, classifier.normalise
    return Subject(classifier.title, name, origin, *parts, classifier)


@contextmanager
def _without_retries() -> Generator[None, None, None]:
    """Attempts to reach timm's weights are not told of one by one; the last failure is."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _backbone(path: str, size: int | None, device: str) -> Subject:
    run = open_dense(path, device=device, size=size)
    stages = run.model.stages.requires_grad_(False)
    side = size or run.recipe.eval_size or run.recipe.image_size or LARGEST
    transforms = Transforms(side, stages.in_chans, stages.mean, stages.std, crop_pct=1.0)
    normalise = Normalise(stages.mean, stages.std, run.device)
    return Subject(f"{run.title} backbone", path, "run", stages, transforms, normalise, dense=run)


def _named_apart(subjects: Sequence[Subject]) -> list[Subject]:
    """No two with one label: runs of the same model by their folders, others by number."""
    titles = [one.label for one in subjects]
    apart: list[Subject] = []
    for one in subjects:
        label = one.label
        if one.weights == "run" and titles.count(label) > 1:
            label = f"{label}, {Path(one.source).absolute().name}"
        elif one.weights == RANDOM:
            label = f"{label}, random weights"
        stem, number = label, 2
        while label in {other.label for other in apart}:
            label, number = f"{stem} ({number})", number + 1
        apart.append(replace(one, label=label))
    return apart


def _settings(classifier: Classifier | None) -> Mapping[str, Any]:
    return {} if classifier is None else classifier.run.get("broadsight", {}).get("settings", {})
