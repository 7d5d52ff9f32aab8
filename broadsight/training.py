"""From what a user asks for to a run: data, network, recipe and folder put together, or an earlier run continued."""

import math
import os
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from .data.loading import EvalOrder, Pictures, TrainOrder, default_workers, load
from .data.sources import Source, Splits, resolve
from .dry_run import first_line
from .given_weights import load_given
from .models.edited import edit
from .pooling import check_name
from .run_request import (
    EDITS,
    Request,
    check_same,
    describe,
    folder_for,
    network_arguments,
    settings_of,
    stored_in,
    title,
)
from .seeds import seed_everything
from .train import processes
from .train.augmentation import LARGEST, transforms_of
from .train.classification import Classification
from .train.display import Display
from .train.engine import Engine, Interrupted, Progress, total_pictures
from .train.optimisation import make_average, make_optimizer, make_scheduler
from .train.recipes import Recipe
from .train.run_folder import METRICS, REPORT, RunFolder, is_run
from .train.state import newest
from .train.synchronise import synchronise
from .train.tasks import make_task

SMALLEST = 64  # pixels that are chosen for pictures of unknown size


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        folder: The run.
        title: Its network, in a few words.
        progress: Where it stands.
        parameters: Of the network.
        seconds: That this part of it took.
        notes: What the user should know.
        report: Its report.html, unless it was not asked for or could not be made.
    """

    folder: Path
    title: str
    progress: Progress
    parameters: int
    seconds: float
    notes: tuple[str, ...]
    report: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to go.

    Args:
        engine: Goes.
        description: What is written into its folder.
        summary: What it is, in a line.
        notes: What the user should know.
        splits: Its data.
    """

    engine: Engine
    description: dict[str, Any]
    summary: str
    notes: tuple[str, ...]
    splits: Splits


def train(request: Request, *, resume: bool = False, command: str = "", plain: bool = False) -> Outcome:
    """Train a network, or continue a run to the same result as if it had never stopped.

    Args:
        resume: Continue the run in `request.out`. Options given again must agree with it.
        command: What was typed, for the record.
        plain: Plain lines in a terminal too.
    """
    started = time.monotonic()
    try:
        processes.meet(request.device, request.processes)  # who agree on whether they were restarted
        prepared, progress = _train(request, resume, command, plain)
    finally:
        processes.leave()
    about, folder = prepared.description["broadsight"], prepared.engine.folder
    name, seconds = title(about["settings"]), time.monotonic() - started
    outcome = Outcome(folder.path, name, progress, about["parameters"], seconds, prepared.notes)
    if not request.report or not folder.writing:
        return outcome
    page, metrics = folder.path / REPORT, folder.path / METRICS
    if page.is_file() and page.stat().st_mtime_ns >= metrics.stat().st_mtime_ns:  # the run was finished before
        return replace(outcome, report=page)
    return write_report(outcome, request, prepared.splits)


def write_report(outcome: Outcome, request: Request, splits: Splits | None = None) -> Outcome:
    """Write the report of a run that has ended. A page must not make it fail: what goes wrong is noted.

    Args:
        splits: The run's data, if it is open.
    """
    try:
        from .reporting import report_run  # not before a run is done: it needs much that training does not

        options: dict[str, Any] = dict(workers=request.workers, device=request.device)
        return replace(outcome, report=report_run(outcome.folder, splits=splits, seconds=outcome.seconds, **options))
    except Exception as error:
        return replace(outcome, notes=(*outcome.notes, f"no report.html: {first_line(error)}"))


