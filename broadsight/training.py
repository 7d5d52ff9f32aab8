"""From what a user asks for to a run: data, network, recipe and folder put together, or an earlier run continued."""

import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import Accelerator

from .checkpoint import read_file, weights_in
from .data.loading import EvalOrder, Pictures, TrainOrder, Transforms, default_workers, load
from .data.sources import Source, Splits, resolve
from .models.edited import edit
from .provenance import commit, versions
from .seeds import seed_everything
from .train import processes, recipes
from .train.classification import Classification
from .train.display import Display
from .train.engine import Engine, Progress, total_pictures
from .train.optimisation import make_average, make_optimizer, make_scheduler
from .train.recipes import Recipe
from .train.run_folder import RunFolder, is_run
from .train.synchronise import synchronise
from .train.tasks import make_task

DEFAULT_MODEL = "emsnet_xxtiny"
SMALLEST, LARGEST = 64, 224  # pixels that are chosen for pictures of unknown size


@dataclass(frozen=True)
class Request:
    """What a user asks for; whatever is None is left to the recipe, the data, the model or the earlier run.

    Args:
        data, val, split, root, download: As for `broadsight.data.sources.resolve`.
        model, model_args: A timm name, and arguments for it.
        pool, pool_args: Another pooling; see `swap_pool`.
        broadcast, broadcast_args: Context broadcasting; see `add_context_broadcast`.
        recipe: A recipe's name.
        changes: Fields of the recipe, as text or values.
        init: A run folder or a file of weights to begin from.
        out: The run's folder; made up from data and model if None.
        seed, strict: Of everything random; an unreadable picture is an error.
        workers, threads, device, processes: Processes that load data, threads of torch's operators, "auto", "cpu" or
            "cuda", and how many training processes there must be.
        log_every, checkpoint_minutes: See `Engine`.
    """

    data: str | None = None
    val: str | None = None
    split: float | None = None
    root: str | None = None
    download: bool = False
    model: str | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)
    pool: str | None = None
    pool_args: Mapping[str, Any] = field(default_factory=dict)
    broadcast: str | None = None
    broadcast_args: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    init: str | None = None
    out: str | None = None
    seed: int | None = None
    strict: bool = False
    workers: int | None = None
    threads: int | None = None
    device: str = "auto"
    processes: int | None = None
    log_every: int | None = None
    checkpoint_minutes: float = 10.0


