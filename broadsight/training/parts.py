"""What a task brings to a run, and the steps that all tasks share: order, loaders, batch, and checks of the model."""

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from ..data.loading import EvalOrder, SourceDataset, TrainOrder, default_workers, load
from ..errors import first_line, is_usage
from ..inspection.meta_pass import image_size, in_eval_mode
from ..surgery.pooling import ANY_SIZE
from .augmentation import LARGEST
from .objectives.objective import Work
from .recipes import DEPTH, DROPOUT, GROUPS, Recipe, refuse_ignored
from .request import Request
from .run_folder import CONFIG
from .settings import ARGUMENTS

SMALLEST = 64  # pixels that are chosen for images of unknown size


class Begun(NamedTuple):
    """What there is of a run before it is prepared."""

    stored: bool  # its folder exists and describes it
    weighted: bool  # a checkpoint holds its weights
    how: Mapping[str, Any]  # it is run, for its description


class Parts(NamedTuple):
    """What a task brings to a run."""

    model: nn.Module  # on the CPU
    recipe: Recipe  # with what the data have decided
    order: TrainOrder
    work: Callable[[nn.Module, nn.Module], Work]  # from the model as it is trained, and without what wraps it
    description: dict[str, Any]  # config.json
    summary: str  # images and their size, in a few words
    notes: tuple[str, ...]  # for the user
    splits: Any  # the data


def order_of(
    source: Any, recipe: Recipe, settings: Mapping[str, Any], accelerator: Accelerator, repeats: int = 1
) -> TrainOrder:
    """The order of training images for this process."""
    shares = dict(rank=accelerator.process_index, processes=accelerator.num_processes, accumulate=recipe.accumulate)
    extent = dict(repeats=repeats, updates=recipe.epoch_updates)
    return TrainOrder(source, recipe.batch_size, seed=settings["seed"], **shares, **extent)


def loaders(
    learned: SourceDataset, judged: SourceDataset, order: TrainOrder, request: Request, accelerator: Accelerator
) -> tuple[DataLoader, DataLoader]:
    """Batches of training and of evaluation for this process, the latter of as many images as a training pass."""
    rank, count = accelerator.process_index, accelerator.num_processes
    workers = default_workers(count) if request.workers is None else request.workers
    common: dict[str, Any] = dict(workers=workers, pin_memory=accelerator.device.type == "cuda")
    per_pass = max(1, order.batch // (order.accumulate * count))
    judging = EvalOrder(judged.source, per_pass, rank=rank, processes=count)
    return load(learned, order, **common), load(judged, judging, **common)


def check_fields(request: Request, recipe: Recipe, settings: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse fields of the recipe that the user has set and that the model ignores."""
    modules = list(model.modules())
    dropout = not settings["pool"] or any(isinstance(one, nn.Dropout) and one.p > 0 for one in modules)
    depth = not recipe.drop_path or any(getattr(one, "drop_prob", None) for one in modules)  # as timm calls it
    of_model = {
        GROUPS: None if getattr(model, "has_groups", False) else "this has none",
        DROPOUT: None if dropout or not recipe.drop_rate else f"--pool {settings['pool']} has none",
        DEPTH: None if depth else "this has none",
    }
    refuse_ignored(request.changes, recipe, settings["task"], settings["head"], of_model)


def opening(description: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The description with what a folder has to say so that the same model is made again; else a ValueError."""
    height, width = image_size(model)  # timm would make a model for the size that it is tested at
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
    with tempfile.TemporaryDirectory() as place, torch.random.fork_rng(devices=[]):
        Path(place, CONFIG).write_text(json.dumps(description), encoding="utf-8")
        try:
            try:
                with torch.device("meta"):
                    again = timm.create_model(f"local-dir:{place}", pretrained=False)
            except Exception:  # some models compute with their weights when they are made
                again = timm.create_model(f"local-dir:{place}", pretrained=False)
        except Exception as error:
            return first_line(error)
    shapes, found = ({name: value.shape for name, value in one.state_dict().items()} for one in (model, again))
    wrong = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
    return f"{wrong[0]} would be another" if wrong else None


def check_passes(model: Any, images: Any, classes: int | None, size: int) -> None:
    """Refuse a model that does not take images of so many pixels, or does not tell its classes apart, if it has any."""
    with torch.random.fork_rng(devices=[]), in_eval_mode(model):
        try:
            found = model(images)
        except Exception as error:
            fault = f"the model does not take images of {size} pixels: {first_line(error)}"
            raise ValueError(f"{fault}; see --size and --model-args") from None
    if classes is not None and tuple(found.shape) != (1, classes):
        raise ValueError(f"the model answers {tuple(found.shape)}, expected (1, {classes}); see --model-args")


def size_of(source: Any, data: str, largest: int = LARGEST) -> int:
    """Pixels to train at: the middle of the images' short sides, in steps of 32 from SMALLEST to `largest`."""
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


def fit_batch(
    recipe: Recipe, request: Request, images: int, accelerator: Accelerator, begun: Begun, notes: list[str]
) -> Recipe:
    """A smaller batch for few images, where the recipe allows it and the user has asked for none."""
    if begun.stored or not recipe.fit_batch or "batch_size" in request.changes:
        return recipe
    pairs = 2 if recipe.mixup or recipe.cutmix else 1  # which are mixed
    share = recipe.accumulate * accelerator.num_processes * pairs
    # A few updates an epoch, or there would be little to see
    fitting = max(2, min(recipe.batch_size, images // 4 or 1)) // share * share or share
    if fitting >= recipe.batch_size:
        return recipe
    notes.append(f"batch of {fitting} instead of {recipe.batch_size}, since there are {images} training images")
    return recipe.change({"batch_size": fitting})


def with_rates(arguments: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """A model's arguments with the recipe's rates of stochastic depth and dropout, where they are not given."""
    rates = {"drop_path_rate": recipe.drop_path, "drop_rate": recipe.drop_rate}
    return {**{key: rate for key, rate in rates.items() if rate is not None}, **arguments}


def created(make: Callable[[], Any], what: str, settings: Mapping[str, Any], pretrained: bool) -> Any:
    """The model that `make` returns; errors of timm's and of models' own code become one line about `what`."""
    try:
        return make()
    except Exception as error:
        if isinstance(error, ValueError) or (isinstance(error, ImportError) and is_usage(error)):
            raise
        if pretrained and not isinstance(error, TypeError):
            failure = f"the pretrained weights of {settings['model']} cannot be had"
            raise RuntimeError(f"{failure}: {first_line(error)}") from None
        # A wrong usage where the model's arguments were given, otherwise its own failure
        usage = isinstance(error, TypeError) or any(settings[key] for key in ARGUMENTS)
        raise (ValueError if usage else RuntimeError)(f"{what} cannot be created: {first_line(error)}") from None