def _train(request: Request, resume: bool, command: str, plain: bool) -> tuple[Prepared, Progress]:
    stored, restarted = None, processes.restarted()
    resume = resume or restarted
    if request.out and is_run(Path(request.out)):
        stored = stored_in(Path(request.out))
        if not resume:
            raise ValueError(
                f"{request.out} holds a run of {stored['settings']['model']} already; "
                "--resume continues it, another --out starts a new one"
            )
    elif request.out and resume and not restarted and not _says_what(request):
        raise FileNotFoundError(f"there is no run in {request.out} to resume; leave --resume out to begin one")
    elif resume and not request.out and not restarted:
        raise ValueError("--resume needs --out, the folder of the run to continue")
    settings, recipe = settings_of(request, stored)
    check_name(settings["model"])  # before a tar is unpacked
    if recipe.precision == "fp16" and "precision" not in request.changes and not processes.has_gpu(request.device):
        recipe = recipe.change({"precision": "fp32"})  # of a published recipe, which should run on a laptop too
    accelerator = processes.connect(request.device, recipe.precision, request.processes)
    prepared = prepare(request, settings, recipe, accelerator, stored, command=command, plain=plain)
    return prepared, _run(prepared, request, resume)


def _says_what(request: Request) -> bool:
    """Whether a request could begin a run: one that was killed before it had a folder is begun again."""
    return any((request.data, request.model, request.recipe, request.changes))


