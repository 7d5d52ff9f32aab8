"""Reports of dense runs and of their evaluations: scores, and images of what was found."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..dense.average_precision import write_results
from ..dense.scoring import defined, why_missing
from ..evaluation.dense import DenseEvaluation, evaluate_dense, record_of
from ..evaluation.request import Request
from ..files import write_json, write_text
from ..training.records import check_records
from ..training.run_folder import CLASSES_JUDGED, REPORT, RunFolder, over_classes, write_page
from ..visual.canvas import CaptionedImage
from ..visual.metrics import GOALS, HEADLINES, label, meaning
from ..visual.words import percent
from .page import render

EVALUATION, RESULTS = "evaluation.json", "results.json"


def write_dense_evaluation(evaluation: DenseEvaluation, folder: Path | None) -> dict[str, Any]:
    """Write evaluation.json, results.json and report.html into a folder, which is made; without one, none."""
    record = record_of(evaluation)
    if folder is None:
        return record
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(record, folder / EVALUATION)
        if evaluation.results:
            write_results(evaluation.results, folder / RESULTS)
        write_text(render(page_of(record), findings=evaluation.shown), folder / REPORT)
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another --out") from None
    return record


def page_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the record of an evaluation into that of a report."""
    task, figures, data = record["task"], record["figures"], record["data"]
    goal, place = GOALS[task], data.get("place") or data.get("val")
    names = [name for name in HEADLINES[task] if name in figures]
    there, classes = record["coverage"]["occurring"], record["coverage"]["classes"]
    over = over_classes(there, classes).strip()
    asked = [f"{data['images']:,} images of {place}"]
    asked += ["mirrored as well"] * record["views"]["flip"] + ["by windows"] * record["views"]["slide"]
    if record["views"]["scales"] != [1.0]:
        asked.append(f"scales {', '.join(f'{scale:g}' for scale in record['views']['scales'])}")
    absent = dict(record["absent"])
    if figures.get(goal) is None:
        absent["figures"] = f"{meaning(goal).label} {why_missing(goal, there)}"
    rows = [
        ["data", str(place)],
        ["time of an image", f"{record['latency_ms']:.1f} ms" if record["latency_ms"] else "-"],
        ["device", f"{record['device']}, threads: {record['threads']}"],
    ]
    return {
        "title": record["model"]["title"],
        "kind": "evaluation",
        "subtitle": "; ".join(asked),
        "headline": [
            {"label": meaning(name).label, "value": percent(figures[name])} | ({"note": over} if name != "aacc" else {})
            for name in names
        ],
        "figures": defined(figures),
        "absent": absent,
        "class_figures": record["per_class"],
        "parameters": record["model"]["parameters"],
        "notes": [*record["notes"], *(["interrupted: not all images were asked about"] * record["interrupted"])],
        "facts": [{"group": "Evaluation", "rows": rows}],
        **{key: record[key] for key in ("skipped", "command", "versions", "commit")},
    }


def report_dense_run(
    path: Path,
    *,
    workers: int | None = None,
    device: str = "auto",
    seconds: float | None = None,
    evaluated: bool = True,
) -> Path:
    """Write a dense run's report.html: how it went, its scores, and what its best model finds in images."""
    folder = RunFolder(path)
    check_records(folder)
    config, lines = folder.config(), folder.metrics()
    about = config["broadsight"]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    record: dict[str, Any] = {"absent": {"figures": "the model was not evaluated, since the run has not finished"}}
    shown: list[CaptionedImage] = []
    if evaluated and (path / "model.safetensors").is_file():
        options: dict[str, Any] = dict(workers=workers, device=device)
        request = Request(str(path), **options, command=about["command"])
        evaluation = evaluate_dense(request)
        record, shown = page_of(record_of(evaluation)), evaluation.shown
    settings, recipe = about["settings"], about["recipe"]
    rows = [["data", str(settings["data"])], ["head", settings["head"]], ["neck", settings["neck"]]]
    rows += [[name.replace("_", " "), str(recipe[name])] for name in ("epochs", "batch_size", "image_size", "lr")]
    rows += [["minutes", f"{seconds / 60:.1f}"]] if seconds else []
    last = epochs[-1] if epochs else {}
    best = last.get("best")
    done = f"{len(epochs)} of {recipe['epochs']} epochs"
    goal = label(about["goal"])
    over = over_classes(last.get(CLASSES_JUDGED), config["num_classes"])
    kept = f"; no epoch has a {goal} to be compared by, so the model of the last one is kept" * ("best" in last)
    record |= {
        "title": f"{settings['head']} with {settings['model']} on {settings['data']}",
        "kind": "run",
        "subtitle": f"{done}; best {goal} {best:.1f} %{over}" if best is not None else f"{done}{kept}",
        "skipped": {**folder.skipped(), **record.get("skipped", {})},
        "facts": [*record.get("facts", []), {"group": "Training", "rows": rows}],
        **{key: about[key] for key in ("command", "seed", "versions", "commit")},
    }
    write_page(render(record, curves=lines, findings=shown), path / REPORT)
    return path / REPORT
