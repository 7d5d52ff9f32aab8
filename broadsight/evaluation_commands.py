"""The commands that ask trained networks: eval, predict and report."""

import json as json_
import re
import sys
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from .command_line import DONE, FAILED, INTERRUPTED, Arg, UsageError, register_models, typed, value_of
from .terminal import check_creatable, check_writable, number, printable, progress_bar, show

if TYPE_CHECKING:
    from rich.table import Table

WORST = 5  # classes that the terminal shows

# Options that several commands share.
Run = Annotated[str, Arg("folder of a run, or a timm name", True, "RUN|MODEL")]
Checkpoint = Annotated[
    str | None, Arg("weights for a timm name: a file, a run, or package (of an installed one)", metavar="RUN|FILE")
]
Pretrained = Annotated[bool, Arg("timm's own weights for a timm name; without them random ones, for a trial")]
ModelArgs = Annotated[
    list[str] | None, Arg("arguments of a timm name, such as in_chans=1", metavar="KEY=VALUE", pairs=True)
]
Size = Annotated[int | None, Arg("image side in pixels; without it what the network was trained for")]
Light = Annotated[bool, Arg("let a 'map' pool classify with its averaged tokens alone")]
Batch = Annotated[int, Arg("images per call")]
Workers = Annotated[int | None, Arg("processes that prepare images")]
Threads = Annotated[int | None, Arg("threads of torch's operators")]
Flip = Annotated[bool, Arg("of a dense run: look at the mirror image of every picture too")]
Scales = Annotated[str | None, Arg("of a dense run: look at pictures in several sizes, such as 0.75,1,1.25")]
Slide = Annotated[bool, Arg("of a run that segments: look through overlapping windows instead of at the whole picture")]
Device = Annotated[Literal["auto", "cpu", "cuda"], Arg("where to compute")]


