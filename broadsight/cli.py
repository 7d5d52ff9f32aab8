"""The `broadsight` command: every command is a function here, and its signature is its interface.

Nothing heavy is imported until a command runs, so that help and mistakes are answered at once.
"""

import json as json_
import os
import re
import sys
import traceback
from contextvars import copy_context
from dataclasses import asdict, replace
from difflib import get_close_matches
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal

from . import __version__
from .analysis_commands import analyze
from .app_commands import app
from .command_line import (
    DONE,
    FAILED,
    INTERRUPTED,
    MOST,
    WRONG_USAGE,
    AllowOutside,
    Arg,
    Command,
    Threads,
    UsageError,
    Workers,
    build_parser,
    check_values,
    explicit,
    flag,
    named_in,
    names_first,
    refuse_ignored,
    register_models,
    remember,
    together,
    typed,
    value_of,
)
from .errors import first_line, is_usage, one_line
from .evaluation_commands import eval, predict, report
from .explain_commands import explain
from .export_commands import export
from .gallery_commands import gallery
from .terminal import check_writable, number, printable, progress_bar, show

EXPORTS = "exported runtimes (--runtime onnx and others)"


def models(
    pattern: Annotated[str | None, Arg("name or wildcard such as 'stvit_*'", True, "PATTERN")] = None,
    json: Annotated[bool, Arg("print JSON")] = False,
    all: Annotated[bool, Arg("search all of timm, not only broadsight; needs a PATTERN")] = False,
) -> int:
    """List models with parameters, MACs and published accuracy."""
    if all and pattern is None:
        raise UsageError("--all without a PATTERN; expected one, since timm holds over a thousand models")
    ours = register_models()
    from .verify import catalogue

    with progress_bar() as progress:
        rows = catalogue(pattern, progress)
    if all and pattern:
        rows += _foreign(pattern, {row["model"] for row in rows})
    if not rows:
        import timm

        known = timm.list_models(module="" if all else list(ours))
        near = get_close_matches(pattern or "", known, n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(near)}" if near else "use a wildcard such as 'stvit_*'"
        raise ValueError(f"no model matches {pattern!r}; {hint}" + ("" if all else "; --all searches timm as well"))
    if json:
        print(json_.dumps(rows, indent=2))
        return DONE
    from rich.table import Table

    table = Table()
    for name in ("model", "family"):
        table.add_column(name, no_wrap=True)
    for name in ("params M", "paper M", "MACs G", "paper G", "paper top-1 %"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("source")
    for row in rows:
        cells = [number(row["params"], 1e6), number(row["paper_params_m"]), number(row["macs"], 1e9)]
        cells += [number(row["paper_macs_g"]), number(row["paper_top1"], digits=1)]
        table.add_row(row["model"], row["family"], *cells, row["source"])
    show(table)
    return DONE


def verify(
    families: Annotated[list[str] | None, Arg("papers to check; all if none is named", True, "FAMILY")] = None,
    json: Annotated[bool, Arg("print JSON")] = False,
    all: Annotated[bool, Arg("check every paper; the same as naming none")] = False,
) -> int:
    """Recompute every static figure of the papers' tables: paper, ours, match."""
    if all and families:
        raise UsageError(f"--all together with {' '.join(families)}; expected one of the two")
    register_models()
    from .verify import render
    from .verify import verify as run

    with progress_bar() as progress:
        checks = run(families or [], progress)
    found = {
        status: sum(check.status == status for check in checks) for status in ("match", "explained", "not run", "miss")
    }
    if json:
        print(json_.dumps([asdict(check) for check in checks], indent=2))
    else:
        show(render(checks))
        print(f"{len(checks)} figures: " + ", ".join(f"{number} {status}" for status, number in found.items()))
    return FAILED if found["miss"] else DONE


def bench(
    models: Annotated[
        list[str],
        Arg("timm models, names or wildcards, NAME@256 for another size; the first is the yardstick", True, "MODEL"),
    ],
    pool: Annotated[
        str | None, Arg("run every model under each of these, comma-separated: gap, cap, ga, map, map-light, vgg, dft")
    ] = None,
    broadcast: Annotated[
        str | None,
        Arg(
            "run every model with each of these, joined by commas: none, cb, scaled, gate, hybrid", of=("whole models",)
        ),
    ] = None,
    head_only: Annotated[
        bool, Arg("only the pooling on feature maps of the right shapes, without the backbone")
    ] = False,
    light: Annotated[bool, Arg("let 'map' pools classify with their averaged tokens alone")] = False,
    against: Annotated[
        str | None,
        Arg(
            "with --head-only: yardstick is the class PerGroupPool of this Python file, on the same weights",
            False,
            "FILE",
        ),
    ] = None,
    runtime: Annotated[
        str,
        Arg("by commas: eager, compile, onnx, int8 (of onnx), openvino, openvino-int8, pt2, executorch"),
    ] = "eager",
    start_up: Annotated[
        bool,
        Arg("with an exported runtime: also time the start of every contender in a process of its own", of=(EXPORTS,)),
    ] = True,
    artefacts: Annotated[
        str | None, Arg("keep what is exported in this folder, and use it again", metavar="FOLDER", of=(EXPORTS,))
    ] = None,
    batch: Annotated[int, Arg("images per call", least=1)] = 8,
    threads: Annotated[int, Arg("threads of operators, in every runtime", least=1, most=MOST)] = 1,
    size: Annotated[
        int | str,
        Arg(
            "image side in pixels, or HEIGHTxWIDTH; several joined by commas show how costs grow",
            of=("models that bring no size of their own (NAME@256)",),
        ),
    ] = 224,
    growth_from: Annotated[
        int,
        Arg(
            "with several sizes: growth exponents are of those with at least the pixels of this side squared",
            of=("several sizes (--size 224,448)",),
            least=1,
        ),
    ] = 512,
    rounds: Annotated[int, Arg("timed calls of each contender", least=1)] = 9,
    warmup: Annotated[int, Arg("calls of each contender before those", least=0)] = 2,
    train: Annotated[bool, Arg("time forward and backward in train mode")] = False,
    fuse: Annotated[bool, Arg("fold what inference allows first, as `broadsight.fuse` does")] = False,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Arg("of weights and images")] = "float32",
    device: Annotated[str, Arg("cpu or cuda")] = "cpu",
    channels_last: Annotated[bool, Arg("channels-last memory format")] = False,
    seed: Annotated[int, Arg("of weights and images", least=0)] = 0,
    json: Annotated[
        str | None, Arg("print JSON, not a table, or write it to FILE; comes last", False, "FILE", "-")
    ] = None,
    plot: Annotated[str | None, Arg("draw the result into a png, svg or pdf file", metavar="FILE")] = None,
    scatter: Annotated[str | None, Arg("draw published top-1 against latency into such a file", metavar="FILE")] = None,
) -> int:
    """Time models side by side: latency, throughput, memory, share of the machine's peak; start-up and file size."""
    given = dict(locals())
    found = [re.fullmatch(r"(\d+)(?:x(\d+))?", one.strip()) for one in str(size).split(",")]
    sizes = [(int(one[1]), int(one[2] or one[1])) for one in found if one]
    if len(sizes) < len(found):
        raise UsageError(f"--size {size}; expected pixels such as 224 or, height first, 224x320; several by commas")
    exports = any(name.strip() not in ("eager", "compile") for name in runtime.split(","))
    facts = {
        EXPORTS: None if exports else f"this is --runtime {runtime}",
        "several sizes (--size 224,448)": None if len(sizes) > 1 else f"this has one, {size}",
        "models that bring no size of their own (NAME@256)": None if not all("@" in m for m in models) else "all do",
        "whole models": "--head-only runs the pool alone" if head_only else None,
    }
    refuse_ignored(bench, given, facts)
    if scatter and len(sizes) > 1:
        raise UsageError("--scatter with several sizes; accuracy is published for one: drop one of the two")
    for path in (json if json != "-" else None, plot, scatter):
        check_writable(path)
    register_models()
    from . import accuracy_plot, benchmark, benchmark_report, growth
    from .drawing import plot_format

    for path in filter(None, (plot, scatter)):
        plot_format(path)
    settings = benchmark.Settings(
        batch=batch,
        size=sizes[0],
        threads=threads,
        rounds=rounds,
        warmup=warmup,
        runtimes=tuple(name.strip() for name in runtime.split(",")),
        train=train,
        device=device,
        dtype=dtype,
        channels_last=channels_last,
        fuse=fuse,
        seed=seed,
        pools=tuple(name.strip() for name in pool.split(",")) if pool is not None else (),
        broadcasts=tuple(name.strip() for name in broadcast.split(",")) if broadcast is not None else (),
        head_only=head_only,
        light=light,
        against=against,
        start_up=start_up,
    )
    if scatter:
        accuracy_plot.check(benchmark.expand(models), settings.size)
    kept = {} if artefacts is None else {"artefacts": artefacts}
    report: Any
    view: Any = benchmark_report if len(sizes) == 1 else growth
    with progress_bar() as progress:
        if len(sizes) == 1:
            report = benchmark.measure(models, settings, progress, **kept)
        else:
            report = growth.measure(models, settings, sizes, growth_from, progress, **kept)
    record = {"command": typed(), **asdict(report)}
    if json and json != "-":  # files first: whoever reads our output may leave at any time
        benchmark.write_json(record, json)
    if plot:
        view.plot(report, plot)
    if scatter:
        drawn: list[Any] = [report]  # of one size, see above
        accuracy_plot.plot(drawn, scatter)
    if json == "-":
        print(json_.dumps(record, indent=2))
    else:
        show(view.render(report), whole=True)
    return DONE