def prepare(
    request: Request,
    settings: dict[str, Any],
    recipe: Recipe,
    accelerator: Accelerator,
    stored: Mapping[str, Any] | None = None,
    *,
    command: str = "",
    plain: bool = False,
) -> Prepared:
    """Data, network, optimiser and folder, put together; nothing is written yet.

    Args:
        stored: What the folder says of a run that was begun.
    """
    first, rank, count = accelerator.is_main_process, accelerator.process_index, accelerator.num_processes
    for name, least in (("workers", 0), ("threads", 1)):
        given = getattr(request, name)
        if given is not None and given < least:
            raise ValueError(f"--{name} {given}; expected {least} or more")
    threads = request.threads or (stored or {}).get("threads")  # others would add in another order
    threads = threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, (os.cpu_count() or 1) // count)
    torch.set_num_threads(threads)
    seed, channels = settings["seed"], settings["model_args"].get("in_chans", 3)
    if not isinstance(channels, int):
        raise ValueError(f"in_chans={channels}; expected 1 (grey) or 3 (RGB)")
    with accelerator.main_process_first():  # a tar is unpacked once
        splits = _data(settings, request, channels, recipe)
    classes, notes = len(splits.classes), list(splits.notes)
    size = recipe.image_size or _size_of(splits.train, settings["data"])
    recipe = recipe.change({"image_size": size, "eval_size": recipe.eval_size or size})
    if stored is None:  # else that was done when it began
        recipe = _fit_batch(recipe, request, len(splits.train), count, notes)

    seed_everything(seed)
    folder = RunFolder(folder_for(request, settings), writing=first)
    weighted = stored is not None and newest(folder.last) is not None  # its weights are in the checkpoint
    model = _network(settings, replace(recipe, pretrained=recipe.pretrained and not weighted), classes)
    if settings["init"] and not weighted:
        load_given(model, settings["init"], other_classes=True)
    transforms = transforms_of(recipe, model.pretrained_cfg, channels)
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": transforms.mean, "std": transforms.std}
    how = dict(command=command, processes=count, threads=threads, device=accelerator.device.type)
    description = describe(settings, recipe, splits, model, transforms, how)
    check_same(folder, description, first)
    order = TrainOrder(
        splits.train,
        recipe.batch_size,
        seed=seed,
        rank=rank,
        processes=count,
        accumulate=recipe.accumulate,
        repeats=recipe.repeated_aug,
    )

    model = (synchronise(model, accelerator.device) if recipe.sync_bn else model).to(accelerator.device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)
    average = make_average(model, recipe)
    optimizer = make_optimizer(model, recipe)
    scheduler = make_scheduler(optimizer, recipe, order.updates)
    if recipe.compile:
        model.compile()
    wrapped, stepping = accelerator.prepare(model, optimizer)

    workers = default_workers(count) if request.workers is None else request.workers
    common: dict[str, Any] = dict(workers=workers, pin_memory=accelerator.device.type == "cuda")
    learned = Pictures(splits.train, transforms.build(True), seed=seed, training=True, strict=request.strict)
    shown = Pictures(splits.val, replace(transforms, size=recipe.eval_size or size).build(False), strict=request.strict)
    per_pass = max(1, recipe.batch_size // (recipe.accumulate * count))
    work = Classification(
        accelerator,
        make_task(wrapped, model, recipe, accelerator.device),
        recipe,
        load(learned, order, **common),
        order,
        load(shown, EvalOrder(splits.val, per_pass, rank=rank, processes=count), **common),
        mean=transforms.mean,
        std=transforms.std,
        classes=classes,
    )
    epochs = recipe.epochs + recipe.cooldown_epochs
    engine = Engine(
        accelerator,
        work,
        wrapped,
        model,
        stepping,
        scheduler,
        average,
        recipe,
        folder,
        Display(rank, total_pictures(work, epochs), plain),
        seed=seed,
        log_every=settings["log_every"],
        checkpoint_minutes=request.checkpoint_minutes,
    )
    summary = (
        f"{title(settings)}: {description['broadsight']['parameters'] / 1e6:.2f} M parameters; {len(splits.train):,} "
        f"pictures of {classes} classes, {len(splits.val):,} to validate, at {size} px; {epochs} epochs of "
        f"{order.updates} updates; {accelerator.device.type}, processes: {count}, threads: {threads}; {folder.path}"
    )
    return Prepared(engine, description, summary, tuple(notes), splits)


def _run(prepared: Prepared, request: Request, resume: bool) -> Progress:
    """Write the folder, or find in it where to go on, and go."""
    engine, display, folder = prepared.engine, prepared.engine.display, prepared.engine.folder
    if not is_run(folder.path):
        try:
            folder.create(prepared.description)
        except OSError as error:
            raise ValueError(f"cannot write to {folder.path}: {error.strerror}; choose another --out") from None
    engine.accelerator.wait_for_everyone()
    resumed = engine.resume() if resume else False
    with display, closing(engine.work):
        if engine.accelerator.is_main_process:
            for note in prepared.notes:
                display.line(f"note: {note}")
            display.line(prepared.summary)
            if resumed:
                display.line(f"continuing after {engine.progress.epoch} epochs, {engine.progress.updates} updates")
            elif resume:
                display.line("no checkpoint yet: from the beginning")
        try:
            return engine.fit()
        except Interrupted:
            if request.report and folder.writing:
                with suppress(Exception):  # what was computed is saved already; this is a courtesy
                    from .reporting import report_run

                    report_run(folder.path, evaluated=False)
            raise


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
    share = recipe.accumulate * count * (2 if recipe.mixup or recipe.cutmix else 1)  # pairs are mixed
    # Some updates an epoch, or there is little to see of it
    fitting = max(2, min(recipe.batch_size, pictures // 4 or 1)) // share * share or share
    if fitting < recipe.batch_size:
        notes.append(f"batch of {fitting} instead of {recipe.batch_size}, since there are {pictures} training pictures")
        return recipe.change({"batch_size": fitting})
    return recipe


def _network(settings: Mapping[str, Any], recipe: Recipe, classes: int) -> Any:
    """The network as it will be trained, with `pretrained_cfg` saying what it takes from now on."""
    name, given = settings["model"], network_arguments(settings, recipe)
    rates = {"drop_path_rate": recipe.drop_path, "drop_rate": recipe.drop_rate}
    given |= {key: value for key, value in rates.items() if value is not None and key not in given}
    given |= dict(num_classes=classes, pretrained=recipe.pretrained)
    edits = {key: settings[key] for key in EDITS if settings[key]}
    try:
        model: Any = edit(name, **edits, **given)
    except (ValueError, TypeError):
        raise
    except Exception as error:
        reason = first_line(error)
        if recipe.pretrained:
            raise RuntimeError(f"the pretrained weights of {name} cannot be had: {reason}") from None
        raise RuntimeError(f"{name} cannot be created: {reason}") from None
    return model
