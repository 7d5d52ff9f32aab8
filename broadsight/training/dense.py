"""What dense tasks bring to a run: images with objects, a head on any backbone, its description and its work."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..data.contents import contents
from ..data.decoding import UnreadableImage, within_memory
from ..data.dense.loading import DenseDataset
from ..data.dense.pose_geometry import PoseCrops
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
from .settings import describe

SCENES = 128  # pixels of scenes that nobody has asked a size for
LARGEST = 320  # pixels that are chosen for images of unknown size


def dense_parts(
    request: Request, settings: dict[str, Any], recipe: Recipe, accelerator: Accelerator, begun: Begun
) -> Parts:
    """A dense model and its images."""
    task, channels = settings["task"], settings["model_args"].get("in_chans", 3)
    scenes = settings["data"].partition(":")[0] == "scenes"
    splits = data_of(settings, recipe, channels)
    for view in () if scenes else (splits.train, splits.val):  # invalid labels are refused before a run begins
        for index in range(0, len(view), max(1, len(view) // 32)):
            with suppress(UnreadableImage), within_memory():  # which training skips
                view[index]
    splits.description["contents"] = contents({"train": splits.train, "val": splits.val})
    notes = list(splits.notes)
    size = recipe.image_size or (SCENES if scenes else parts.size_of(splits.train, settings["data"], LARGEST))
    recipe = recipe.change({"image_size": size, "eval_size": recipe.eval_size or size})
    top_down = HEADS[settings["head"]].top_down
    learned_from, shown = splits.train, splits.val
    if top_down:
        common: dict[str, Any] = dict(input_size=crop_size(recipe), pairs=splits.flip_pairs)
        scale = max(1 - recipe.resize[0], recipe.resize[1] - 1)
        varied: dict[str, Any] = dict(rotation=recipe.rotation, scale=scale, hflip=recipe.hflip)
        learned_from = PoseCrops(splits.train, training=True, **varied, **common)
        shown = PoseCrops(splits.val, training=False, **common)
    recipe = parts.fit_batch(recipe, request, len(learned_from), accelerator, begun, notes)

    seed_everything(settings["seed"])
    model, arguments = _make_model(settings, recipe, splits, pretrained=recipe.pretrained and not begun.weighted)
    if not begun.stored:
        parts.check_fields(request, recipe, settings, model)
    if settings["init"] and not begun.weighted:
        notes.append(f"begins from {begin_dense(model, settings['init'])}")
    order = parts.order_of(learned_from, recipe, settings, accelerator)
    stacked = task == "segment" or top_down

    def work(wrapped: nn.Module, plain: Any) -> DenseWork:
        augmented = {name: getattr(recipe, name) for name in ("long_side", "resize", "crop", "hflip", "color_jitter")}
        kind = None if top_down else DenseTransforms(task, size, fixed=HEADS[settings["head"]].square, **augmented)
        built = [kind and kind.build(training, splits.flip_pairs) for training in (True, False)]
        learned = DenseDataset(learned_from, built[0], seed=settings["seed"], training=True, strict=request.strict)
        judged = DenseDataset(shown, built[1], strict=request.strict)
        train, val = parts.loaders(learned, judged, order, request, accelerator)
        options: dict[str, Any] = dict(flip_pairs=splits.flip_pairs, keypoint_offset=splits.keypoint_offset)
        options |= dict(top_down=top_down, views=views_of(task, recipe), device=accelerator.device)
        scorer = make_scorer(task, splits.val, splits.classes, **options)
        return DenseWork(accelerator, wrapped, scorer, train, order, val, stacked=stacked)

    description = _describe(settings, recipe, splits, model, arguments, begun.how)
    if not begun.stored:
        description = parts.opening(description, model)
        image = torch.zeros(channels, *(crop_size(recipe) if top_down else (size, size)))
        parts.check_passes(model, image[None] if stacked else [image], None, size)
    objects = splits.description.get("objects")
    held = f", {objects['train']:,} objects" if objects and objects["train"] else ""
    kind = "crops of objects" if top_down else "images"
    summary = f"{len(learned_from):,} {kind} of {len(splits.classes)} classes{held}, "
    summary += f"{len(splits.val):,} images to validate, at {size} px"
    return Parts(model, recipe, order, work, description, summary, tuple(notes), splits)


def data_of(settings: Mapping[str, Any], recipe: Recipe, channels: int) -> DenseSplits:
    """The images of a run."""
    options: dict[str, Any] = {name: settings[name] for name in ("val", "split", "seed")}
    options |= dict(channels=channels, scenes_size=recipe.image_size or SCENES, method=settings.get("hold_out", 1))
    with outside_allowed(settings.get("allow_outside", False)):
        return resolve_dense(settings["data"], settings["task"], **options)


def crop_size(recipe: Recipe) -> tuple[int, int]:
    """Height and width of a person's image: four to three, the width in steps of 32."""
    height = recipe.image_size or 256
    return height, max(32, round(height * 3 / 4 / 32) * 32)


