"""From what a user asks for to a run: data, model, recipe and folder put together, or an earlier run continued."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator

from ..errors import first_line
from ..inspection.precision import chosen, words
from ..surgery.pooling import check_name
from ..visual.metrics import label
from . import processes
from .checkpoints import newest
from .classification import classifier_parts, make_model
from .display import Display
from .engine import Engine, Interrupted, Progress, total_images
from .lock import Busy, locked, refuse_if_held
from .optimisation import make_average, make_optimizer, make_scheduler
from .parts import Begun
from .recipes import Recipe
from .request import Request
from .run_folder import CLASSES_JUDGED, METRICS, REPORT, RunFolder, is_run, over_classes, whole_page
from .settings import check_same, folder_for, settings_of, stored_in, title
from .synchronise import synchronise

Reporter = Callable[..., Path]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: Path
    title: str  # its model, in a few words
    progress: Progress
    parameters: int  # of the model
    seconds: float  # that this part of it took
    notes: tuple[str, ...]  # what the user should know
    goal: str = "top-1"  # what the best model has most of, in words
    over: str = ""  # over how many classes that is, in words; empty if over all
    report: Path | None = None  # its report.html, unless it was not asked for or could not be made
    twin: "Outcome | None" = None  # how the same model with another pooling ended


class Prepared(NamedTuple):
    """A run that is ready to go."""

    engine: Engine
    description: dict[str, Any]  # what is written into its folder
    summary: str  # what it is, in a line
    notes: tuple[str, ...]  # what the user should know
    splits: Any  # its data
    stored: bool = False  # it was begun before, and its folder says what it is


def train(request: Request, *, reporter: Reporter | None = None, quiet: bool = False) -> Outcome:
    """Train a model, and its twin if one is asked for; or continue runs as if they had never stopped.

    The reporter writes the report of a run that has ended or was interrupted, as `report.run.report_run` does.
    """
    reporter = reporter if request.report else None
    if request.twin is None:
        return _train_one(request, reporter, quiet)
    check_twin(request, request.twin)
    first = _train_one(request, None, quiet)
    out = str(first.folder / f"twin-{request.twin}")
    other = replace(request, pool=request.twin, pool_args={}, twin=None, out=out)
    twin = _train_one(replace(other, resume=request.resume and Path(out).is_dir()), reporter, quiet)
    if reporter is not None and int(os.environ.get("RANK", 0)) == 0:  # now that both are there: it compares them
        first = write_report(first, request, reporter)
    return replace(first, twin=twin)


def _train_one(request: Request, reporter: Reporter | None, quiet: bool) -> Outcome:
    started = time.monotonic()
    with ExitStack() as held:  # the folder, until its report is written
        try:
            processes.meet(request.device, request.processes)  # who agree on whether they were restarted
            prepared, progress = _train(request, reporter, held, quiet)
        finally:
            processes.leave()
        about, folder = prepared.description["broadsight"], prepared.engine.folder
        name, seconds = title(about["settings"]), time.monotonic() - started
        notes, goal = (*prepared.notes, *prepared.engine.repairs), label(prepared.engine.work.goal)
        judged = [line[CLASSES_JUDGED] for line in folder.metrics() if CLASSES_JUDGED in line]
        over = over_classes(judged[-1], prepared.description["num_classes"]) if judged else ""
        outcome = Outcome(folder.path, name, progress, about["parameters"], seconds, notes, goal, over)
        if reporter is None or not folder.writing:
            return outcome
        page, metrics = folder.path / REPORT, folder.path / METRICS
        if whole_page(page) and page.stat().st_mtime_ns >= metrics.stat().st_mtime_ns:  # the run was finished before
            return replace(outcome, report=page)
        return write_report(outcome, request, reporter, prepared.splits)


def write_report(outcome: Outcome, request: Request, reporter: Reporter, splits: Any = None) -> Outcome:
    """Write the report of a run that has ended. A page must not make it fail: what goes wrong is noted."""
    try:
        options: dict[str, Any] = dict(workers=request.workers, device=request.device)
        return replace(outcome, report=reporter(outcome.folder, splits=splits, seconds=outcome.seconds, **options))
    except Exception as error:
        return replace(outcome, notes=(*outcome.notes, f"no report.html: {first_line(error)}"))


def _train(request: Request, reporter: Reporter | None, held: ExitStack, quiet: bool) -> tuple[Prepared, Progress]:
    stored, restarted = stored_in(request.out), processes.restarted()
    resume = request.resume or restarted
    said = any((request.data, request.model, request.recipe, request.changes))  # enough to begin a run
    if stored is not None and not resume:
        refuse_if_held(Path(str(request.out)))
        advice = "--resume continues it, another --out starts a new one"
        raise ValueError(f"{request.out} holds a run of {stored['settings']['model']} already; {advice}")
    if stored is None and request.resume and not restarted:
        if not request.out:
            raise ValueError("--resume needs --out, the folder of the run to continue")
        if not said:  # else one that was killed before it had a folder
            raise FileNotFoundError(f"there is no run in {request.out} to resume; leave --resume out to begin one")
    settings, recipe = settings_of(request, stored)
    check_name(settings["model"])  # before a tar is unpacked
    kind, notes = processes.device_kind(request.device), ()
    if recipe.precision == "fp16" and "precision" not in request.changes and kind == "cpu":
        recipe = recipe.change({"precision": "fp32"})  # of a published recipe, which should run on a laptop too
        notes = (f"precision=fp16 of the recipe {settings['recipe']} needs a GPU: computes in fp32",)
    elif recipe.precision != "fp32":
        asked, recipe = recipe.precision, recipe.change({"precision": chosen(recipe.precision, kind)})
        notes = (words(asked, recipe.precision, kind),)
    accelerator = processes.connect(request.device, recipe.precision, request.processes)
    if stored is not None:
        _hold(RunFolder(str(request.out)), accelerator, held)
    prepared = prepare(request, settings, recipe, accelerator, stored, quiet=quiet)
    prepared = prepared._replace(notes=(*notes, *prepared.notes))
    return prepared, _run(prepared, reporter, resume, held)


def _hold(
    folder: RunFolder, accelerator: Accelerator, held: ExitStack, description: Mapping[str, Any] | None = None
) -> None:
    """Become the one run that writes to a folder, made if it is described; else a ValueError, at all processes."""
    failure = None
    if accelerator.is_main_process:
        try:
            if description is not None:
                folder.path.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder.path))
            if description is not None and is_run(folder.path):
                failure = f"{folder.path} holds a run that another process has just made; choose another --out"
            elif description is not None:
                folder.create(description)
        except Busy as error:
            failure = str(error)
        except OSError as error:
            failure = f"cannot write to {folder.path}: {error.strerror}; choose another --out"
    if (failure := processes.from_first(failure)) is not None:
        raise ValueError(failure)


def check_twin(request: Request, twin: str) -> None:
    """Refuse a twin that could not be trained, before the first of the two is."""
    settings, recipe = settings_of(request, stored_in(request.out))
    if settings["task"] != "classify":
        raise ValueError(f"--twin {twin} is for --task classify; this is --task {settings['task']}; leave it out")
    if settings["pool"] == twin:
        raise ValueError(f"--twin {twin} is what the run itself has; name another pooling to compare it with")
    make_model({**settings, "pool": twin, "pool_args": {}}, replace(recipe, pretrained=False), classes=2)


def prepare(
    request: Request,
    settings: dict[str, Any],
    recipe: Recipe,
    accelerator: Accelerator,
    stored: Mapping[str, Any] | None = None,
    *,
    quiet: bool = False,
) -> Prepared:
    """Data, model, optimiser and folder, put together; nothing is written yet. A run that was begun is `stored`."""
    count, device = accelerator.num_processes, accelerator.device
    threads = request.threads or (stored or {}).get("threads")  # others would add in another order
    threads = threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, (os.cpu_count() or 1) // count)
    torch.set_num_threads(threads)
    folder = RunFolder(folder_for(request, settings), writing=accelerator.is_main_process)
    how = dict(command=request.command, processes=count, threads=threads, device=device.type)
    checkpoint = newest(folder.last, folder.previous) if stored is not None else None
    begun = Begun(stored is not None, checkpoint is not None, how)
    if settings["task"] == "classify":
        parts = classifier_parts(request, settings, recipe, accelerator, begun)
    else:
        from .dense import dense_parts

        parts = dense_parts(request, settings, recipe, accelerator, begun)
    recipe, model, updates = parts.recipe, parts.model, parts.order.updates
    notes = (*parts.notes, *check_same(folder, parts.description, accelerator.is_main_process))
    model = (synchronise(model, device) if recipe.sync_bn else model).to(device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)
    average, optimizer = make_average(model, recipe), make_optimizer(model, recipe)
    scheduler = make_scheduler(optimizer, recipe, updates)
    if recipe.compile:  # what follows a dense model's backbone depends on the content of images
        (model if settings["task"] == "classify" else cast(Any, model).stages).compile()
    wrapped, stepping = accelerator.prepare(model, optimizer)
    work = parts.work(wrapped, model)
    epochs = recipe.epochs + recipe.cooldown_epochs
    display = Display(accelerator.process_index, total_images(work, epochs), request.plain, quiet)
    own: dict[str, Any] = {name: settings[name] for name in ("seed", "log_every")}
    own |= dict(checkpoint_minutes=request.checkpoint_minutes)
    engine = Engine(accelerator, work, wrapped, model, stepping, scheduler, average, recipe, folder, display, **own)
    size = f"{parts.description['broadsight']['parameters'] / 1e6:.2f} M parameters"
    where = f"{device.type}, {recipe.precision}, processes: {count}, threads: {threads}; {folder.path}"
    summary = f"{title(settings)}: {size}; {parts.summary}; {epochs} epochs of {updates} updates; {where}"
    return Prepared(engine, parts.description, summary, notes, parts.splits, stored is not None)


def _run(prepared: Prepared, reporter: Reporter | None, resume: bool, held: ExitStack) -> Progress:
    """Write the folder, or find in it where to go on, and go."""
    engine, display, folder = prepared.engine, prepared.engine.display, prepared.engine.folder
    restarted = processes.restarted() and is_run(folder.path)  # in a folder that nobody has named
    if not prepared.stored:
        _hold(folder, engine.accelerator, held, None if restarted else prepared.description)
    engine.accelerator.wait_for_everyone()
    resumed = engine.resume() if resume else False
    with display, closing(engine.work):
        if engine.accelerator.is_main_process:
            for note in (*prepared.notes, *engine.repairs):
                display.line(f"note: {note}")
            display.line(prepared.summary)
            if resumed:
                display.line(f"continuing after {engine.progress.epoch} epochs, {engine.progress.updates} updates")
            elif resume:
                display.line("no checkpoint yet: from the beginning")
        try:
            return engine.fit()
        except Interrupted:
            if reporter is not None and folder.writing:
                with suppress(Exception):  # what was computed is saved already; this is a courtesy
                    reporter(folder.path, evaluated=False)
            raise
