"""What a run is, how a folder says so, and what becomes of a request."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
from torch import nn

from ..data.contents import same_contents
from ..data.loading import Transforms
from ..data.seeds import SCHEME
from ..data.sources import Splits
from ..data.stratify import METHOD
from ..dense.build import USUAL, models_for
from ..errors import check_arguments
from ..files import numbers_taken
from ..models.from_run import check_arguments as check_stored_arguments
from ..provenance import commit, now, versions
from ..surgery.broadcasting import add_context_broadcast
from ..surgery.pooling import SIZE_ARGUMENTS, check_pool_arguments
from . import processes, recipes
from .decided import refuse_decided
from .history import check_own_data
from .lock import LOCK
from .recipes import Recipe
from .request import Request
from .run_folder import CONFIG, RunFolder, is_run

DEFAULT_MODEL = "emsnet_xxtiny"
EDITS = ("pool", "pool_args", "broadcast", "broadcast_args")
# What stays of timm's description of a model once it is trained on something else.
KEPT = ("fixed_input_size", "crop_mode", "pool_size", "first_conv", "classifier", "min_input_size", "license")

# What a run is: these are written into its folder and cannot change when it is continued. The rest is how it is run.
IDENTITY = ("data", "val", "split", "root", "model", "model_args", "pool", "pool_args", "broadcast", "broadcast_args")
IDENTITY += ("recipe", "init", "seed", "log_every", "task", "head", "head_args", "neck", "neck_args")
# What runs have that were begun before there were dense tasks, and hold-outs that look at classes.
BEFORE_DENSE = dict(task="classify", head=None, head_args={}, neck=None, neck_args={}, hold_out=1)
ARGUMENTS = ("model_args", "pool_args", "broadcast_args", "head_args", "neck_args")


def settings_of(request: Request, stored: dict[str, Any] | None) -> tuple[dict[str, Any], Recipe]:
    """The run's identity and its recipe; of an earlier run, that one's, if the request does not contradict it."""
    if stored is not None:
        settings, recipe = BEFORE_DENSE | stored["settings"], Recipe().change(stored["recipe"])
        check_own_data(settings, request.data)
        if settings.get("seeds", 1) != SCHEME:
            raise ValueError(
                f"the run in {request.out} was begun by a version that drew other random numbers, so it cannot be "
                "resumed exactly; resume it with that version, or train anew in another --out"
            )
        if recipe.teacher and recipe.teacher != request.changes.get("teacher") and ":" in recipe.teacher:
            raise ValueError(
                f"{request.out} holds a run with teacher={_short(recipe.teacher)}, which would be fetched; "
                "give that teacher again to allow it"
            )
        settings["allow_outside"] = bool(settings.get("allow_outside")) or request.allow_outside
        before = settings.get("changes", {})  # in the user's own words, where the data have completed them since
        for name in IDENTITY:
            asked = getattr(request, name)
            if asked is not None and not _agrees(json.loads(json.dumps(asked)), settings[name]):
                raise ValueError(
                    f"{request.out} holds a run with {name}={settings[name]}, not {name}={asked}; "
                    "leave that out to continue it, or choose another --out"
                )
        for name in request.changes:
            same = name in before and json.loads(json.dumps(request.changes[name])) == before[name]
            if not same and recipe.change({name: request.changes[name]}) != recipe:
                raise ValueError(
                    f"{request.out} holds a run with {name}={getattr(recipe, name)}, not {request.changes[name]}; "
                    "leave that out to continue it, or choose another --out"
                )
        return settings, recipe
    if request.task not in (None, "classify", *USUAL):
        known = ", ".join(map(repr, ("classify", *USUAL)))
        raise ValueError(f"--task: expected one of {known}, not {request.task!r}")
    entry = recipes.find(request.recipe or _usual_recipe(request))
    if request.task not in (None, entry.task):
        raise ValueError(f"recipe {entry.name} is for --task {entry.task}, not {request.task}; name another of them")
    recipe = entry.recipe.change(request.changes)
    if request.init and recipe.pretrained and "pretrained" in request.changes:
        raise ValueError(f"--init {request.init} and pretrained=true are two beginnings; expected one of them")
    if request.init and recipe.pretrained:
        recipe = recipe.change({"pretrained": False})  # the weights come from elsewhere
    settings = {name: getattr(request, name) for name in IDENTITY}
    settings |= {name: dict(getattr(request, name)) for name in ARGUMENTS}
    settings["changes"] = dict(request.changes)
    settings["allow_outside"] = request.allow_outside
    settings["recipe"] = entry.name
    settings["data"] = request.data or "scenes"
    settings["seed"] = 0 if request.seed is None else request.seed
    settings["log_every"] = request.log_every or 10
    settings["task"] = entry.task
    settings["hold_out"], settings["seeds"] = METHOD, SCHEME
    settings["model"] = request.model or entry.model or DEFAULT_MODEL
    _refuse_ignored(request, settings)
    _settle_head(settings, entry)
    recipes.refuse_ignored(
        request.changes, recipes.facts_of(recipe, settings["task"], settings["head"], request.changes)
    )
    if settings["model"] == entry.model:
        settings["model_args"] = {**entry.model_args, **settings["model_args"]}
        if request.pool in (None, entry.pool):
            settings["pool"], settings["pool_args"] = entry.pool, {**entry.pool_args, **settings["pool_args"]}
    refuse_decided(settings, request.changes)
    for name in ("pool", "broadcast"):
        if settings[f"{name}_args"] and not settings[name]:
            raise ValueError(f"--{name}-args without --{name}; name one, or leave them out")
    check_pool_arguments(settings["pool"], request.pool_args, "--pool-args")
    if settings["pool"] == "map-light":
        raise ValueError("map-light only infers; train --pool map, and lighten what it has learned")
    if ":" in settings["model"]:
        raise ValueError(f"--model {settings['model']} is a place; give the model's name and that place as --init")
    if recipe.distill != "none" and settings["pool"] in ("map", "ga", "cap"):
        options = dict(settings["pool_args"].get("pool_options", {}))
        settings["pool_args"]["pool_options"] = {"distill_tokens": 1, **options}
    return settings, recipe


def _refuse_ignored(request: Request, settings: Mapping[str, Any]) -> None:
    """Refuse what is asked for and would have no effect."""
    here, classify = f"this is --task {settings['task']}", settings["task"] == "classify"
    facts = {"dense tasks": here if classify else None, "--task classify": None if classify else here}
    request.refuse_ignored(facts)
    check_arguments(add_context_broadcast, request.broadcast_args, "--broadcast-args", ("model", "kind"))


def _settle_head(settings: dict[str, Any], entry: recipes.Entry) -> None:
    """What is put on the model: as asked for, else as the recipe has it, else as is usual for the task."""
    if settings["task"] == "classify":
        return
    if settings["pool"]:
        raise ValueError(
            f"--pool {settings['pool']} with --task {settings['task']}, where nothing is pooled; --neck map puts "
            "multi-token attention before the decoder"
        )
    settings["neck"] = settings["neck"] or entry.neck or "fpn"
    if settings["neck"] == entry.neck:
        settings["neck_args"] = {**entry.neck_args, **settings["neck_args"]}
    settings["head"] = settings["head"] or entry.head or USUAL[settings["task"]]
    known = models_for(settings["task"])
    if settings["head"] not in known:
        raise ValueError(f"--head {settings['head']} with --task {settings['task']}; expected {', '.join(known)}")
    if settings["head"] == entry.head:
        settings["head_args"] = {**entry.head_args, **settings["head_args"]}


def _usual_recipe(request: Request) -> str:
    """What is trained if nobody says how: scenes as the demonstration does, anything else by what it begins from."""
    if request.task not in (None, "classify"):
        return f"{request.task}-quick"
    if request.init or str(request.changes.get("pretrained", "")).lower() == "true":
        return "finetune"
    drawn = request.data is None or request.data.partition(":")[0] == "scenes"
    return "scenes" if drawn and request.model is None else "quick"


def _agrees(asked: Any, stored: Any) -> bool:
    """Whether all that was asked for is stored; a recipe may have added to a pooling's arguments."""
    if isinstance(asked, dict) and isinstance(stored, dict):
        return all(key in stored and _agrees(value, stored[key]) for key, value in asked.items())
    return asked == stored