def _side(recipe: Recipe) -> int:
    return recipe.eval_size or recipe.image_size or LARGEST


def _make_model(
    settings: Mapping[str, Any], recipe: Recipe, splits: DenseSplits, *, pretrained: bool
) -> tuple[Any, dict[str, Any]]:
    """The model as it will be trained, and the arguments that `make_dense_model` makes it from for so many classes."""
    head = settings["head"]
    own = {name: settings[name] for name in ("neck", "neck_args", "broadcast", "broadcast_args") if settings[name]}
    if settings["neck"] == "map":  # says also that it is not what the first version called so
        own |= dict(pool=settings["pool"], pool_args=settings["pool_args"])
    arguments: dict[str, Any] = dict(head=head, backbone=settings["model"], **own)
    arguments["head_args"] = {**_sizes(head, settings["task"], recipe, splits), **settings["head_args"]}
    arguments["backbone_args"] = parts.with_rates(settings["model_args"], recipe)
    make = partial(make_dense_model, **arguments, num_classes=len(splits.classes), pretrained_backbone=pretrained)
    model = parts.created(make, f"{head} on {settings['model']}", settings, pretrained)
    model.stages.frozen_stats = recipe.frozen_stats
    return model, arguments


def _sizes(head: str, task: str, recipe: Recipe, splits: DenseSplits) -> dict[str, Any]:
    """Options of a model's builder that follow from the recipe and the data."""
    side = _side(recipe)
    if task == "segment":
        return {}
    points = {"num_keypoints": len(splits.keypoint_names)} if task == "keypoints" else {}
    if HEADS[head].top_down:
        return {**points, "input_size": list(crop_size(recipe))}
    if HEADS[head].square:
        return {"image_size": [side, side]}
    return {**points, "image_size": [side, recipe.long_side or round(side * 1333 / 800)]}  # detectors see that whole


def views_of(task: str, recipe: Recipe) -> Views:
    """How validation images are shown: in one view; to segmenters in the size of training."""
    if task != "segment":
        return Views(flip=False)
    return Views(short_side=_side(recipe), long_side=recipe.long_side or 4 * _side(recipe))


def _describe(
    settings: Mapping[str, Any], recipe: Recipe, splits: DenseSplits, model: Any, given: dict[str, Any], how: Any
) -> dict[str, Any]:
    stages, side = model.stages, _side(recipe)
    check_arguments("dense_model", given, "--model-args")  # or the run could not be opened again
    config = dict(input_size=[stages.in_chans, side, side], mean=stages.mean, std=stages.std)
    config |= dict(num_classes=len(splits.classes))
    about = dict(architecture="dense_model", num_features=stages.channels[-1], model_args=given, pretrained_cfg=config)
    found = describe(settings, recipe, splits, model, how, **about)
    ids = {str(label): number for label, number in splits.train.category_ids.items()}
    pairs = {name: [list(pair) for pair in getattr(splits, name)] for name in ("flip_pairs", "skeleton")}
    names, offset = list(splits.keypoint_names), splits.keypoint_offset
    labels = dict(category_ids=ids, keypoint_names=names, keypoint_offset=offset, **pairs)
    return found | {"broadsight": {**found["broadsight"], "goal": GOALS[settings["task"]], "labels": labels}}
