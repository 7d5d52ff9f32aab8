"""What dense tasks bring to a run: images with objects, a head on any backbone, its description and its work."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..data.contents import contents
from ..data.decoding import UnreadableImage, within_memory
from ..data.dense.loading import DenseDataset
from ..data.dense.pose_crops import PoseCrops
from ..data.dense.resolve import DenseSplits, resolve_dense
from ..data.dense.transforms import DenseTransforms
from ..data.inside import outside_allowed
from ..data.seeds import seed_everything
from ..dense.build import make_dense_model
from ..dense.heads import HEADS
from ..dense.scoring import Views, make_scorer
from ..models.from_run import check_arguments
from ..visual.metrics import GOALS
from ..weights.loading import begin_dense
from . import parts
from .objectives.dense import DenseWork
from .parts import Begun, Parts
from .recipes import Recipe
from .request import Request
from .settings import history

SCENES = 128  # pixels of scenes that nobody has asked a size for
LARGEST = 320  # pixels that are chosen for images of unknown size
ASPECT = 1333 / 800  # of the longest image that detectors see whole
LOOKED_AT = 32  # images of each part, before a run begins


def dense_parts(
    request: Request, settings: dict[str, Any], recipe: Recipe, accelerator: Accelerator, begun: Begun
) -> Parts:
    """A dense model and its images."""
    task, channels = settings["task"], parts.image_channels(settings)
    scenes = settings["data"].partition(":")[0] == "scenes"
    splits = data_of(settings, recipe, channels)
    if not scenes:
        look_at_some(splits)
    splits.description["contents"] = contents({"train": splits.train, "val": splits.val})
    notes = list(splits.notes)
    size = recipe.image_size or (SCENES if scenes else parts.size_of(splits.train, settings["data"], LARGEST))
    recipe = recipe.change({"image_size": size, "eval_size": recipe.eval_size or size})
    top_down = HEADS[settings["head"]].top_down
    learned_from, shown = images_of(splits, recipe, top_down)
    recipe = parts.fit_batch(recipe, request, len(learned_from), accelerator, begun, notes)

    seed_everything(settings["seed"])
    model, arguments = make_model(settings, recipe, splits, pretrained=recipe.pretrained and not begun.weighted)
    if not begun.stored:
        parts.check_fields(request, recipe, settings, model)
    if settings["init"] and not begun.weighted:
        notes.append(f"begins from {begin_dense(model, settings['init'])}")
    order = parts.order_of(learned_from, recipe, settings, accelerator)
    stacked = task == "segment" or top_down

    def work(wrapped: nn.Module, plain: Any) -> DenseWork:
        kind = None if top_down else transforms_of(recipe, settings)
        built = [kind and kind.build(training, splits.flip_pairs) for training in (True, False)]
        learned = DenseDataset(learned_from, built[0], seed=settings["seed"], training=True, strict=request.strict)
        judged = DenseDataset(shown, built[1], strict=request.strict)
        train, val = parts.loaders(learned, judged, order, request, accelerator)
        points: dict[str, Any] = dict(flip_pairs=splits.flip_pairs, keypoint_offset=splits.keypoint_offset)
        seen: dict[str, Any] = dict(top_down=top_down, views=views_of(task, recipe), device=accelerator.device)
        scorer = make_scorer(task, splits.val, splits.classes, **points, **seen)
        return DenseWork(accelerator, wrapped, train, order, val, scorer, stacked=stacked)

    description = describe(settings, recipe, splits, model, arguments, begun.how)
    if not begun.stored:
        description = parts.opening(description, model)
        height, width = crop_size(recipe) if top_down else (size, size)
        image = torch.zeros(channels, height, width)
        parts.check_passes(model, image[None] if stacked else [image], None, size)
    objects = splits.description.get("objects")
    held = f", {objects['train']:,} objects" if objects and objects["train"] else ""
    summary = (
        f"{len(learned_from):,} {'crops of objects' if top_down else 'images'} of {len(splits.classes)} classes{held}, "
        f"{len(splits.val):,} images to validate, at {size} px"
    )
    return Parts(model, recipe, order, work, _compile, description, summary, tuple(notes), splits)


def data_of(settings: Mapping[str, Any], recipe: Recipe, channels: int) -> DenseSplits:
    """The images of a run."""
    options: dict[str, Any] = {name: settings[name] for name in ("val", "split", "seed")}
    options |= dict(channels=channels, scenes_size=recipe.image_size or SCENES, method=settings.get("hold_out", 1))
    with outside_allowed(settings.get("allow_outside", False)):
        return resolve_dense(settings["data"], settings["task"], **options)


def look_at_some(splits: DenseSplits) -> None:
    """Read some images and labels of both parts, so that invalid labels are refused before a run is begun."""
    for view in (splits.train, splits.val):
        for index in range(0, len(view), max(1, len(view) // LOOKED_AT)):
            with suppress(UnreadableImage), within_memory():  # which training skips
                view[index]


def _compile(model: Any) -> None:
    """The backbone alone: what follows depends on the content of images."""
    model.stages.compile()


def images_of(splits: DenseSplits, recipe: Recipe, top_down: bool) -> tuple[Any, Any]:
    """Training and validation images, or crops of their objects for pose models."""
    if not top_down:
        return splits.train, splits.val
    common: dict[str, Any] = dict(input_size=crop_size(recipe), pairs=splits.flip_pairs)
    scale = max(1 - recipe.resize[0], recipe.resize[1] - 1)
    varied: dict[str, Any] = dict(rotation=recipe.rotation, scale=scale, hflip=recipe.hflip)
    learned = PoseCrops(splits.train, training=True, **varied, **common)
    return learned, PoseCrops(splits.val, training=False, **common)


def crop_size(recipe: Recipe) -> tuple[int, int]:
    """Height and width of a person's image: four to three, the width in steps of 32."""
    height = recipe.image_size or 256
    return height, max(32, round(height * 3 / 4 / 32) * 32)