def train(
    data: Annotated[
        str | None,
        Arg(
            "images in a folder, tar or shards, COCO .json, images/ and masks/, timm dataset; none: built-in scenes",
            True,
            "DATA",
        ),
    ] = None,
    model: Annotated[str | None, Arg("timm name; without it the recipe's, or a small one")] = None,
    pool: Annotated[str | None, Arg("another pooling: gap, cap, ga, map, vgg, dft")] = None,
    broadcast: Annotated[str | None, Arg("context broadcasting: cb, scaled, gate, hybrid")] = None,
    task: Annotated[
        str | None, Arg("what is learned: classify, detect, instances, segment or keypoints; without it the recipe's")
    ] = None,
    head: Annotated[
        str | None,
        Arg(
            "of dense tasks: retinanet, fcos, ssdlite, faster_rcnn, rtdetr (detect); mask_rcnn, cascade_mask_rcnn "
            "(instances); semantic_fpn, upernet (segment); keypoint_rcnn, simple_baseline (keypoints)"
        ),
    ] = None,
    neck: Annotated[
        str | None, Arg("of dense tasks: fpn, the maps as they are, or map, through multi-token attention first")
    ] = None,
    recipe: Annotated[
        str | None, Arg("named settings, see docs/recipes.md; without it quick, or finetune if weights are given")
    ] = None,
    set: Annotated[
        list[str] | None, Arg("fields of the recipe, such as epochs=10 lr=1e-3", metavar="KEY=VALUE", pairs=True)
    ] = None,
    out: Annotated[str | None, Arg("folder of the run; without it a new one in runs/", metavar="DIR")] = None,
    resume: Annotated[bool, Arg("continue the run in --out to the same result as if it had never stopped")] = False,
    epochs: Annotated[int | None, Arg("passes over the data; short for --set epochs=", least=1)] = None,
    size: Annotated[int | None, Arg("image side in pixels; short for --set image_size=", least=1)] = None,
    batch: Annotated[
        int | None, Arg("images of an update, over all processes; short for --set batch_size=", least=1)
    ] = None,
    lr: Annotated[float | None, Arg("learning rate; short for --set lr=")] = None,
    pretrained: Annotated[bool, Arg("begin from timm's weights; short for --set pretrained=true")] = False,
    compile: Annotated[bool, Arg("torch.compile the network; short for --set compile=true")] = False,
    init: Annotated[str | None, Arg("run folder or file of weights to begin from", metavar="RUN|FILE")] = None,
    val: Annotated[str | None, Arg("images to validate on, where DATA sets none apart", metavar="DATA")] = None,
    split: Annotated[float | None, Arg("part of every class to hold out for validation instead")] = None,
    strict: Annotated[bool, Arg("stop at an image that cannot be read instead of skipping it")] = False,
    root: Annotated[str | None, Arg("where a timm dataset lies or is put", metavar="DIR")] = None,
    download: Annotated[bool, Arg("let a timm dataset be fetched")] = False,
    allow_outside: AllowOutside = False,
    model_args: Annotated[
        list[str] | None, Arg("arguments of the model, such as in_chans=1", metavar="KEY=VALUE", pairs=True)
    ] = None,
    pool_args: Annotated[
        list[str] | None, Arg("arguments of the pooling, such as groups=4 dim=192", metavar="KEY=VALUE", pairs=True)
    ] = None,
    broadcast_args: Annotated[
        list[str] | None, Arg("arguments of the broadcasting, such as branch=both", metavar="KEY=VALUE", pairs=True)
    ] = None,
    head_args: Annotated[
        list[str] | None, Arg("options of the head, such as assigner=atss", metavar="KEY=VALUE", pairs=True)
    ] = None,
    neck_args: Annotated[
        list[str] | None, Arg("arguments of the neck map, such as dim=256 tokens=8", metavar="KEY=VALUE", pairs=True)
    ] = None,
    twin: Annotated[
        str | None, Arg("train the same network with this pooling too, in DIR/twin-POOL, and compare", metavar="POOL")
    ] = None,
    seed: Annotated[int | None, Arg("of everything random; 0 without it", least=0)] = None,
    workers: Workers = None,
    threads: Threads = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], Arg("where to train")] = "auto",
    processes: Annotated[int | None, Arg("refuse to start unless torchrun has started so many", least=1)] = None,
    log_every: Annotated[int | None, Arg("updates between lines of metrics.jsonl; 10 without it", least=1)] = None,
    checkpoint_minutes: Annotated[
        float, Arg("between checkpoints within an epoch; one follows every epoch", least=0)
    ] = 10.0,
    report: Annotated[bool, Arg("evaluate the best network at the end and write report.html")] = True,
    plain: Annotated[bool, Arg("plain lines instead of a live display")] = False,
) -> int:
    """Train a classifier, detector, segmenter or pose model on images of your own or on drawn ones."""
    from .train.recipes import assignments

    changes: dict[str, Any] = assignments(set or [])
    short = dict(epochs=epochs, image_size=size, batch_size=batch, lr=lr)
    short |= dict(pretrained=True if pretrained else None, compile=True if compile else None)
    for name, value in short.items():
        if value is not None and name in changes:
            raise UsageError(
                f"{name} given twice, as {value} and by --set {name}={changes[name]}; expected one of them"
            )
        if value is not None:
            changes[name] = value
    register_models()
    from .train.engine import Interrupted
    from .training import Request, check_twin, write_report
    from .training import train as run

    arguments: dict[str, dict[str, Any]] = {
        name: {key: value_of(text) for key, text in assignments(given or [], flag(name)).items()}
        for name, given in (
            ("model_args", model_args),
            ("pool_args", pool_args),
            ("broadcast_args", broadcast_args),
            ("head_args", head_args),
            ("neck_args", neck_args),
        )
    }
    request = Request(
        data=data,
        val=val,
        split=split,
        root=root,
        download=download,
        allow_outside=allow_outside,
        task=task,
        head=head,
        neck=neck,
        model=model,
        pool=pool,
        broadcast=broadcast,
        **arguments,
        recipe=recipe,
        changes=changes,
        init=init,
        out=out,
        seed=seed,
        strict=strict,
        workers=workers,
        threads=threads,
        device=device,
        processes=processes,
        log_every=log_every,
        checkpoint_minutes=checkpoint_minutes,
        report=report,
    )
    if twin:
        check_twin(request, twin)
    first = int(os.environ.get("RANK", 0)) == 0
    try:
        # The report of a run with a twin compares the two, so it is written when both are there
        outcome = run(replace(request, report=report and not twin), resume=resume, command=typed(), plain=plain)
        outcomes = [outcome]
        if twin:
            other = replace(request, pool=twin, pool_args={}, out=str(outcome.folder / f"twin-{twin}"))
            again = resume and Path(other.out or "").is_dir()
            outcomes.append(run(other, resume=again, command=typed(), plain=plain))
            if report and first:
                outcomes[0] = write_report(outcome, request)
    except Interrupted as stop:
        print(f"broadsight: {stop}", file=sys.stderr)
        return stop.code
    if first:
        _conclude(outcomes)
    return DONE