# What a run is: these are written into its folder and cannot change when it is continued. The rest is how it is run.
IDENTITY = ("data", "val", "split", "root", "model", "model_args", "pool", "pool_args", "broadcast", "broadcast_args")
IDENTITY += ("recipe", "init", "seed", "log_every")


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        folder: The run.
        progress: Where it stands.
        parameters: Of the network.
        seconds: That this part of it took.
        notes: What the user should know.
    """

    folder: Path
    progress: Progress
    parameters: int
    seconds: float
    notes: tuple[str, ...]


def train(request: Request, *, resume: bool = False, command: str = "", plain: bool = False) -> Outcome:
    """Train a network, or continue a run to the same result as if it had never stopped.

    Args:
        resume: Continue the run in `request.out`. Options given again must agree with it.
        command: What was typed, for the record.
        plain: Plain lines in a terminal too.
    """
    started = time.monotonic()
    stored = None
    resume = resume or processes.restarted()
    if request.out and is_run(Path(request.out)):
        stored = _stored(Path(request.out))
        if not resume:
            raise ValueError(
                f"{request.out} holds a run of {stored['settings']['model']} already; "
                "--resume continues it, another --out starts a new one"
            )
    elif request.out and resume and not processes.restarted() and not Path(request.out).is_dir():
        raise FileNotFoundError(f"there is no run in {request.out} to resume")
    elif resume and not request.out and not processes.restarted():
        raise ValueError("--resume needs --out, the folder of the run to continue")
    settings, recipe = _settings(request, stored)
    if recipe.precision == "fp16" and "precision" not in request.changes and not processes.has_gpu(request.device):
        recipe = recipe.change({"precision": "fp32"})  # of a published recipe, which should run on a laptop too
    accelerator = processes.connect(request.device, recipe.precision, request.processes)
    try:
        outcome = _train(request, settings, recipe, accelerator, resume, command, plain, started)
    finally:
        if accelerator.num_processes > 1:
            processes.leave()
    return outcome


def _train(
    request: Request,
    settings: dict[str, Any],
    recipe: Recipe,
    accelerator: Accelerator,
    resume: bool,
    command: str,
    plain: bool,
    started: float,
) -> Outcome:
    first, count = accelerator.is_main_process, accelerator.num_processes
    threads = request.threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, (os.cpu_count() or 1) // count)
    torch.set_num_threads(threads)
    seed = settings["seed"]
    channels = int(settings["model_args"].get("in_chans", 3))
    with accelerator.main_process_first():  # a tar is unpacked once
        splits = _data(settings, request, channels, recipe)
    classes, notes = len(splits.classes), list(splits.notes)
    size = recipe.image_size or _size_of(splits.train, settings["data"])
    recipe = recipe.change({"image_size": size, "eval_size": recipe.eval_size or size})
    recipe = _fit_batch(recipe, request, len(splits.train), count, notes)

    seed_everything(seed)
    model = _network(settings, recipe, classes)
    if settings["init"]:
        begin_from(model, settings["init"])
    config: dict[str, Any] = model.pretrained_cfg
    transforms = _transforms(recipe, config, channels)
    description = _description(settings, recipe, splits, model, transforms, command, accelerator, threads)
    folder = RunFolder(_out(request, settings, accelerator), writing=first)
    _check_same(folder, description, first)
    if first:
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            (folder.path / ".writable").touch()
            (folder.path / ".writable").unlink()
        except OSError as error:
            raise ValueError(f"cannot write to {folder.path}: {error.strerror}; choose another --out") from None

    order = TrainOrder(
        splits.train,
        recipe.batch_size,
        seed=seed,
        rank=accelerator.process_index,
        processes=count,
        accumulate=recipe.accumulate,
        repeats=recipe.repeated_aug,
    )
    if recipe.sync_bn:
        model = synchronise(model)
    model = model.to(accelerator.device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)
    average = make_average(model, recipe)
    optimizer = make_optimizer(model, recipe)
    scheduler = make_scheduler(optimizer, recipe, order.updates)
    if recipe.compile:
        model.compile()
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    task = make_task(prepared, model, recipe, accelerator.device)

    workers = default_workers(count) if request.workers is None else request.workers
    common: dict[str, Any] = dict(workers=workers, pin_memory=accelerator.device.type == "cuda")
    train_pictures = Pictures(splits.train, transforms.build(True), seed=seed, training=True, strict=request.strict)
    evaluation = replace(transforms, size=recipe.eval_size or size)
    val_pictures = Pictures(splits.val, evaluation.build(False), strict=request.strict)
    per_pass = max(1, recipe.batch_size // (recipe.accumulate * count))
    val_order = EvalOrder(splits.val, per_pass, rank=accelerator.process_index, processes=count)
    work = Classification(
        accelerator,
        task,
        recipe,
        load(train_pictures, order, **common),
        order,
        load(val_pictures, val_order, **common),
        mean=transforms.mean,
        std=transforms.std,
        classes=classes,
    )
    display = Display(accelerator.process_index, total_pictures(work, recipe.epochs + recipe.cooldown_epochs), plain)
    engine = Engine(
        accelerator,
        work,
        prepared,
        model,
        prepared_optimizer,
        scheduler,
        average,
        recipe,
        folder,
        display,
        seed=seed,
        log_every=settings["log_every"],
        checkpoint_minutes=request.checkpoint_minutes,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if not is_run(folder.path):
        folder.create(description)
    accelerator.wait_for_everyone()
    resumed = engine.resume() if resume else False
    with display:
        if first:
            for note in notes:
                display.line(f"note: {note}")
            where = f"{accelerator.device.type}, {count} process{'es' if count > 1 else ''}, {threads} threads each"
            display.line(
                f"{_title(settings)}: {parameters / 1e6:.2f} M parameters; {len(splits.train):,} pictures of {classes} "
                f"classes, {len(splits.val):,} to validate, at {size} px; "
                f"{recipe.epochs + recipe.cooldown_epochs} epochs of {order.updates} updates; {where}; {folder.path}"
            )
            if resumed:
                display.line(f"continuing after {engine.progress.epoch} epochs, {engine.progress.updates} updates")
            elif resume:
                display.line("no checkpoint yet: from the beginning")
        progress = engine.fit()
    return Outcome(folder.path, progress, parameters, time.monotonic() - started, tuple(notes))


def begin_from(model: Any, source: str) -> None:
    """Load weights of the same network, be it of other classes.

    Args:
        source: A run folder, or a file of weights: safetensors or one of torch's.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "model.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"{source} holds no model.safetensors; give a run folder or a file of weights")
    weights = weights_in(read_file(path))
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise ValueError(f"{source} holds no weights; expected tensors by name")
    own, ends = model.state_dict(), model.pretrained_cfg.get("classifier") or ()
    ends = (ends,) if isinstance(ends, str) else tuple(ends)
    others = {name for name, value in weights.items() if name in own and own[name].shape != value.shape}
    replaced = {name for name in others if any(name.startswith(f"{end}.") for end in ends)}
    missing, unexpected = own.keys() - weights.keys(), weights.keys() - own.keys()
    wrong = sorted(missing | unexpected | (others - replaced))
    if wrong:
        raise ValueError(
            f"{source} holds weights of another network: {len(missing)} missing, {len(unexpected)} unexpected, "
            f"{len(others - replaced)} of another shape, such as {wrong[0]}"
        )
    model.load_state_dict({k: v for k, v in weights.items() if k not in replaced}, strict=False)


