"""What eval and predict do with a dense run: figures as COCO has them, pictures of what was found, result files."""

import json as json_
import sys
from pathlib import Path
from typing import Any

from .command_line import DONE, FAILED, INTERRUPTED, UsageError, typed
from .terminal import check_creatable, number, printable, progress_bar, show

WORST = 5  # classes that the terminal shows
FEW = 50  # pictures that are all shown
BATCH = 4  # pictures per call, unless asked for otherwise: they are large


def eval_dense(
    run: str, data: str | None, *, out: str | None, json: str | None, batch: int | None, **options: Any
) -> int:
    """Evaluate a dense run, write evaluation.json, results.json and report.html, and show the figures."""
    from .dense_evaluating import DenseAsked, evaluate_dense, write_dense_evaluation
    from .evaluation_commands import new_folder, next_folder
    from .train.state import write_text

    folder = new_folder(out)
    asked = DenseAsked(run, data, batch=batch or BATCH, **options)
    with progress_bar() as progress:
        evaluation = evaluate_dense(asked, progress, lambda note: print(f"note: {printable(note)}", file=sys.stderr))
    folder = folder or next_folder(evaluation.run.title, evaluation.part.description)
    record = write_dense_evaluation(evaluation, folder, typed())
    code = INTERRUPTED if evaluation.interrupted else DONE
    if json and json != "-":
        write_text(json_.dumps(record, indent=1, allow_nan=False) + "\n", Path(json))
    if json == "-":
        print(json_.dumps(record, indent=1, allow_nan=False))
        return code
    for table in _tables(record):
        show(table, whole=True)
    if record["skipped"]:
        print(f"{len(record['skipped'])} pictures could not be read; the report names them", file=sys.stderr)
    also = "evaluation.json and results.json" if evaluation.results else "evaluation.json"
    print(f"report: {folder / 'report.html'} (with {also})")
    return code


def _tables(record: dict[str, Any]) -> list[Any]:
    """All figures, and the worst classes."""
    from rich.table import Table

    from .dense_evaluating import HEADLINE
    from .report.words import meaning

    table = Table()
    table.add_column("network")
    table.add_column("pictures", justify="right")
    figures = record["figures"]
    order = [name for name in HEADLINE[record["task"]] if name in figures]
    order += [name for name in figures if name not in order and ("_ap_" in name or name.endswith("_ap"))]
    for name in order:
        table.add_column(f"{meaning(name).label} %", justify="right")
    table.add_column("ms a picture", justify="right")
    cells = [number(figures[name]) for name in order]
    title, pictures = record["model"]["title"], f"{record['data']['pictures']:,}"
    table.add_row(title, pictures, *cells, number(record["latency_ms"], digits=1))
    columns: list[str] = ["iou", "acc"] if record["task"] == "segment" else [*order[:1], *(f"{n}50" for n in order[:1])]
    rows = [row for row in record["per_class"] if columns and row.get(columns[0]) is not None]
    there, classes = record["coverage"]["occurring"], record["coverage"]["classes"]
    if there < classes:
        amount = "pixels" if record["task"] == "segment" else "objects"
        table.caption = f"means over {there} of {classes} classes: the others have no {amount} here"
        table.caption_justify = "left"
    if len(rows) < 2:
        return [table]
    worst = Table(title=f"the {min(WORST, len(rows))} worst of {len(rows)} classes")
    worst.add_column("class")
    amount = "pixels" if record["task"] == "segment" else "objects"
    for name in (amount, *columns):
        worst.add_column(name if name == amount else f"{meaning(name).label} %", justify="right")
    for row in sorted(rows, key=lambda row: row[columns[0]])[:WORST]:
        worst.add_row(row["name"], f"{row[amount]:,}", *(number(row.get(name), digits=1) for name in columns))
    return [table, worst]


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

    from . import dense_predicting
    from .data.unlabelled import find_images
    from .dense_run import open_dense

    if csv == "-":
        raise UsageError("--csv of a dense run goes to a file; expected --csv FILE")
    folder = Path(out) if out else None
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--out {out} is a file; expected a folder for the pictures")
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
        print("note: each picture is taken for one object; --boxes FILE says where several are", file=sys.stderr)
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
        what = "pictures and masks/" if opened.task == "segment" else "pictures and results.json"
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