def _conclude(outcomes: list[Any]) -> None:
    """Say how well a run went, beside its twin if there is one, and what to do next."""
    if len(outcomes) > 1:
        from rich.table import Table

        table = Table()
        table.add_column("network")
        for name in (f"{outcomes[0].goal} %", "best epoch", "parameters M", "minutes", "run"):
            table.add_column(name, justify="left" if name == "run" else "right", no_wrap=True)
        for outcome in outcomes:
            progress = outcome.progress
            epoch = str(progress.best_epoch) if progress.best is not None else "-"
            figures = [number(progress.best), epoch, number(outcome.parameters, 1e6)]
            table.add_row(outcome.title, *figures, number(outcome.seconds, 60, 1), str(outcome.folder))
        show(table, whole=True)
    first = outcomes[0]
    progress = first.progress
    skipped = f"; {len(progress.skipped)} pictures could not be read, see skipped.json" if progress.skipped else ""
    if progress.best is None:
        print(f"no epoch has a {first.goal} to be compared by: the weights are those of the last one{skipped}")
    else:
        print(f"best {first.goal} {number(progress.best)} %{first.over} in epoch {progress.best_epoch}{skipped}")
    print(f"run: {first.folder} (model.safetensors, metrics.jsonl, curves.png)")
    print(f'load it: import broadsight, timm; timm.create_model("local-dir:{first.folder}", pretrained=True)')
    if first.goal == "top-1":
        print("next: broadsight train PATH/TO/YOUR/IMAGES    # one folder per class; --help lists what can be changed")
    else:
        print(f"next: broadsight predict {first.folder} PATH/TO/YOUR/IMAGES --out DIR    # draws what it finds")
    for note in first.notes:
        if note.startswith("no report"):
            print(f"note: {printable(note)}", file=sys.stderr)
    if first.report:
        print(f"report: {first.report}    # open it in a browser")