def eval(
    run: Run,
    data: Annotated[
        str | None,
        Arg(
            "pictures, as train takes them, an ImageNet set, or a folder of several; none: what the run validated on",
            True,
            "DATA",
        ),
    ] = None,
    suite: Annotated[
        str | None,
        Arg(
            "joined by commas: occlusion, fgsm, salient, corruptions, robustness (all four); or what DATA must be: "
            "imagenet, imagenet-real, imagenet-v2, imagenet-a, imagenet-r, imagenet-sketch"
        ),
    ] = None,
    beside: Annotated[
        str | None, Arg("further runs and timm names to compare, joined by commas; NAME@FILE brings its weights")
    ] = None,
    out: Annotated[
        str | None, Arg("folder for the result; without it a new one in evaluations/", metavar="DIR")
    ] = None,
    part: Annotated[
        Literal["auto", "train", "val", "test", "all"], Arg("of DATA; auto: what is set apart to validate, or all")
    ] = "auto",
    split: Annotated[float | None, Arg("where nothing is: the part that training with this --split held out")] = None,
    samples: Annotated[int | None, Arg("so many pictures, drawn by chance, instead of all")] = None,
    metrics: Annotated[
        str | None,
        Arg(
            "figures, joined by commas, that must be there: top1, top5, loss, balanced_accuracy, macro_f1, auroc, ece, "
            "confidence; without it all that can be"
        ),
    ] = None,
    bins: Annotated[int, Arg("of the calibration error")] = 15,
    checkpoint: Checkpoint = None,
    pretrained: Pretrained = True,
    model_args: ModelArgs = None,
    size: Size = None,
    light: Light = False,
    saliency: Annotated[
        str | None, Arg("of the suite salient: scenes, gradcam, dino, or your own as file.py:function")
    ] = None,
    dino_checkpoint: Annotated[str | None, Arg("weights of the saliency dino; timm's without", metavar="FILE")] = None,
    corruptions: Annotated[str | None, Arg("of the suite corruptions, joined by commas; all fifteen without")] = None,
    severities: Annotated[str | None, Arg("of the suite corruptions, joined by commas; 1,2,3,4,5 without")] = None,
    epsilons: Annotated[str | None, Arg("of the suite fgsm, in 255ths, joined by commas; 1,4,8 without")] = None,
    occluded: Annotated[
        str | None, Arg("of the suite occlusion, parts of the side, joined by commas; 0.25,0.5,0.75 without")
    ] = None,
    real_labels: Annotated[str | None, Arg("other labels for imagenet-real than timm's", metavar="FILE")] = None,
    flip: Flip = False,
    scales: Scales = None,
    slide: Slide = False,
    batch: Annotated[int | None, Arg("images per call; 64, or of a dense run 4")] = None,
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "auto",
    seed: Annotated[
        int | None, Arg("of samples and suites; and of scenes and hold-outs, where it is the run's")
    ] = None,
    strict: Annotated[bool, Arg("stop at an image that cannot be read instead of skipping it")] = False,
    latency: Annotated[bool, Arg("take times")] = True,
    root: Annotated[str | None, Arg("where a timm dataset lies or is put", metavar="DIR")] = None,
    download: Annotated[bool, Arg("let a timm dataset be fetched")] = False,
    json: Annotated[
        str | None, Arg("print the record as JSON, not tables, or write it to FILE; comes last", False, "FILE", "-")
    ] = None,
) -> int:
    """Evaluate a run: accuracy, calibration and robustness, or AP and mIoU of a dense one; with a report."""
    check_writable(json if json != "-" else None)
    register_models()
    from .train.run_folder import task_of

    if task_of(Path(run)) not in (None, "classify"):
        from .dense_commands import eval_dense, refuse

        refuse(
            "detect, instances, segment or keypoints",
            dict(suite=suite, beside=beside, metrics=metrics, checkpoint=checkpoint, model_args=model_args, light=light)
            | dict(saliency=saliency, corruptions=corruptions, severities=severities, epsilons=epsilons)
            | dict(occluded=occluded, real_labels=real_labels, root=root, download=download),
        )
        return eval_dense(
            run,
            data,
            out=out,
            json=json,
            batch=batch,
            part=part,
            split=split,
            seed=seed,
            samples=samples,
            flip=flip,
            scales=_numbers("--scales", scales, float) or (1.0,),
            slide=slide,
            size=size,
            workers=workers,
            threads=threads,
            device=device,
            strict=strict,
        )
    _only_dense(flip=flip, scales=scales, slide=slide)
    from .evaluate.suites import Choices
    from .evaluating import evaluate
    from .evaluation_tasks import Asked
    from .reporting import write_evaluation
    from .train.recipes import assignments
    from .train.state import write_text

    folder = new_folder(out)
    choices = Choices(
        **_given(
            sides=_numbers("--occluded", occluded, float),
            epsilons=_numbers("--epsilons", epsilons, float),
            corruptions=_words(corruptions),
            severities=_numbers("--severities", severities, int),
            saliency=saliency,
            dino_checkpoint=dino_checkpoint,
        )
    )
    asked = Asked(
        run,
        data,
        suites=_words(suite) or (),
        beside=_words(beside) or (),
        part=part,
        split=split,
        root=root,
        download=download,
        samples=samples,
        metrics=_words(metrics),
        bins=bins,
        checkpoint=checkpoint,
        pretrained=pretrained,
        model_args={key: value_of(text) for key, text in assignments(model_args or [], "--model-args").items()},
        size=size,
        light=light,
        choices=choices,
        real_labels=real_labels,
        batch=64 if batch is None else batch,
        workers=workers,
        threads=threads,
        device=device,
        strict=strict,
        seed=seed,
        latency=latency,
    )
    with progress_bar() as progress:
        evaluation = evaluate(asked, progress, lambda note: print(f"note: {printable(note)}", file=sys.stderr))
    if evaluation.how["interrupted"]:
        print(f"note: {printable(evaluation.found.notes[-1])}", file=sys.stderr)
    folder = folder or next_folder(evaluation.results[0].task.classifier.title, evaluation.found.description)
    record = write_evaluation(evaluation, folder, typed())
    if json and json != "-":
        write_text(json_.dumps(record, indent=1, allow_nan=False) + "\n", Path(json))
    if json == "-":
        print(json_.dumps(record, indent=1, allow_nan=False))
        return INTERRUPTED if evaluation.how["interrupted"] else DONE
    for table in _tables(record):
        show(table, whole=True)
    if record["skipped"]:
        print(f"{len(record['skipped'])} pictures could not be read; the report names them", file=sys.stderr)
    print(f"report: {folder / 'report.html'} (with evaluation.json and predictions.csv)")
    return INTERRUPTED if evaluation.how["interrupted"] else DONE


def new_folder(out: str | None, usual: str = "evaluations") -> Path | None:
    """The folder for a result, after a check that it can be made: hours of work should not end in this.

    Args:
        usual: Where a new one is made if none is named.
    """
    folder = Path(out) if out else None
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out {out} exists and is not an empty folder; choose another, nothing was changed")
    check_creatable(folder or Path(usual))
    return folder


