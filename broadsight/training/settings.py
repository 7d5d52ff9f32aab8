"""What a run is, how a folder says so, and what becomes of a request."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..data.contents import same_contents
from ..data.seeds import SCHEME
from ..data.stratify import METHOD
from ..dense.build import USUAL, models_for
from ..errors import check_arguments
from ..files import numbers_taken
from ..provenance import commit, now, versions
from ..surgery.broadcasting import add_context_broadcast
from ..surgery.pooling import SIZE_ARGUMENTS, check_pool_arguments
from . import processes, recipes
from .history import check_own_data, short
from .lock import LOCK
from .recipes import Recipe
from .request import Request
from .run_folder import CONFIG, RunFolder, is_run

# What a run is: these are written into its folder and cannot change when it is continued. The rest is how it is run.
IDENTITY = ("data", "val", "split", "root", "model", "model_args", "pool", "pool_args", "broadcast", "broadcast_args")
IDENTITY += ("recipe", "init", "seed", "log_every", "task", "head", "head_args", "neck", "neck_args")
# What runs have that were begun before there were dense tasks, and hold-outs that look at classes.
BEFORE_DENSE = dict(task="classify", head=None, head_args={}, neck=None, neck_args={}, hold_out=1)
LAUNCH = "TORCHELASTIC_RUN_ID"  # where torchrun names a start of all processes and its restarts
ARGUMENTS = ("model_args", "pool_args", "broadcast_args", "head_args", "neck_args")

# Arguments that users cannot give, and what decides each of them; first those of all places where arguments are given
EVERYWHERE = {
    "num_classes": "the classes of DATA decide it",
    "pretrained": "--pretrained begins from timm's weights",
    "cache_dir": "the environment variable HF_HOME says where weights are kept",
    "features_only": "a run trains the whole model; --task asks for another head",
}
FILES = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")
EVERYWHERE |= dict.fromkeys(FILES, "--init begins from a file of weights")
CHOSEN = EVERYWHERE | {"in_chans": "--model-args in_chans=1 or in_chans=3 decides it"}
CHOSEN |= dict.fromkeys(("img_size", "image_size", "input_size"), "--size decides it")
PARTS = dict.fromkeys(("backbone", "stages", "name", "neck", "neck_args"), "--model, --head and --neck decide it")
PARTS |= {"backbone_args": "--model-args are for it", "pretrained_backbone": EVERYWHERE["pretrained"]}
POOLS = CHOSEN | {"light": "a light model only infers; train --pool map"}
HEADS = CHOSEN | PARTS | {"num_keypoints": "the keypoints of DATA decide it"}
DECIDED = dict(model_args=EVERYWHERE, pool_args=POOLS, broadcast_args=CHOSEN, head_args=HEADS, neck_args=CHOSEN)


def settings_of(request: Request, stored: dict[str, Any] | None) -> tuple[dict[str, Any], Recipe]:
    """The run's identity and its recipe; of an earlier run, that one's, if the request does not contradict it."""
    if stored is not None:
        return _continued(request, stored)
    if request.task not in (None, "classify", *USUAL):
        known = ", ".join(map(repr, ("classify", *USUAL)))
        raise ValueError(f"--task: expected one of {known}, not {request.task!r}")
    entry = recipes.find(request.recipe or _usual_recipe(request))
    if request.task not in (None, entry.task):
        raise ValueError(f"recipe {entry.name} is for --task {entry.task}, not {request.task}; name another of them")
    recipe = entry.recipe.change(request.changes)
    if request.init and recipe.pretrained:
        if "pretrained" in request.changes:
            raise ValueError(f"--init {request.init} and pretrained=true are two beginnings; expected one of them")
        recipe = recipe.change({"pretrained": False})  # the weights come from elsewhere
    settings = {name: getattr(request, name) for name in IDENTITY}
    settings |= {name: dict(getattr(request, name)) for name in ARGUMENTS}
    settings |= dict(changes=dict(request.changes), allow_outside=request.allow_outside)
    settings |= dict(recipe=entry.name, task=entry.task, data=request.data or "scenes", seed=request.seed or 0)
    settings |= dict(log_every=request.log_every or 10, hold_out=METHOD, seeds=SCHEME)
    settings["model"] = request.model or entry.model or "emsnet_xxtiny"
    here, classify = f"this is --task {settings['task']}", settings["task"] == "classify"
    request.refuse_ignored({"dense tasks": here if classify else None, "--task classify": None if classify else here})
    check_arguments(add_context_broadcast, request.broadcast_args, "--broadcast-args", ("model", "kind"))
    _settle_head(settings, entry)
    recipes.refuse_ignored(request.changes, recipe, settings["task"], settings["head"], {})
    if settings["model"] == entry.model:
        settings["model_args"] = {**entry.model_args, **settings["model_args"]}
        if request.pool in (None, entry.pool) and settings["neck"] in (None, entry.neck):
            settings["pool"], settings["pool_args"] = entry.pool, {**entry.pool_args, **settings["pool_args"]}
    _refuse_decided(settings, request.changes)
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


def _continued(request: Request, stored: dict[str, Any]) -> tuple[dict[str, Any], Recipe]:
    settings, recipe = BEFORE_DENSE | stored["settings"], Recipe().change(stored["recipe"])
    check_own_data(settings, request.data)
    if settings.get("seeds", 1) != SCHEME:
        what = f"the run in {request.out} was begun by a version that drew other random numbers"
        advice = "resume it with that version, or train anew in another --out"
        raise ValueError(f"{what}, so it cannot be resumed exactly; {advice}")
    if recipe.teacher and recipe.teacher != request.changes.get("teacher") and ":" in recipe.teacher:
        fetched = f"teacher={short(recipe.teacher)}, which would be fetched"
        raise ValueError(f"{request.out} holds a run with {fetched}; give that teacher again to allow it")
    settings["allow_outside"] = bool(settings.get("allow_outside")) or request.allow_outside
    asked = {name: getattr(request, name) for name in IDENTITY}
    others = [
        (name, settings[name], f"{name}={value}")
        for name, value in asked.items()
        if value is not None and not _agrees(json.loads(json.dumps(value)), settings[name])
    ]
    before = settings.get("changes", {})  # in the user's own words, where the data have completed them since
    for name, value in request.changes.items():
        same = name in before and json.loads(json.dumps(value)) == before[name]
        if not same and recipe.change({name: value}) != recipe:
            others.append((name, getattr(recipe, name), value))
    for name, here, other in others[:1]:
        advice = "leave that out to continue it, or choose another --out"
        raise ValueError(f"{request.out} holds a run with {name}={here}, not {other}; {advice}")
    return settings, recipe


def _settle_head(settings: dict[str, Any], entry: recipes.Entry) -> None:
    """What is put on the model: as asked for, else as the recipe has it, else as is usual for the task."""
    task = settings["task"]
    if task == "classify":
        return
    for part, usual in (("neck", "fpn"), ("head", USUAL[task])):
        settings[part] = settings[part] or getattr(entry, part) or usual
        if settings[part] == getattr(entry, part):
            settings[f"{part}_args"] = {**getattr(entry, f"{part}_args"), **settings[f"{part}_args"]}
    if settings["pool"] and settings["neck"] != "map":
        advice = "--neck map feeds the pool's tokens back to the stages"
        raise ValueError(f"--pool {settings['pool']} with --task {task}, where nothing is pooled; {advice}")
    known = models_for(task)
    if settings["head"] not in known:
        raise ValueError(f"--head {settings['head']} with --task {task}; expected {', '.join(known)}")


def _refuse_decided(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Refuse arguments that are decided elsewhere, or by the `changes` to the recipe."""
    for place, table in DECIDED.items():
        flag, given = f"--{place.replace('_', '-')}", settings[place] or {}
        nested = given.get("pool_options")
        for name, value in [*given.items(), *(nested.items() if isinstance(nested, Mapping) else ())]:
            if name in table:
                raise ValueError(f"{flag} {name}={value}; leave it out: {table[name]}")
    given = settings["model_args"]
    channels = given.get("in_chans", 3)
    if isinstance(channels, bool) or channels not in (1, 3) or not isinstance(channels, int):
        raise ValueError(f"--model-args in_chans={channels}; images have 1 channel (grey) or 3 (RGB)")
    for field, name in (("drop_path", "drop_path_rate"), ("drop_rate", "drop_rate")):
        if field in changes and name in given:
            asked = f"--set {field}={changes[field]}"
            raise ValueError(f"{asked} and --model-args {name}={given[name]} are the same; give one")