def transforms_of(recipe: Recipe, settings: Mapping[str, Any]) -> DenseTransforms:
    options = {name: getattr(recipe, name) for name in ("long_side", "resize", "crop", "hflip", "color_jitter")}
    size = recipe.image_size or LARGEST
    return DenseTransforms(settings["task"], size, fixed=HEADS[settings["head"]].square, **options)


def make_model(
    settings: Mapping[str, Any], recipe: Recipe, splits: DenseSplits, *, pretrained: bool
) -> tuple[Any, dict[str, Any]]:
    """The model as it will be trained, and the arguments that `make_dense_model` makes it from again."""
    head = settings["head"]
    arguments: dict[str, Any] = dict(
        head=head,
        backbone=settings["model"],
        num_classes=len(splits.classes),
        neck=settings["neck"],
        neck_args=settings["neck_args"] or None,
        head_args={**sizes_of(head, settings["task"], recipe, splits), **settings["head_args"]},
        backbone_args=parts.with_rates(settings["model_args"], recipe),
        broadcast=settings["broadcast"],
        broadcast_args=settings["broadcast_args"] or None,
    )
    arguments = {name: value for name, value in arguments.items() if value is not None}

    def make() -> Any:
        return make_dense_model(**arguments, pretrained_backbone=pretrained)

    model = parts.created(make, f"{head} on {settings['model']}", settings, pretrained)
    model.stages.frozen_stats = recipe.frozen_stats
    return model, arguments


def sizes_of(head: str, task: str, recipe: Recipe, splits: DenseSplits) -> dict[str, Any]:
    """Options of a model's builder that follow from the recipe and the data."""
    side = recipe.eval_size or recipe.image_size or LARGEST
    if task == "segment":
        return {}
    points = {"num_keypoints": len(splits.keypoint_names)} if task == "keypoints" else {}
    if HEADS[head].top_down:
        return {**points, "input_size": list(crop_size(recipe))}
    if HEADS[head].square:
        return {"image_size": [side, side]}
    return {**points, "image_size": [side, recipe.long_side or round(side * ASPECT)]}


def views_of(task: str, recipe: Recipe) -> Views:
    """How validation images are shown: in one view; to segmenters in the size of training."""
    if task != "segment":
        return Views(flip=False)
    side = recipe.eval_size or recipe.image_size or LARGEST
    return Views(short_side=side, long_side=recipe.long_side or 4 * side)


def describe(
    settings: Mapping[str, Any],
    recipe: Recipe,
    splits: DenseSplits,
    model: Any,
    arguments: Mapping[str, Any],
    how: Mapping[str, Any],
) -> dict[str, Any]:
    """config.json: what timm reads to load the run; below "broadsight" its history and what its labels mean."""
    stages, side = model.stages, recipe.eval_size or recipe.image_size or LARGEST
    given = {name: value for name, value in arguments.items() if name != "num_classes"}
    check_arguments("dense_model", given, "--model-args")  # or the run could not be opened again
    seen = {"mean": stages.mean, "std": stages.std}
    return {
        "architecture": "dense_model",
        "num_classes": len(splits.classes),
        "num_features": stages.channels[-1],
        "label_names": list(splits.classes),
        "model_args": given,
        "pretrained_cfg": {"input_size": [stages.in_chans, side, side], **seen, "num_classes": len(splits.classes)},
        "broadsight": {
            **history(settings, recipe, splits.description, model, how),
            "goal": GOALS[settings["task"]],
            "labels": {
                "category_ids": {str(label): number for label, number in splits.train.category_ids.items()},
                "keypoint_names": list(splits.keypoint_names),
                "flip_pairs": [list(pair) for pair in splits.flip_pairs],
                "skeleton": [list(pair) for pair in splits.skeleton],
                "keypoint_offset": splits.keypoint_offset,
            },
        },
    }
