"""What a task brings to a run, and what classification brings: its images, model, description and work."""

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import Accelerator
from torch import nn

from ..data.contents import contents
from ..data.inside import outside_allowed
from ..data.loading import EvalOrder, SourceDataset, TrainOrder, default_workers, load
from ..data.seeds import seed_everything
from ..data.sources import Splits, resolve
from ..data.view import labels_of
from ..errors import first_line
from ..inspection.meta_pass import image_size, in_eval_mode
from ..models.edited import edit
from ..surgery.pooling import ANY_SIZE
from ..weights.loading import load_given
from .augmentation import LARGEST, transforms_of
from .objectives.classification import Classification
from .objectives.objective import Work
from .objectives.steps import make_task
from .recipes import DEPTH, DROPOUT, GROUPS, Recipe, facts_of, refuse_ignored
from .request import Request
from .run_folder import CONFIG
from .settings import ARGUMENTS, EDITS, describe, model_arguments

SMALLEST = 64  # pixels that are chosen for images of unknown size


@dataclass(frozen=True)
class Begun:
    """What there is of a run before it is prepared.

    Args:
        stored: Its folder exists and says what it is.
        weighted: A checkpoint holds its weights.
        how: What its description should say of how it is run.
    """

    stored: bool
    weighted: bool
    how: Mapping[str, Any]


@dataclass(frozen=True)
class Parts:
    """What a task brings to a run.

    Args:
        model: The model, on the CPU.
        recipe: With what the data have decided.
        order: Of training images.
        work: Makes the work of the engine from the model as it is trained, and the same without what wraps it.
        compile: Compiles the model in place.
        description: For config.json.
        summary: Images and their size, in a few words.
        notes: What the user should know.
        splits: The data.
    """

    model: nn.Module
    recipe: Recipe
    order: TrainOrder
    work: Callable[[nn.Module, nn.Module], Work]
    compile: Callable[[nn.Module], None]
    description: dict[str, Any]
    summary: str
    notes: tuple[str, ...]
    splits: Any