def _usual_recipe(request: Request) -> str:
    """What is trained if nobody says how: scenes as the demonstration does, anything else by what it begins from."""
    if request.task not in (None, "classify"):
        return f"{request.task}-quick"
    if request.init or str(request.changes.get("pretrained", "")).lower() == "true":
        return "finetune"
    drawn = (request.data or "scenes").partition(":")[0] == "scenes"
    return "scenes" if drawn and request.model is None else "quick"


def _agrees(asked: Any, stored: Any) -> bool:
    """Whether all that was asked for is stored; a recipe may have added to a pooling's arguments."""
    if isinstance(asked, dict) and isinstance(stored, dict):
        return all(key in stored and _agrees(value, stored[key]) for key, value in asked.items())
    return asked == stored


def describe(
    settings: Mapping[str, Any], recipe: Recipe, splits: Any, model: Any, how: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """config.json: what timm reads to load the run, and below "broadsight" what it is and where it comes from."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    about = dict(task=settings["task"], settings=dict(settings), recipe=asdict(recipe), data=dict(splits.description))
    about |= dict(parameters=parameters, **how, launch=os.environ.get(LAUNCH), seed=settings["seed"])
    about |= dict(versions=versions(), commit=commit(), started=now())
    return dict(num_classes=len(splits.classes), label_names=list(splits.classes), **more, broadsight=about)


def check_same(folder: RunFolder, description: Mapping[str, Any], first: bool) -> list[str]:
    """Refuse to continue a run whose model, classes or images are not these; what the user should know."""
    path = folder.path
    if not is_run(path):
        # Such as a run leaves that was killed while it made its folder
        unmade = path.is_dir() and all(e.name == LOCK or e.match(f".{CONFIG}.*.part") for e in path.iterdir())
        if first and path.exists() and not unmade:
            raise ValueError(f"{path} exists and holds no run; choose another --out, nothing was changed")
        return []
    there, here = folder.config(), json.loads(json.dumps(description))
    for one in (there, here):  # sizes follow from the settings, and older runs do not have them
        one["model_args"] = {k: v for k, v in (one.get("model_args") or {}).items() if k not in SIZE_ARGUMENTS}
    for key in ("architecture", "num_classes", "label_names", "model_args"):
        if there.get(key) != here[key]:
            old, new = short(str(there.get(key))), short(str(here[key]))
            raise ValueError(f"{path} holds a run with {key}={old}, not {new}; choose another --out")
    before, now = there["broadsight"]["data"], here["broadsight"]["data"]
    fault = "the images are not those" if before.get("fingerprint") != now.get("fingerprint") else None
    if fault is None and not same_contents(before, now):
        fault = "the images or labels have their names but not the content"
    if fault is not None:
        raise ValueError(f"{fault} that the run in {path} was begun with; restore them, or another --out")
    if now.get("contents") and not before.get("contents"):
        return ["this run was begun before contents were compared: only names and classes of its images are checked"]
    return []


def stored_in(path: str | Path | None) -> dict[str, Any] | None:
    """What the run in a folder was asked for, if it holds one."""
    if not path or not is_run(Path(path)):
        return None
    config = RunFolder(path).config()
    try:
        return {name: config["broadsight"][name] for name in ("settings", "recipe", "threads")}
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
    for one in sorted(taken, reverse=True) if processes.restarted() else ():  # the run that they had begun, if they had
        path = Path("runs") / f"{stem}-{one}"
        if is_run(path) and RunFolder(path).config().get("broadsight", {}).get("launch") == os.environ.get(LAUNCH):
            number = one
            break
    return processes.from_first(Path("runs") / f"{stem}-{number}")


def title(settings: Mapping[str, Any]) -> str:
    """The model in a few words."""
    neck = settings.get("neck") if settings.get("neck") != "fpn" else None
    parts = [settings.get("head"), settings["model"].rpartition("/")[2], settings["pool"], settings["broadcast"], neck]
    return re.sub(r"[^\w.-]+", "-", "-".join(part for part in parts if part))