def model_arguments(settings: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """What timm needs to make the model again: its arguments, and its size if it is built for a single one."""
    name, size = settings["model"], recipe.image_size
    known = ":" not in name and timm.is_model(name.split(".")[0])
    config = timm.models.get_pretrained_cfg(name) if known else None
    single = bool(config and config.fixed_input_size) and recipe.eval_size in (None, size)
    return ({"img_size": size} if single else {}) | settings["model_args"]


def describe(
    settings: Mapping[str, Any],
    recipe: Recipe,
    splits: Splits,
    model: Any,
    transforms: Transforms,
    how: Mapping[str, Any],
) -> dict[str, Any]:
    """config.json of a classifier: what timm reads to load the run, and below "broadsight" what it was.

    Args:
        how: What else is worth a record: the command, the processes.
    """
    arguments, architecture = model_arguments(settings, recipe), settings["model"].split(".")[0]
    if settings["pool"] or settings["broadcast"]:
        arguments |= {"backbone": settings["model"], **{key: settings[key] for key in EDITS if settings[key]}}
        architecture = "edited"
    check_stored_arguments(architecture, arguments, "--model-args")  # else nobody could open the run again
    config = {k: v for k, v in model.pretrained_cfg.items() if v is not None and k in KEPT}
    side = recipe.eval_size or transforms.size
    config |= dict(
        input_size=[transforms.channels, side, side],
        mean=transforms.mean,
        std=transforms.std,
        crop_pct=transforms.crop_pct,
        interpolation=transforms.interpolation if transforms.interpolation != "random" else "bicubic",
        num_classes=len(splits.classes),
    )
    return {
        "architecture": architecture,
        "num_classes": len(splits.classes),
        "num_features": model.num_features,
        "label_names": list(splits.classes),
        "model_args": arguments,
        "pretrained_cfg": config,
        "broadsight": history(settings, recipe, splits.description, model, how),
    }


def history(
    settings: Mapping[str, Any], recipe: Recipe, data: Mapping[str, Any], model: nn.Module, how: Mapping[str, Any]
) -> dict[str, Any]:
    """What a run is and where it comes from, of any task."""
    return {
        "task": settings["task"],
        "settings": dict(settings),
        "recipe": asdict(recipe),
        "data": dict(data),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **how,
        "launch": launch(),
        "seed": settings["seed"],
        "versions": versions(),
        "commit": commit(),
        "started": now(),
    }


def check_same(folder: RunFolder, description: Mapping[str, Any], first: bool) -> list[str]:
    """Refuse to continue a run whose model, classes or images are not these; what the user should know."""
    if not is_run(folder.path):
        if first and folder.path.exists() and not _unmade(folder.path):
            raise ValueError(f"{folder.path} exists and holds no run; choose another --out, nothing was changed")
        return []
    there, here = folder.config(), json.loads(json.dumps(description))
    for one in (there, here):  # which follow from the settings, and which older runs do not have
        one["model_args"] = {k: v for k, v in (one.get("model_args") or {}).items() if k not in SIZE_ARGUMENTS}
    for key in ("architecture", "num_classes", "label_names", "model_args"):
        if there.get(key) != here[key]:
            old, new = _short(there.get(key)), _short(here[key])
            raise ValueError(f"{folder.path} holds a run with {key}={old}, not {new}; choose another --out")
    before, now = there["broadsight"]["data"], here["broadsight"]["data"]
    if before.get("fingerprint") != now.get("fingerprint"):
        raise ValueError(
            f"the images are not those that the run in {folder.path} was begun with; restore them, or another --out"
        )
    if not same_contents(before, now):
        raise ValueError(
            f"the images or labels have their names but not the content that the run in {folder.path} was begun "
            "with; restore them, or another --out"
        )
    if now.get("contents") and not before.get("contents"):
        return ["this run was begun before contents were compared: only names and classes of its images are checked"]
    return []


def _unmade(path: Path) -> bool:
    """Whether a folder is empty, but for what is left of a run that was killed while it made it."""
    return path.is_dir() and all(entry.name == LOCK or entry.match(f".{CONFIG}.*.part") for entry in path.iterdir())


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def stored_in(path: Path) -> dict[str, Any]:
    """What the run in a folder was asked for."""
    config = RunFolder(path).config()
    try:
        stored = config["broadsight"]
        return {"settings": stored["settings"], "recipe": stored["recipe"], "threads": stored["threads"]}
    except (KeyError, TypeError):
        raise ValueError(f"{path} holds a model, but no run of broadsight to continue; choose another --out") from None


def folder_for(request: Request, settings: Mapping[str, Any]) -> Path:
    """The run's folder: as asked for, or the next free number of a name that says what it is."""
    if request.out:
        return Path(request.out)
    data = re.sub(r"\W+", "-", Path(str(settings["data"])).name or "data").strip("-")
    stem = "-".join(filter(None, [data, title(settings)]))
    taken = numbers_taken(Path("runs"), stem)
    number = max(taken, default=0) + 1
    if processes.restarted():  # then it is the run that they had begun, if they had
        begun = (one for one in sorted(taken, reverse=True) if _launch(Path("runs") / f"{stem}-{one}") == launch())
        number = next(begun, number)
    return processes.from_first(Path("runs") / f"{stem}-{number}")


def launch() -> str | None:
    """What torchrun calls this start of all processes and its restarts."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def _launch(path: Path) -> str | None:
    return RunFolder(path).config().get("broadsight", {}).get("launch") if is_run(path) else None


def title(settings: Mapping[str, Any]) -> str:
    """The model in a few words."""
    neck = settings.get("neck") if settings.get("neck") != "fpn" else None
    parts = [settings.get("head"), settings["model"].rpartition("/")[2], settings["pool"], settings["broadcast"], neck]
    return re.sub(r"[^\w.-]+", "-", "-".join(part for part in parts if part))