def classifier_parts(
    request: Request, settings: dict[str, Any], recipe: Recipe, accelerator: Accelerator, begun: Begun
) -> Parts:
    """A classifier and its images."""
    rank, count = accelerator.process_index, accelerator.num_processes
    seed, channels = settings["seed"], image_channels(settings)
    with accelerator.main_process_first():  # a tar is unpacked once
        splits = _data(settings, request, channels, recipe)
    splits.description["contents"] = contents({"train": splits.train, "val": splits.val})
    classes, notes = len(splits.classes), list(splits.notes)
    judged = sorted(set(labels_of(splits.val).tolist()))
    if not judged:
        raise ValueError(f"{splits.description['val']} has no labelled images to validate on; add some")
    if len(judged) == 1:
        notes.append(
            f"the images to validate on are all of one class, {splits.classes[judged[0]]}: whoever always says that "
            "is right, so that no epoch is called the best and the last weights are kept"
        )
    size = recipe.image_size or size_of(splits.train, settings["data"])
    recipe = recipe.change({"image_size": size, "eval_size": recipe.eval_size or size})
    if not begun.stored:  # else that was done when it began
        recipe = fit_batch(recipe, request, len(splits.train), count, notes)

    seed_everything(seed)
    model = make_model(settings, replace(recipe, pretrained=recipe.pretrained and not begun.weighted), classes)
    if not begun.stored:
        check_fields(request, recipe, settings, model)
    if settings["init"] and not begun.weighted:
        load_given(model, settings["init"], other_classes=True)
    transforms = transforms_of(recipe, model.pretrained_cfg, channels)
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": transforms.mean, "std": transforms.std}
    order = TrainOrder(
        splits.train,
        recipe.batch_size,
        seed=seed,
        rank=rank,
        processes=count,
        accumulate=recipe.accumulate,
        repeats=recipe.repeated_aug,
        updates=recipe.epoch_updates,
    )

    def work(wrapped: nn.Module, plain: Any) -> Classification:
        workers = default_workers(count) if request.workers is None else request.workers
        common: dict[str, Any] = dict(workers=workers, pin_memory=accelerator.device.type == "cuda")
        learned = SourceDataset(splits.train, transforms.build(True), seed=seed, training=True, strict=request.strict)
        seen = replace(transforms, size=recipe.eval_size or size).build(False)
        shown = SourceDataset(splits.val, seen, strict=request.strict)
        per_pass = max(1, recipe.batch_size // (recipe.accumulate * count))
        return Classification(
            accelerator,
            make_task(wrapped, plain, recipe, accelerator.device),
            recipe,
            load(learned, order, **common),
            order,
            load(shown, EvalOrder(splits.val, per_pass, rank=rank, processes=count), **common),
            mean=transforms.mean,
            std=transforms.std,
            classes=classes,
            comparable=len(judged) > 1,
        )

    description = describe(settings, recipe, splits, model, transforms, begun.how)
    if not begun.stored:
        description = opening(description, model)
        for side in sorted({size, recipe.eval_size or size}):
            check_passes(model, torch.zeros(1, channels, side, side), classes, side)
    return Parts(
        model=model,
        recipe=recipe,
        order=order,
        work=work,
        compile=lambda model: model.compile(),
        description=description,
        summary=f"{len(splits.train):,} images of {classes} classes, {len(splits.val):,} to validate, at {size} px",
        notes=tuple(notes),
        splits=splits,
    )


def check_fields(request: Request, recipe: Recipe, settings: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse fields of the recipe that the user has set for what the model does not have."""
    modules = list(model.modules())
    dropout = not settings["pool"] or any(isinstance(one, nn.Dropout) and one.p > 0 for one in modules)
    depth = not recipe.drop_path or any(getattr(one, "drop_prob", None) for one in modules)  # as timm calls it
    own = {
        GROUPS: None if getattr(model, "has_groups", False) else "this has none",
        DROPOUT: None if dropout or not recipe.drop_rate else f"--pool {settings['pool']} has none",
        DEPTH: None if depth else "this has none",
    }
    facts = facts_of(recipe, settings["task"], settings["head"], request.changes)
    refuse_ignored(request.changes, {fact: why or own.get(fact) for fact, why in facts.items()})


def image_channels(settings: Mapping[str, Any]) -> int:
    """Of the images that the model takes."""
    return settings["model_args"].get("in_chans", 3)


def opening(description: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """What a folder has to say so that the model is made again as it is; a ValueError if nothing does.

    Of a model for one size that is tested at another, timm would make one for that other size.
    """
    height, width = image_size(model)
    sized = ({"img_size": height if height == width else [height, width], **choice} for choice in ANY_SIZE)
    faults = []
    for more in ({}, *sized):
        said = {**description, "model_args": {**more, **description["model_args"]}}
        if (fault := _fault(said, model)) is None:
            return said
        faults.append(fault)
    raise ValueError(f"the run could not be opened again: {faults[0]}; see its --model-args")


def _fault(description: Mapping[str, Any], model: nn.Module) -> str | None:
    """What is wrong with the model that is made from a description, without content."""
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as place, torch.random.fork_rng(devices=[]):
        Path(place, CONFIG).write_text(json.dumps(description), encoding="utf-8")
        try:
            again = _made_again(place)
        except Exception as error:
            return first_line(error)
    found = {name: value.shape for name, value in again.state_dict().items()}
    wrong = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
    return f"{wrong[0]} would be another" if wrong else None


def _made_again(place: str) -> nn.Module:
    try:
        with torch.device("meta"):
            return timm.create_model(f"local-dir:{place}", pretrained=False)
    except Exception:  # some models compute with their weights when they are made
        return timm.create_model(f"local-dir:{place}", pretrained=False)


def check_passes(model: Any, images: Any, classes: int | None, size: int) -> None:
    """Refuse a model that does not take the images of the run, or does not tell its classes apart.

    Args:
        images: As the model takes them in eval mode.
        classes: How many it must answer with; None for objects.
        size: Pixels of a side, for the message.
    """
    with torch.random.fork_rng(devices=[]), in_eval_mode(model):
        try:
            found = model(images)
        except Exception as error:
            raise ValueError(
                f"the model does not take images of {size} pixels: {first_line(error)}; see --size and --model-args"
            ) from None
    if classes is not None and tuple(found.shape) != (1, classes):
        raise ValueError(f"the model answers {tuple(found.shape)}, expected (1, {classes}); see --model-args")


def _data(settings: Mapping[str, Any], request: Request, channels: int, recipe: Recipe) -> Splits:
    options: dict[str, Any] = {name: settings[name] for name in ("val", "split", "root") if settings[name] is not None}
    if request.download:
        options["download"] = True
    with outside_allowed(settings.get("allow_outside", False)):
        return resolve(
            settings["data"],
            seed=settings["seed"],
            channels=channels,
            scenes_size=recipe.image_size or SMALLEST,
            method=settings.get("hold_out", 1),
            **options,
        )


def failure(settings: Mapping[str, Any]) -> type[Exception]:
    """What a model that cannot be created is: a wrong usage where its arguments were given, or else its own failure."""
    return ValueError if any(settings[key] for key in ARGUMENTS) else RuntimeError


def size_of(source: Any, data: str, largest: int = LARGEST) -> int:
    """Pixels to train at: what most images have, in steps of 32, within what backbones were made for.

    Args:
        source: Has `open(index)`.
    """
    if data.startswith("scenes"):
        return SMALLEST
    sides = []
    for index in range(0, len(source), max(1, len(source) // 32)):
        try:
            sides.append(min(source.open(index).size))
        except ValueError:  # unreadable; the run will report it
            continue
    if not sides:
        raise ValueError(f"none of {len(source)} images looked at in {data} can be read; check that they are images")
    return min(largest, max(SMALLEST, 32 * math.ceil(sorted(sides)[len(sides) // 2] / 32)))


def fit_batch(recipe: Recipe, request: Request, images: int, count: int, notes: list[str]) -> Recipe:
    """A smaller batch for few images, where the recipe allows and the user has not asked for that very one."""
    if not recipe.fit_batch or "batch_size" in request.changes:
        return recipe
    share = recipe.accumulate * count * (2 if recipe.mixup or recipe.cutmix else 1)  # pairs are mixed
    # Some updates an epoch, or there is little to see of it
    fitting = max(2, min(recipe.batch_size, images // 4 or 1)) // share * share or share
    if fitting < recipe.batch_size:
        notes.append(f"batch of {fitting} instead of {recipe.batch_size}, since there are {images} training images")
        return recipe.change({"batch_size": fitting})
    return recipe


def make_model(settings: Mapping[str, Any], recipe: Recipe, classes: int) -> Any:
    """The model as it will be trained, with `pretrained_cfg` saying what it takes from now on."""
    name, given = settings["model"], model_arguments(settings, recipe)
    rates = {"drop_path_rate": recipe.drop_path, "drop_rate": recipe.drop_rate}
    given |= {key: value for key, value in rates.items() if value is not None and key not in given}
    given |= dict(num_classes=classes, pretrained=recipe.pretrained)
    edits = {key: settings[key] for key in EDITS if settings[key]}
    try:
        model: Any = edit(name, **edits, **given)
    except ValueError:
        raise
    except TypeError as error:
        raise ValueError(f"{name} cannot be created: {first_line(error)}") from None
    except Exception as error:
        reason = first_line(error)
        if recipe.pretrained:
            raise RuntimeError(f"the pretrained weights of {name} cannot be had: {reason}") from None
        raise failure(settings)(f"{name} cannot be created: {reason}") from None
    return model