def recipes(
    pattern: Annotated[str | None, Arg("name or wildcard such as 'stvit-*'", True, "PATTERN")] = None,
    json: Annotated[bool, Arg("print JSON, with all settings")] = False,
) -> int:
    """List recipes: what each is for, what it costs to compute, what its paper reports."""
    from fnmatch import fnmatch

    from .train.recipes import find, names, nearest

    chosen = [find(name) for name in names() if pattern is None or fnmatch(name, pattern)]
    if not chosen:
        raise ValueError(f"no recipe matches {pattern!r}; nearest: {nearest(pattern or '', names())}")
    if json:
        print(json_.dumps([asdict(entry) for entry in chosen], indent=2))
        return DONE
    from rich.table import Table

    table = Table()
    for name in ("recipe", "model", "data"):
        table.add_column(name, no_wrap=True)
    for name in ("epochs", "pixels", "cost", "paper"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("about")
    for entry in chosen:
        recipe = entry.recipe
        model = " + ".join(filter(None, [entry.model or "any", entry.pool, entry.neck, entry.head]))
        figures = [str(recipe.epochs + recipe.cooldown_epochs), str(recipe.image_size or "-"), entry.cost or "-"]
        table.add_row(
            entry.name,
            model,
            entry.data or "any",
            *figures,
            entry.reported() or "-",
            entry.about,
        )
    show(table)
    return DONE


def convert(
    source: Annotated[str, Arg("checkpoint as its authors released it, such as a .pth.tar file", True, "SOURCE")],
    target: Annotated[str, Arg("safetensors file to write", True, "TARGET")],
    overwrite: Annotated[bool, Arg("replace a TARGET that exists")] = False,
) -> int:
    """Rewrite a pickled checkpoint as safetensors, without executing anything in it."""
    check_writable(target)
    from .release import contents, convert_release

    try:
        written = convert_release(source, target, overwrite=overwrite)
    except FileExistsError as error:
        raise UsageError(str(error).replace("overwrite=True", "--overwrite")) from None
    names, metadata = contents(written)
    left_out = f"; left out: {metadata['left_out']}" if "left_out" in metadata else ""
    print(f"{written}: {len(names)} tensors, {written.stat().st_size:,} bytes{left_out}")
    return DONE


COMMANDS: dict[str, Command] = {
    "models": models,
    "verify": verify,
    "bench": bench,
    "export": export,
    "train": train,
    "eval": eval,
    "predict": predict,
    "report": report,
    "analyze": analyze,
    "explain": explain,
    "gallery": gallery,
    "recipes": recipes,
    "convert": convert,
    "app": app,
}
CONFIGURED = {bench, train, eval, analyze}  # take their options from a YAML file as well


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: What follows `broadsight` on the command line; taken from the process if None.

    Returns:
        The exit code: 0 done, 1 failed while working, 2 wrong usage, 130 interrupted.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if argv is None and isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no Unicode
    remember(given)
    debug = "--debug" in given
    try:
        code = _run([argument for argument in given if argument != "--debug"])
        sys.stdout.flush()  # here, so that a reader who has left is noticed before the interpreter shuts down
        return code
    except BrokenPipeError:
        # Whoever read us has seen enough. What is still buffered must go somewhere at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED, debug)
    except Exception as error:
        if is_usage(error):
            return _complain(one_line(error), WRONG_USAGE, debug)
        where = "" if debug else "; --debug shows where"
        return _complain(one_line(error) + where, FAILED, debug)


def _run(argv: list[str]) -> int:
    argv = names_first(together(argv, COMMANDS), COMMANDS)
    known = {argv[0]: COMMANDS[argv[0]]} if argv and argv[0] in COMMANDS else COMMANDS  # others are not asked for
    parser = build_parser(known, CONFIGURED, __version__)
    if not argv:
        parser.print_help(sys.stderr)
        return WRONG_USAGE
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        near = get_close_matches(argv[0], COMMANDS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"unknown command {argv[0]!r}; {hint}commands are {', '.join(COMMANDS)}")
    try:
        given = parser.parse_args(argv)
    except SystemExit as leave:  # how argparse ends after --help, --version and --print_config
        return leave.code if isinstance(leave.code, int) else DONE
    except (UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config: {first_line(error)}; expected a text file in YAML") from None
    command = COMMANDS[given.command]
    values = {name: value for name, value in given[given.command].as_dict().items() if name != "config"}
    explicit(named_in(argv, command))
    check_values(command, values)
    return copy_context().run(command, **values)  # what a command allows ends with it


def _complain(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"broadsight: {printable(message)}", file=sys.stderr)
    return code


def _foreign(pattern: str, known: set[str]) -> list[dict[str, Any]]:
    """Catalogue rows for timm's own models, of which no paper's table is at hand."""
    import timm
    import torch

    from .macs import executed_macs

    rows = []
    names = [name for name in timm.list_models(pattern) if name not in known]
    with progress_bar() as progress:
        for i, name in enumerate(names):
            progress(i, len(names), name)
            with torch.device("meta"):
                model: Any = timm.create_model(name)
            channels, height, width = model.pretrained_cfg["input_size"]
            rows.append(
                {
                    "model": name,
                    "family": type(model).__module__.rpartition(".")[2],
                    "params": sum(p.numel() for p in model.parameters()),
                    "macs": executed_macs(model, (height, width), channels),
                    "paper_params_m": None,
                    "paper_macs_g": None,
                    "paper_top1": None,
                    "source": "timm",
                }
            )
    return rows
