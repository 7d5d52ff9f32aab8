"""The command that trains: train."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from ..errors import UsageError, printable
from .parser import DONE, AllowOutside, Arg, Threads, Workers, flag, register_models, typed, value_of
from .terminal import number, show


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
    compile: Annotated[bool, Arg("torch.compile the model; short for --set compile=true")] = False,
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
        str | None, Arg("train the same model with this pooling too, in DIR/twin-POOL, and compare", metavar="POOL")
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
    report: Annotated[bool, Arg("evaluate the best model at the end and write report.html")] = True,
    plain: Annotated[bool, Arg("plain lines instead of a live display")] = False,
) -> int:
    """Train a classifier, detector, segmenter or pose model on images of your own or on drawn ones."""
    from ..training.recipes import assignments

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
    from ..training.engine import Interrupted
    from ..training.run import Request, check_twin, write_report
    from ..training.run import train as run

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
        options: dict[str, Any] = dict(command=typed(), plain=plain, reporter=_report)
        outcome = run(replace(request, report=report and not twin), resume=resume, **options)
        outcomes = [outcome]
        if twin:
            other = replace(request, pool=twin, pool_args={}, out=str(outcome.folder / f"twin-{twin}"))
            again = resume and Path(other.out or "").is_dir()
            outcomes.append(run(other, resume=again, **options))
            if report and first:
                outcomes[0] = write_report(outcome, request, _report)
    except Interrupted as stop:
        print(f"broadsight: {stop}", file=sys.stderr)
        return stop.code
    if first:
        _conclude(outcomes)
    return DONE


def _report(folder: Path, **options: Any) -> Path:
    """Write the report of a run."""
    from ..report.run import report_run  # not before a run is done: it needs much that training does not

    return report_run(folder, **options)


def _conclude(outcomes: list[Any]) -> None:
    """Say how well a run went, beside its twin if there is one, and what to do next."""
    if len(outcomes) > 1:
        from rich.table import Table

        table = Table()
        table.add_column("model")
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
    skipped = f"; {len(progress.skipped)} images could not be read, see skipped.json" if progress.skipped else ""
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
