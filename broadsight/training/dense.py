"""What dense tasks bring to a run: images with objects, a model on any model, its description and its work."""

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
from ..data.loading import EvalOrder, TrainOrder, default_workers, load
from ..data.seeds import seed_everything
from ..dense.registry import make_dense_model
from ..dense.scoring import Views, make_scorer
from ..errors import first_line
from ..models.from_run import check_arguments
from ..visual.metrics import GOALS
from ..weights.loading import begin_dense
from .classification import (
    Begun,
    Parts,
    check_fields,
    check_passes,
    failure,
    fit_batch,
    image_channels,
    opening,
    size_of,
)
from .objectives.dense import DenseWork
from .recipes import FIXED, Recipe
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
    rank, count, task = accelerator.process_index, accelerator.num_processes, settings["task"]
    seed, channels = settings["seed"], image_channels(settings)
    scenes = settings["data"].partition(":")[0] == "scenes"
    splits = data_of(settings, recipe, channels)
    if not scenes:
        look_at_some(splits)
    splits.description["contents"] = contents({"train": splits.train, "val": splits.val})
    notes = list(splits.notes)
    size = recipe.image_size or (SCENES if scenes else size_of(splits.train, settings["data"], LARGEST))
    recipe = recipe.change({"image_size": size, "eval_size": recipe.eval_size or size})
    top_down = settings["head"] == "simple_baseline"
    learned_from, shown = images_of(splits, recipe, top_down)
    if not begun.stored:  # else that was done when it began
        recipe = fit_batch(recipe, request, len(learned_from), count, notes)

    seed_everything(seed)
    model, arguments = make_model(settings, recipe, splits, pretrained=recipe.pretrained and not begun.weighted)
    if not begun.stored:
        check_fields(request, recipe, settings, model)
    if settings["init"] and not begun.weighted:
        notes.append(f"begins from {begin_dense(model, settings['init'])}")
    order = TrainOrder(
        learned_from,
        recipe.batch_size,
        seed=seed,
        rank=rank,
        processes=count,
        accumulate=recipe.accumulate,
        updates=recipe.epoch_updates,
    )

    def work(wrapped: nn.Module, plain: Any) -> DenseWork:
        workers = default_workers(count) if request.workers is None else request.workers
        common: dict[str, Any] = dict(workers=workers, pin_memory=accelerator.device.type == "cuda")
        transforms = None if top_down else transforms_of(recipe, settings)
        built = [
            None if transforms is None else transforms.build(training, splits.flip_pairs) for training in (True, False)
        ]
        learned = DenseDataset(learned_from, built[0], seed=seed, training=True, strict=request.strict)
        judged = DenseDataset(shown, built[1], strict=request.strict)
        per_pass = max(1, recipe.batch_size // (recipe.accumulate * count))
        return DenseWork(
            accelerator,
            wrapped,
            load(learned, order, **common),
            order,
            load(judged, EvalOrder(shown, per_pass, rank=rank, processes=count), **common),
            make_scorer(
                task,
                splits.val,
                splits.classes,
                top_down=top_down,
                flip_pairs=splits.flip_pairs,
                keypoint_offset=splits.keypoint_offset,
                views=views_of(task, recipe),
                device=accelerator.device,
            ),
            stacked=task == "segment" or top_down,
        )

    description = describe(settings, recipe, splits, model, arguments, begun.how)
    if not begun.stored:
        description = opening(description, model)
        height, width = crop_size(recipe) if top_down else (size, size)
        image = torch.zeros(channels, height, width)
        check_passes(model, image[None] if task == "segment" or top_down else [image], None, size)
    objects = splits.description.get("objects")
    held = f", {objects['train']:,} objects" if objects and objects["train"] else ""
    unit = "crops of objects" if top_down else "images"
    return Parts(
        model=model,
        recipe=recipe,
        order=order,
        work=work,
        compile=_compile,
        description=description,
        summary=(
            f"{len(learned_from):,} {unit} of {len(splits.classes)} classes{held}, {len(splits.val):,} images to "
            f"validate, at {size} px"
        ),
        notes=tuple(notes),
        splits=splits,
    )


def data_of(settings: Mapping[str, Any], recipe: Recipe, channels: int) -> DenseSplits:
    """The images of a run."""
    with outside_allowed(settings.get("allow_outside", False)):
        return resolve_dense(
            settings["data"],
            settings["task"],
            val=settings["val"],
            split=settings["split"],
            seed=settings["seed"],
            channels=channels,
            scenes_size=recipe.image_size or SCENES,
            method=settings.get("hold_out", 1),
        )


def look_at_some(splits: DenseSplits) -> None:
    """Read some images and labels of both parts, so that what cannot be meant is refused before a run is begun."""
    for view in (splits.train, splits.val):
        for index in range(0, len(view), max(1, len(view) // LOOKED_AT)):
            with suppress(UnreadableImage), within_memory():  # which training skips
                view[index]


def _compile(model: Any) -> None:
    """The backbone alone: what follows depends on the content of images."""
    model.stages.compile()


def images_of(splits: DenseSplits, recipe: Recipe, top_down: bool) -> tuple[Any, Any]:
    """What is learned from, and what is judged on: images, or crops of their objects."""
    if not top_down:
        return splits.train, splits.val
    common: dict[str, Any] = dict(input_size=crop_size(recipe), pairs=splits.flip_pairs)
    scale = max(1 - recipe.resize[0], recipe.resize[1] - 1)
    learned = PoseCrops(
        splits.train, training=True, rotation=recipe.rotation, scale=scale, hflip=recipe.hflip, **common
    )
    return learned, PoseCrops(splits.val, training=False, **common)


def crop_size(recipe: Recipe) -> tuple[int, int]:
    """Height and width of a person's image: four to three, in whole cells of the last map."""
    height = recipe.image_size or 256
    return height, max(32, round(height * 3 / 4 / 32) * 32)


def transforms_of(recipe: Recipe, settings: Mapping[str, Any]) -> DenseTransforms:
    return DenseTransforms(
        settings["task"],
        recipe.image_size or LARGEST,
        long_side=recipe.long_side,
        resize=recipe.resize,
        crop=recipe.crop,
        hflip=recipe.hflip,
        color_jitter=recipe.color_jitter,
        fixed=settings["head"] in FIXED,
    )


def make_model(
    settings: Mapping[str, Any], recipe: Recipe, splits: DenseSplits, *, pretrained: bool
) -> tuple[Any, dict[str, Any]]:
    """The model as it will be trained, and the arguments that `make_dense_model` makes it from again."""
    head, backbone_args = settings["head"], dict(settings["model_args"])
    rates = {"drop_path_rate": recipe.drop_path, "drop_rate": recipe.drop_rate}
    backbone_args |= {name: rate for name, rate in rates.items() if rate is not None and name not in backbone_args}
    arguments: dict[str, Any] = dict(
        head=head,
        backbone=settings["model"],
        num_classes=len(splits.classes),
        neck=settings["neck"],
        neck_args=settings["neck_args"] or None,
        head_args={**sizes_of(head, settings["task"], recipe, splits), **settings["head_args"]},
        backbone_args=backbone_args,
        broadcast=settings["broadcast"],
        broadcast_args=settings["broadcast_args"] or None,
    )
    try:
        model: Any = make_dense_model(**arguments, pretrained_backbone=pretrained)
    except (ValueError, ImportError):
        raise
    except TypeError as error:
        raise ValueError(f"{head} on {settings['model']} cannot be created: {first_line(error)}") from None
    except Exception as error:
        what = (
            f"the pretrained weights of {settings['model']} cannot be had"
            if pretrained
            else f"{head} on {settings['model']} cannot be created"
        )
        kind = RuntimeError if pretrained else failure(settings)
        raise kind(f"{what}: {first_line(error)}") from None
    model.stages.frozen_stats = recipe.frozen_stats
    return model, {name: value for name, value in arguments.items() if value is not None}


def sizes_of(head: str, task: str, recipe: Recipe, splits: DenseSplits) -> dict[str, Any]:
    """Options of a model's builder that follow from the recipe and the data."""
    side = recipe.eval_size or recipe.image_size or LARGEST
    if task == "segment":
        return {}
    points = {"num_keypoints": len(splits.keypoint_names)} if task == "keypoints" else {}
    if head == "simple_baseline":
        return {**points, "input_size": list(crop_size(recipe))}
    if head in FIXED:
        return {"image_size": [side, side]}
    return {**points, "image_size": [side, recipe.long_side or round(side * ASPECT)]}


def views_of(task: str, recipe: Recipe) -> Views:
    """What a model in training is shown of an image to judge it: one view; of segmenters, in the size they learn."""
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
    """config.json: what timm reads to load the run, and below "broadsight" what it was and what its labels mean."""
    stages, side = model.stages, recipe.eval_size or recipe.image_size or LARGEST
    given = {name: value for name, value in arguments.items() if name != "num_classes"}
    check_arguments("dense_model", given, "--model-args")  # else nobody could open the run again
    return {
        "architecture": "dense_model",
        "num_classes": len(splits.classes),
        "num_features": stages.channels[-1],
        "label_names": list(splits.classes),
        "model_args": given,
        "pretrained_cfg": {
            "input_size": [stages.in_chans, side, side],
            "mean": stages.mean,
            "std": stages.std,
            "num_classes": len(splits.classes),
        },
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
