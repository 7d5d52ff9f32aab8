"""The command that names what images show, or finds it in them: predict."""

import json as json_
import sys
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Annotated, Any

from ..errors import UsageError, printable
from .evaluate import _numbers
from .parser import (
    CLASSIFIERS,
    DENSE_RUNS,
    DONE,
    FAILED,
    MOST,
    SCORED,
    AllowOutside,
    Arg,
    Batch,
    Checkpoint,
    Device,
    Flip,
    Light,
    ModelArgs,
    Pretrained,
    Run,
    Scales,
    Size,
    Slide,
    Threads,
    check_options,
    facts_of,
    register_models,
    typed,
    value_of,
)
from .terminal import check_creatable, check_writable, progress_bar, show


def predict(
    run: Run,
    images: Annotated[
        list[str] | None, Arg("files, folders, or quoted patterns such as 'photos/**/*.jpg'", True, "IMAGE")
    ] = None,
    list: Annotated[str | None, Arg("text file with the path of an image on every line", metavar="FILE")] = None,
    allow_outside: AllowOutside = False,
    top: Annotated[int, Arg("classes of each image, the most probable first", of=(CLASSIFIERS,), least=1)] = 5,
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
        str | None,
        Arg("of a dense run: folder for images with what was found drawn onto them", metavar="DIR", of=(DENSE_RUNS,)),
    ] = None,
    threshold: Annotated[
        float, Arg("of a dense run: the lowest score that is drawn", of=(SCORED,), least=0, most=1)
    ] = 0.5,
    boxes: Annotated[
        str | None,
        Arg(
            "of a pose model: where the objects are, a COCO .json or a detector's results.json",
            metavar="FILE",
            of=(DENSE_RUNS,),
        ),
    ] = None,
    flip: Flip = False,
    scales: Scales = None,
    slide: Slide = False,
    batch: Batch = 64,
    workers: Annotated[int | None, Arg("processes that prepare images", of=(CLASSIFIERS,), least=0, most=MOST)] = None,
    threads: Threads = None,
    device: Device = "auto",
) -> int:
    """Say what images show, as a table, CSV or JSON; a dense run draws what it finds and writes COCO results."""
    given = dict(locals())
    outputs = {form: path for form, path in (("csv", csv), ("json", json)) if path is not None}
    if csv is not None and csv == json:
        where = "the terminal" if csv == "-" else csv
        raise UsageError(f"--csv and --json both to {where}; expected different files")
    for path in outputs.values():
        check_writable(path if path != "-" else None)
    register_models()
    from ..data.inside import permit_outside

    permit_outside(allow_outside)
    facts = facts_of(run)
    check_options(predict, given, facts)
    if facts[DENSE_RUNS] is None:
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
    import torch

    from ..data.sources.unlabelled import find_images
    from ..prediction import classification as predicting
    from ..runs.classifier import open_classifier
    from ..training.recipes import assignments

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


FEW = 50  # images that are all shown


def predict_dense(
    run: str,
    images: list[str] | None,
    listing: str | None,
    *,
    out: str | None,
    json: str | None,
    csv: str | None,
    threshold: float,
    boxes: str | None,
    size: int | None,
    threads: int | None,
    device: str,
    flip: bool,
    scales: tuple[float, ...],
    slide: bool,
) -> int:
    """Find objects, masks, keypoints or classes of pixels in images; draw them and write result files."""
    import torch

    from ..data.sources.unlabelled import find_images
    from ..prediction import dense as dense_predicting
    from ..runs.dense_model import open_dense

    if csv == "-":
        raise UsageError("--csv of a dense run goes to a file; expected --csv FILE")
    folder = Path(out) if out else None
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--out {out} is a file; expected a folder for the images")
        check_creatable(folder)
    if threads is not None:
        torch.set_num_threads(threads)
    source, notes = find_images(images or [], listing)
    opened = open_dense(run, device=device, size=size)
    if boxes and not opened.top_down:
        raise UsageError(f"--boxes is for pose models; {opened.head} finds objects by itself")
    known = dense_predicting.read_boxes(boxes) if boxes else None
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    if opened.top_down and known is None:
        print("note: each image is taken for one object; --boxes FILE says where several are", file=sys.stderr)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    done = 0
    with progress_bar() as progress:

        def seen(count: int) -> None:
            nonlocal done
            done += count
            progress(done, len(source), opened.title)

        progress(0, len(source), opened.title)
        findings = dense_predicting.predict_dense(
            opened,
            source,
            folder,
            threshold=threshold,
            flip=flip,
            scales=scales,
            slide=slide,
            boxes=known,
            seen=seen,
        )
    results = Path(json) if json and json != "-" else folder / dense_predicting.RESULTS if folder is not None else None
    dense_predicting.write_findings(
        findings, opened, results=results, table=Path(csv) if csv else None, command=typed()
    )
    if json == "-":
        print(json_.dumps(findings.entries, indent=1))
    else:
        _show_findings(findings.rows)
    for name, reason in findings.errors.items():
        print(f"cannot be read: {printable(name)}: {printable(reason)}", file=sys.stderr)
    if folder is not None:
        what = "images and masks/" if opened.task == "segment" else "images and results.json"
        print(f"drawn: {folder} ({what})")
    return DONE if findings.rows else FAILED


def _show_findings(rows: list[tuple[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("file", overflow="fold")
    table.add_column("found", overflow="fold")
    for name, words in rows[:FEW]:
        table.add_row(Text(printable(name)), Text(printable(words)))
    show(table)
    if len(rows) > FEW:
        print(f"and {len(rows) - FEW:,} more")