def _settings(request: Request, stored: dict[str, Any] | None) -> tuple[dict[str, Any], Recipe]:
    """The run's identity and its recipe; of an earlier run, that one's, if the request does not contradict it."""
    if stored is not None:
        settings, recipe = stored["settings"], Recipe().change(stored["recipe"])
        for name in IDENTITY:
            asked = getattr(request, name)
            asked = dict(asked) if isinstance(asked, Mapping) else asked
            if asked not in (None, {}) and asked != settings[name]:
                raise ValueError(
                    f"{request.out} holds a run with {name}={settings[name]}, not {name}={asked}; "
                    "leave that out to continue it, or choose another --out"
                )
        for name in request.changes:
            if recipe.change({name: request.changes[name]}) != recipe:
                raise ValueError(
                    f"{request.out} holds a run with {name}={getattr(recipe, name)}, not {request.changes[name]}; "
                    "leave that out to continue it, or choose another --out"
                )
        return settings, recipe
    pretrained = str(request.changes.get("pretrained", "")).lower() == "true"
    entry = recipes.find(request.recipe or ("finetune" if pretrained or request.init else "quick"))
    recipe = entry.recipe.change(request.changes)
    if request.init and recipe.pretrained and "pretrained" not in request.changes:
        recipe = recipe.change({"pretrained": False})  # the weights come from elsewhere
    settings = {name: getattr(request, name) for name in IDENTITY}
    settings |= {name: dict(getattr(request, name)) for name in ("model_args", "pool_args", "broadcast_args")}
    settings["recipe"] = entry.name
    settings["data"] = request.data or "scenes"
    settings["seed"] = 0 if request.seed is None else request.seed
    settings["log_every"] = request.log_every or 10
    settings["model"] = request.model or entry.model or DEFAULT_MODEL
    if settings["model"] == entry.model:
        settings["model_args"] = {**entry.model_args, **settings["model_args"]}
        settings["pool"] = request.pool or entry.pool
    if recipe.distill != "none" and settings["pool"] in ("map", "map-light"):
        options = dict(settings["pool_args"].get("pool_options", {}))
        settings["pool_args"]["pool_options"] = {"distill_tokens": 1, **options}
    return settings, recipe


def _data(settings: Mapping[str, Any], request: Request, channels: int, recipe: Recipe) -> Splits:
    options: dict[str, Any] = {name: settings[name] for name in ("val", "split", "root") if settings[name] is not None}
    if request.download:
        options["download"] = True
    return resolve(
        settings["data"], seed=settings["seed"], channels=channels, scenes_size=recipe.image_size or SMALLEST, **options
    )


