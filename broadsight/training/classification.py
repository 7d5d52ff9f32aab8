"""What classification brings to a run: its images, model, description and work."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import timm
import torch
from accelerate import Accelerator
from torch import nn

from ..data.contents import contents
from ..data.inside import outside_allowed
from ..data.loading import SourceDataset, Transforms
from ..data.seeds import seed_everything
from ..data.sources import Splits, resolve
from ..data.view import labels_of
from ..models.edited import edit
from ..models.from_run import check_arguments
from ..weights.loading import load_given
from . import parts
from .augmentation import transforms_of
from .objectives.classification import Classification
from .objectives.steps import make_task
from .parts import SMALLEST, Begun, Parts
from .recipes import Recipe
from .request import Request
from .settings import describe

EDITS = ("pool", "pool_args", "broadcast", "broadcast_args")
# What stays of timm's description of a model once it is trained on something else.
KEPT = ("fixed_input_size", "crop_mode", "pool_size", "first_conv", "classifier", "min_input_size", "license")


def classifier_parts(
    request: Request, settings: dict[str, Any], recipe: Recipe, accelerator: Accelerator, begun: Begun
) -> Parts:
    """A classifier and its images."""
    channels = settings["model_args"].get("in_chans", 3)
    options: dict[str, Any] = {name: settings[name] for name in ("val", "split", "root") if settings[name] is not None}
    options |= dict(channels=channels, scenes_size=recipe.image_size or SMALLEST, method=settings.get("hold_out", 1))
    options |= dict(download=True) if request.download else {}
    with accelerator.main_process_first(), outside_allowed(settings.get("allow_outside", False)):
        splits = resolve(settings["data"], seed=settings["seed"], **options)  # a tar is unpacked once
    splits.description["contents"] = contents({"train": splits.train, "val": splits.val})
    classes, notes = len(splits.classes), list(splits.notes)
    occurring = sorted(set(labels_of(splits.val).tolist()))
    if not occurring:
        raise ValueError(f"{splits.description['val']} has no labelled images to validate on; add some")
    if len(occurring) == 1:
        what = f"the images to validate on are all of one class, {splits.classes[occurring[0]]}"
        why = "always naming that class would be right, so no epoch is called the best and the last weights are kept"
        notes.append(f"{what}: {why}")
    size = recipe.image_size or parts.size_of(splits.train, settings["data"])
    recipe = recipe.change({"image_size": size, "eval_size": (eval_size := recipe.eval_size or size)})
    recipe = parts.fit_batch(recipe, request, len(splits.train), accelerator, begun, notes)

    seed_everything(settings["seed"])
    model = make_model(settings, replace(recipe, pretrained=recipe.pretrained and not begun.weighted), classes)
    if not begun.stored:
        parts.check_fields(request, recipe, settings, model)
    if settings["init"] and not begun.weighted:
        load_given(model, settings["init"], other_classes=True)
    transforms = transforms_of(recipe, model.pretrained_cfg, channels)
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": transforms.mean, "std": transforms.std}
    order = parts.order_of(splits.train, recipe, settings, accelerator, repeats=recipe.repeated_aug)

    def work(wrapped: nn.Module, plain: Any) -> Classification:
        options: dict[str, Any] = dict(seed=settings["seed"], training=True, strict=request.strict)
        learned = SourceDataset(splits.train, transforms.build(True), **options)
        judged = SourceDataset(splits.val, replace(transforms, size=eval_size).build(False), strict=request.strict)
        train, val = parts.loaders(learned, judged, order, request, accelerator)
        task = make_task(wrapped, plain, recipe, accelerator.device)
        about: dict[str, Any] = dict(mean=transforms.mean, std=transforms.std, comparable=len(occurring) > 1)
        return Classification(accelerator, task, recipe, train, order, val, classes=classes, **about)

    description = _describe(settings, recipe, splits, model, transforms, begun.how)
    if not begun.stored:
        description = parts.opening(description, model)
        for side in sorted({size, eval_size}):
            parts.check_passes(model, torch.zeros(1, channels, side, side), classes, side)
    summary = f"{len(splits.train):,} images of {classes} classes, {len(splits.val):,} to validate, at {size} px"
    return Parts(model, recipe, order, work, description, summary, tuple(notes), splits)


def make_model(settings: Mapping[str, Any], recipe: Recipe, classes: int) -> Any:
    """The model as it will be trained, with `pretrained_cfg` saying what it takes from now on."""
    name, given = settings["model"], parts.with_rates(_arguments(settings, recipe), recipe)
    given |= dict(num_classes=classes, pretrained=recipe.pretrained)
    edits = {key: settings[key] for key in EDITS if settings[key]}
    return parts.created(lambda: edit(name, **edits, **given), name, settings, recipe.pretrained)


def _arguments(settings: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """What timm needs to make the model again: its arguments, and its size if it is built for a single one."""
    name, size = settings["model"], recipe.image_size
    known = ":" not in name and timm.is_model(name.split(".")[0])
    config = timm.models.get_pretrained_cfg(name) if known else None
    single = bool(config and config.fixed_input_size) and recipe.eval_size in (None, size)
    return ({"img_size": size} if single else {}) | settings["model_args"]


def _describe(
    settings: Mapping[str, Any], recipe: Recipe, splits: Splits, model: Any, seen: Transforms, how: Mapping[str, Any]
) -> dict[str, Any]:
    arguments, architecture = _arguments(settings, recipe), settings["model"].split(".")[0]
    if settings["pool"] or settings["broadcast"]:
        arguments |= {"backbone": settings["model"], **{key: settings[key] for key in EDITS if settings[key]}}
        architecture = "edited"
    check_arguments(architecture, arguments, "--model-args")  # else nobody could open the run again
    config = {k: v for k, v in model.pretrained_cfg.items() if v is not None and k in KEPT}
    side, interpolation = recipe.eval_size or seen.size, seen.interpolation.replace("random", "bicubic")
    config |= dict(input_size=[seen.channels, side, side], mean=seen.mean, std=seen.std, crop_pct=seen.crop_pct)
    config |= dict(interpolation=interpolation, num_classes=len(splits.classes))
    about = dict(architecture=architecture, num_features=model.num_features, model_args=arguments)
    return describe(settings, recipe, splits, model, how, **about, pretrained_cfg=config)
