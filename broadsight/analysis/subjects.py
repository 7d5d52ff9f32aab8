"""The models that are measured, opened from what the user calls them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.loading import Transforms
from ..data.normalising import Normalise
from ..runs.classifier import Classifier
from ..runs.dense_model import DenseModel
from ..runs.opening import RANDOM, Run, is_dense, name_of, open_asked, origin_of, with_weights
from ..training.dense import LARGEST
from .request import Request


@dataclass(frozen=True)
class Subject:
    """A model that is measured: a classifier, or the backbone of a dense run."""

    label: str  # what tables and legends call it, no two alike
    source: str  # where it is from: a run folder or a timm name
    weights: str  # "run", "timm", "random", or the checkpoint they were read from
    model: nn.Module  # in eval mode, takes normalised images (B, C, H, W)
    transforms: Transforms
    normalise: Normalise
    classifier: Classifier | None = None
    dense: DenseModel | None = None

    @property
    def own_data(self) -> str | None:
        """What it was trained on, if it says so."""
        if self.classifier is not None:
            return self.classifier.run.get("broadsight", {}).get("settings", {}).get("data")
        return self.dense.settings.get("data") if self.dense else None

    @property
    def series(self) -> str:
        """What it shares with runs of other numbers of class tokens: model, pool and weights of the losses."""
        run: Mapping[str, Any] = self.classifier.run.get("broadsight", {}) if self.classifier else {}
        settings, recipe = run.get("settings", {}), run.get("recipe", {})
        arguments = {**(settings.get("model_args") or {}), **(settings.get("pool_args") or {})}
        words = [f"{name} {value}" for name, value in arguments.items() if name not in ("groups", "tokens")]
        words = [self.classifier.title if self.classifier else self.label, *words]
        if "intra" in recipe and "inter" in recipe:
            weights = f"intra {recipe['intra']:g}, inter {recipe['inter']:g}"
            words.append(weights if recipe["intra"] or recipe["inter"] else "no distillation")
        return ", ".join(words)


def open_subjects(request: Request) -> list[Subject]:
    """The models that are asked for."""
    if (name := request.checkpoint) and len(request.models) > 1:
        raise ValueError(f"--checkpoint {name} with {len(request.models)} models; write NAME@{name} for the one")
    opened: list[Subject] = []
    for one in request.models:
        torch.manual_seed(request.seed or 0)
        opened.append(_backbone(one, request) if is_dense(with_weights(one)[0]) else _classifier(one, request))
    channels = {one.transforms.channels: one.label for one in opened}
    if len(channels) > 1:
        takes = ", ".join(f"{label} {count}" for count, label in channels.items())
        raise ValueError(f"the models take images of different channels: {takes}; measure them one by one")
    return _with_labels(opened)


def _classifier(given: Run, request: Request) -> Subject:
    name, checkpoint = with_weights(given)
    checkpoint = checkpoint or request.checkpoint
    origin = origin_of(name, checkpoint, request.pretrained)
    # a run has arguments of its own, but those may be meant for the others
    arguments = None if origin == "run" and len(request.models) > 1 else request.model_args
    level = (logger := logging.getLogger("huggingface_hub")).level
    logger.setLevel(logging.ERROR)  # attempts to reach timm's weights are not told of one by one; the last failure is
    try:
        classifier = open_asked(request, name, checkpoint=checkpoint, model_args=arguments)
    except RuntimeError as error:
        if "cannot be had" not in str(error):
            raise
        reason = str(error).rstrip(".")
        raise ValueError(f"{reason}; give others as {name}@FILE, or try random ones by --no-pretrained") from None
    finally:
        logger.setLevel(level)
    parts = classifier.model, classifier.transforms, classifier.normalise
    return Subject(classifier.title, name_of(name), origin, *parts, classifier)


def _backbone(given: Run, request: Request) -> Subject:
    run = open_asked(request, given, checkpoint=None, model_args=None)
    stages = run.model.stages.requires_grad_(False)
    side = request.size or run.recipe.eval_size or run.recipe.image_size or LARGEST
    transforms = Transforms(side, stages.in_chans, stages.mean, stages.std, crop_pct=1.0)
    normalise = Normalise(stages.mean, stages.std, run.device)
    return Subject(f"{run.title} backbone", name_of(given), "run", stages, transforms, normalise, dense=run)


def _with_labels(subjects: Sequence[Subject]) -> list[Subject]:
    """No two with one label: runs of the same model by their folders, others by number."""
    titles = [one.label for one in subjects]
    labelled: list[Subject] = []
    for one in subjects:
        label = one.label
        if one.weights == "run" and titles.count(label) > 1:
            label = f"{label}, {Path(one.source).absolute().name}"
        elif one.weights == RANDOM:
            label = f"{label}, random weights"
        stem, number = label, 2
        while label in {other.label for other in labelled}:
            label, number = f"{stem} ({number})", number + 1
        labelled.append(replace(one, label=label))
    return labelled