def _size_of(source: Source, data: str) -> int:
    """Pixels to train at: what most pictures have, in steps of 32, within what backbones were made for."""
    if data.startswith("scenes"):
        return SMALLEST
    sides = []
    for index in range(0, len(source), max(1, len(source) // 32)):
        try:
            sides.append(min(source.open(index).size))
        except ValueError:  # unreadable; the run will report it
            continue
    if not sides:
        raise ValueError(f"none of {len(source)} pictures looked at in {data} can be read; check that they are images")
    return min(LARGEST, max(SMALLEST, 32 * math.ceil(sorted(sides)[len(sides) // 2] / 32)))


def _fit_batch(recipe: Recipe, request: Request, pictures: int, count: int, notes: list[str]) -> Recipe:
    """A smaller batch for few pictures, where the recipe allows and the user has not asked for that very one."""
    if not recipe.fit_batch or "batch_size" in request.changes:
        return recipe
    share = recipe.accumulate * count
    # Some updates an epoch, or there is little to see of it
    fitting = max(2, min(recipe.batch_size, pictures // 4 or 1)) // share * share or share
    if fitting < recipe.batch_size:
        notes.append(f"batch of {fitting} instead of {recipe.batch_size}, since there are {pictures} training pictures")
        return recipe.change({"batch_size": fitting})
    return recipe


def _network(settings: Mapping[str, Any], recipe: Recipe, classes: int) -> Any:
    """The network as it will be trained, with `pretrained_cfg` saying what it takes from now on."""
    name, given = settings["model"], dict(settings["model_args"])
    rates = {"drop_path_rate": recipe.drop_path, "drop_rate": recipe.drop_rate}
    given |= {key: value for key, value in rates.items() if value is not None and key not in given}
    given |= dict(num_classes=classes, pretrained=recipe.pretrained)
    edits = {key: settings[key] for key in ("pool", "pool_args", "broadcast", "broadcast_args") if settings[key]}
    given.update(size_argument(name, recipe.image_size or LARGEST, recipe.eval_size))
    try:
        model: Any = edit(name, **edits, **given)
    except (ValueError, TypeError):
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if recipe.pretrained:
            raise RuntimeError(f"the pretrained weights of {name} cannot be had: {reason}") from None
        raise RuntimeError(f"{name} cannot be created: {reason}") from None
    return model


def size_argument(name: str, size: int, eval_size: int | None = None) -> dict[str, Any]:
    """`img_size` for a network that is built for one size, unless it is to see several."""
    if ":" in name:
        return {}
    config = timm.models.get_pretrained_cfg(name) if timm.is_model(name.split(".")[0]) else None
    fixed = bool(config and config.fixed_input_size)
    return {"img_size": size} if fixed and eval_size in (None, size) else {}


def _transforms(recipe: Recipe, config: Mapping[str, Any], channels: int) -> Transforms:
    """How pictures reach this network, by its own description where the recipe is silent."""
    mean, std = (_channels(config[key], channels) for key in ("mean", "std"))
    interpolation = recipe.interpolation or config.get("interpolation") or "bicubic"
    augmentation = dict(
        scale=recipe.scale,
        ratio=recipe.ratio,
        hflip=recipe.hflip,
        color_jitter=recipe.color_jitter,
        auto_augment=recipe.auto_augment,
    )
    crop = recipe.crop_pct or config.get("crop_pct") or 0.875
    # Small pictures are whole objects already; to cut their rim off would lose some.
    crop = crop if recipe.crop_pct or (recipe.image_size or LARGEST) > 96 else 1.0
    return Transforms(recipe.image_size or LARGEST, channels, mean, std, interpolation, crop, augmentation)


def _channels(values: Any, channels: int) -> tuple[float, ...]:
    values = tuple(float(value) for value in values)
    return values if len(values) == channels else (sum(values) / len(values),) * channels


def _description(
    settings: Mapping[str, Any],
    recipe: Recipe,
    splits: Splits,
    model: Any,
    transforms: Transforms,
    command: str,
    accelerator: Accelerator,
    threads: int,
) -> dict[str, Any]:
    """config.json: what timm reads to load the run, and below "broadsight" what it was."""
    arguments = {**settings["model_args"], **size_argument(settings["model"], recipe.eval_size or LARGEST)}
    architecture = settings["model"].split(".")[0]
    if settings["pool"] or settings["broadcast"]:
        edits = ("pool", "pool_args", "broadcast", "broadcast_args")
        arguments |= {"backbone": settings["model"], **{key: settings[key] for key in edits if settings[key]}}
        architecture = "edited"
    unwanted = (
        "url",
        "file",
        "hf_hub_id",
        "hf_hub_filename",
        "source",
        "state_dict",
        "tag",
        "architecture",
        "origin_url",
    )
    unwanted += ("license", "paper_ids", "paper_name", "notes", "custom_load", "label_names", "label_descriptions")
    config = {k: v for k, v in model.pretrained_cfg.items() if v is not None and k not in unwanted}
    side = recipe.eval_size or transforms.size
    config |= dict(
        input_size=[transforms.channels, side, side],
        mean=transforms.mean,
        std=transforms.std,
        crop_pct=transforms.crop_pct,
        interpolation=transforms.interpolation if transforms.interpolation != "random" else "bicubic",
        num_classes=len(splits.classes),
    )
    config.pop("test_input_size", None)
    return {
        "architecture": architecture,
        "num_classes": len(splits.classes),
        "num_features": model.num_features,
        "label_names": list(splits.classes),
        "model_args": arguments,
        "pretrained_cfg": config,
        "broadsight": {
            "task": "classify",
            "settings": dict(settings),
            "recipe": asdict(recipe),
            "data": splits.description,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "processes": accelerator.num_processes,
            "threads": threads,
            "device": accelerator.device.type,
            "versions": versions(),
            "commit": commit(),
            "command": command,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        },
    }


def _check_same(folder: RunFolder, description: Mapping[str, Any], first: bool) -> None:
    """Refuse to continue a run whose network, classes or pictures are not these."""
    if not is_run(folder.path):
        if first and folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
            raise ValueError(f"{folder.path} exists and holds no run; choose another --out, nothing was changed")
        return
    there, here = folder.config(), json.loads(json.dumps(description))
    for key in ("architecture", "num_classes", "label_names", "model_args"):
        if there.get(key) != here[key]:
            old, new = _short(there.get(key)), _short(here[key])
            raise ValueError(f"{folder.path} holds a run with {key}={old}, not {new}; choose another --out")
    if there["broadsight"]["data"].get("fingerprint") != here["broadsight"]["data"].get("fingerprint"):
        raise ValueError(
            f"the pictures are not those that the run in {folder.path} was begun with; restore them, or another --out"
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _stored(path: Path) -> dict[str, Any]:
    config = RunFolder(path).config()
    try:
        stored = config["broadsight"]
        return {"settings": stored["settings"], "recipe": stored["recipe"]}
    except (KeyError, TypeError):
        raise ValueError(f"{path} holds a model, but no run of broadsight to continue; choose another --out") from None


def _out(request: Request, settings: Mapping[str, Any], accelerator: Accelerator) -> Path:
    """The run's folder: as asked for, or the next free number of a name that says what it is."""
    if request.out:
        return Path(request.out)
    data = re.sub(r"\W+", "-", Path(str(settings["data"])).name or "data").strip("-")
    stem = "-".join(filter(None, [data, _title(settings)]))
    taken = [int(path.name.rpartition("-")[2]) for path in Path("runs").glob(f"{stem}-*") if path.name[-1].isdigit()]
    # After a restart of all processes it is the run that they had begun.
    number = max(taken, default=1) if processes.restarted() else max(taken, default=0) + 1
    return processes.from_first(Path("runs") / f"{stem}-{number}")


def _title(settings: Mapping[str, Any]) -> str:
    parts = [settings["model"].rpartition("/")[2], settings["pool"], settings["broadcast"]]
    return re.sub(r"[^\w.-]+", "-", "-".join(part for part in parts if part))