def _only_dense(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise UsageError(f"--{name} is for dense runs (--task detect and others); this is a classifier")


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(option: str, text: str | None, kind: type) -> tuple[Any, ...] | None:
    try:
        return None if text is None else tuple(kind(word) for word in _words(text) or ())
    except ValueError:
        raise UsageError(f"{option} {text}; expected numbers joined by commas") from None


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def next_folder(title: str, found: dict[str, Any]) -> Path:
    """The next free number of a name that says what was evaluated."""
    from .run_request import numbers_taken

    data = re.sub(r"\W+", "-", Path(str(found.get("data") or found.get("kind"))).name or "data").strip("-")
    stem = f"{data}-{re.sub(r'[^a-zA-Z0-9_.-]+', '-', title)}"
    return Path("evaluations") / f"{stem}-{max(numbers_taken(Path('evaluations'), stem), default=0) + 1}"


def _tables(record: dict[str, Any]) -> list["Table"]:
    """What the terminal shows of a record: all classifiers, the worst classes, the suites."""
    from rich.table import Table

    from .evaluation_record import FIGURES
    from .report.details import MEANS

    models = [{**record["model"], "figures": record["figures"]}, *record["beside"]]
    table = Table()
    table.add_column("network")
    for name in ("parameters M", "MACs G", "latency ms"):
        table.add_column(name, justify="right", no_wrap=True)
    names = [name for name in FIGURES if name in record["figures"]]
    for name in names:
        table.add_column(FIGURES[name] + ("" if name == "loss" else " %"), justify="right")
    for model in models:
        latency = model["latency_ms"]
        latency = latency["median"] if isinstance(latency, dict) else latency
        cells = [number(model["parameters"], 1e6), number(model["macs"], 1e9, 3), number(latency)]
        table.add_row(model["title"], *cells, *(number(model["figures"].get(name)) for name in names))
    there, classes = record["coverage"]["occurring"], record["coverage"]["classes"]
    if there < classes and len(means := [FIGURES[name] for name in names if name in MEANS]):
        table.caption = f"{', '.join(means)} over {there} of {classes:,} classes: the others have no pictures here"
        table.caption_justify = "left"
    tables = [table]
    seen = [row for row in record["per_class"] if row["pictures"]]
    if len(seen) > 1:
        worst = Table(title=f"the {min(WORST, len(seen))} worst of {len(seen)} classes")
        worst.add_column("class")
        for name in ("pictures", "recall %", "precision %"):
            worst.add_column(name, justify="right")
        worst.add_column("most often taken for")
        for row in sorted(seen, key=lambda row: row["recall"])[:WORST]:
            other = f"{row['most_confused_with']} ({row['confused']})" if row["confused"] else "-"
            cells = [str(row["pictures"]), number(row["recall"], digits=1), number(row["precision"], digits=1)]
            worst.add_row(row["class"], *cells, other)
        tables.append(worst)
    names = dict.fromkeys(suite["name"] for suite in record["suites"])
    return tables + [_suite_table([suite for suite in record["suites"] if suite["name"] == name]) for name in names]


def _suite_table(suites: list[dict[str, Any]]) -> "Table":
    """One suite of all classifiers: their cases down, values of the axis across."""
    from rich.table import Table

    table = Table(title=f"{suites[0]['title']}: top-1 % by {suites[0]['axis']}", title_justify="left")
    rows = [(suite["model"], row) for suite in suites for row in suite["rows"]]
    places = list(dict.fromkeys(row["at"] for _, row in rows))
    table.add_column("network", no_wrap=True)
    table.add_column("case", no_wrap=True)
    for place in places:
        table.add_column("top-1" if place is None else f"{place:g}", justify="right")
    for model, case in dict.fromkeys((model, row["case"]) for model, row in rows):
        found = {row["at"]: row["top1"] for name, row in rows if (name, row["case"]) == (model, case)}
        table.add_row(model, case, *(number(found.get(place), digits=1) for place in places))
    return table


def report(
    run: Annotated[str, Arg("folder of a run", True, "RUN")],
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "auto",
) -> int:
    """Write a run's report.html again, from its folder and its data."""
    register_models()
    import torch

    from .reporting import report_run
    from .train.run_folder import is_run

    if not is_run(Path(run)):
        raise FileNotFoundError(f"there is no run in {run}; give the folder that train wrote")
    if threads is not None:
        torch.set_num_threads(threads)
    print(f"report: {report_run(Path(run), workers=workers, device=device)}")
    return DONE


def predict(
    run: Run,
    images: Annotated[
        list[str] | None, Arg("files, folders, or quoted patterns such as 'photos/**/*.jpg'", True, "IMAGE")
    ] = None,
    list: Annotated[str | None, Arg("text file with the path of an image on every line", metavar="FILE")] = None,
    top: Annotated[int, Arg("classes of each image, the most probable first")] = 5,
    csv: Annotated[
        str | None, Arg("print CSV, not a table, or write it to FILE; comes last", False, "FILE", "-")
    ] = None,
    json: Annotated[
        str | None,
        Arg("print JSON, not a table, or write it to FILE; .jsonl has a line for each image", False, "FILE", "-"),
    ] = None,
    checkpoint: Checkpoint = None,
    pretrained: Pretrained = True,
    model_args: ModelArgs = None,
    size: Size = None,
    light: Light = False,
    out: Annotated[
        str | None, Arg("of a dense run: folder for pictures with what was found drawn onto them", metavar="DIR")
    ] = None,
    threshold: Annotated[float, Arg("of a dense run: the lowest score that is drawn")] = 0.5,
    boxes: Annotated[
        str | None,
        Arg("of a pose model: where the objects are, a COCO .json or a detector's results.json", metavar="FILE"),
    ] = None,
    flip: Flip = False,
    scales: Scales = None,
    slide: Slide = False,
    batch: Batch = 64,
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "auto",
) -> int:
    """Say what images show, as a table, CSV or JSON; a dense run draws what it finds and writes COCO results."""
    outputs = {form: path for form, path in (("csv", csv), ("json", json)) if path is not None}
    if csv is not None and csv == json:
        where = "the terminal" if csv == "-" else csv
        raise UsageError(f"--csv and --json both to {where}; expected different files")
    for path in outputs.values():
        check_writable(path if path != "-" else None)
    register_models()
    from .train.run_folder import task_of

    if task_of(Path(run)) not in (None, "classify"):
        from .dense_commands import predict_dense, refuse

        refuse("detect or another", dict(checkpoint=checkpoint, model_args=model_args, light=light))
        return predict_dense(
            run,
            images,
            list,
            out=out,
            json=json,
            csv=csv,
            threshold=threshold,
            boxes=boxes,
            size=size,
            threads=threads,
            device=device,
            flip=flip,
            scales=_numbers("--scales", scales, float) or (1.0,),
            slide=slide,
        )
    _only_dense(out=out, boxes=boxes, flip=flip, scales=scales, slide=slide)
    import torch

    from . import predicting
    from .classifier import open_classifier
    from .data.unlabelled import find_images
    from .train.recipes import assignments

    predicting.check_counts(top=top, batch=batch, workers=workers, threads=threads)
    for form, path in outputs.items():
        predicting.check_output(f"--{form}", path)
    source, notes = find_images(images or [], list)
    if threads is not None:
        torch.set_num_threads(threads)
    classifier = open_classifier(
        run,
        checkpoint=checkpoint,
        pretrained=pretrained,
        model_args={key: value_of(text) for key, text in assignments(model_args or [], "--model-args").items()},
        size=size,
        light=light,
        device=device,
    )
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    top = min(top, classifier.num_classes)
    printed, many = "-" in outputs.values(), len(source) > predicting.FEW
    summary = predicting.Summary(len(source))
    with ExitStack() as stack:
        # Writers first: the bar would take over the standard output. On the same terminal it would be in the way.
        writers = [stack.enter_context(predicting.writing(path, top, form)) for form, path in outputs.items()]
        bar: Any = nullcontext(lambda *_: None) if printed and sys.stdout.isatty() else progress_bar()
        progress = stack.enter_context(bar)
        progress(0, len(source), classifier.title)
        found = predicting.predict(
            classifier,
            source,
            top=top,
            batch=batch,
            workers=predicting.useful_workers(len(source), batch) if workers is None else workers,
            seen=lambda _: progress(summary.read + summary.failed, len(source), classifier.title),
        )
        for prediction in stack.enter_context(closing(found)):
            for writer in writers:
                writer.write(prediction)
            summary.add(prediction)
    for path in outputs.values():
        predicting.write_settings(path, typed(), classifier, summary)
    if not printed:
        if not (many and outputs):
            show(summary.table())
        if many and summary.read:
            show(summary.class_table())
        if many and not outputs:
            print(
                f"the first {len(summary.first)} of {len(source):,} images; --csv FILE or --json FILE has all of them"
            )
        for path in outputs.values():
            print(f"written: {path}")
    for line in summary.complaints():
        print(line, file=sys.stderr)
    return DONE if summary.read else FAILED
