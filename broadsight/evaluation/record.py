"""An evaluation as plain types: what evaluation.json holds and a report is made from."""

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..benchmark.run import Summary
from ..data.names import CsvRows
from ..provenance import header
from ..visual.metrics import label
from .classification import BINS, calibration_record, confusion_matrix, coverage, most_confused, per_class
from .run import Evaluation, Result

MOST_CLASSES = 200  # of a confusion matrix; a larger one says nothing that its most frequent pairs do not
ORDER = ("real_top1", "top1", "top5", "balanced_accuracy", "macro_f1", "auroc", "ece", "confidence", "loss")


def record_of(evaluation: Evaluation) -> dict[str, Any]:
    """All that was found out, with what was resolved to find it out."""
    request, first = evaluation.request, evaluation.results[0]
    data = str(request.data or evaluation.found.description.get("data") or evaluation.found.place)
    skipped: dict[str, str] = {}
    for result in evaluation.results:
        skipped.update(result.predictions.skipped)
    record = {
        "title": f"{first.task.classifier.title} on {data}",
        "kind": "evaluation",
        "subtitle": _subtitle(evaluation),
        "headline": headline(first, evaluation.how),
        "facts": [model_facts(first, evaluation.how), data_facts(evaluation)],
        **result_record(first, request.bins),
        "suites": [entry for result in evaluation.results for entry in suite_records(result)],
        "beside": [_beside(result) for result in evaluation.results[1:]],
        "skipped": skipped,
        "notes": list(evaluation.found.notes),
        "data": evaluation.found.description,
        "asked": request.as_json(),
        "how": evaluation.how,
        "seed": request.seed or 0,
        **header(request.command),
    }
    # Lists for tuples, and None for what is no number: whoever reads it finds what was written
    return json.loads(json.dumps(record), parse_constant=lambda _: None)


def result_record(result: Result, bins: int = BINS) -> dict[str, Any]:
    """What one classifier said: figures, classes, confusions, calibration."""
    said, names = result.predictions, result.task.names
    record = {
        "model": model_record(result),
        "figures": result.figures,
        "absent": dict(result.absent),
        "classes": list(names),
        "images": len(said),
        "coverage": dict(zip(("occurring", "classes"), coverage(said), strict=True)),
        "per_class": per_class(said, names),
        "confused": most_confused(said, names),
        "calibration": calibration_record(said, bins),
    }
    if said.classes <= MOST_CLASSES:
        record["confusion"] = confusion_matrix(said.labels, said.predicted, said.classes).tolist()
    if "ece" in result.absent:
        record["absent"]["calibration"] = f"the calibration error {result.absent['ece']}"
        del record["calibration"]
    return record


def model_record(result: Result) -> dict[str, Any]:
    classifier = result.task.classifier
    return {
        "title": classifier.title,
        "source": classifier.source,
        "parameters": classifier.parameters,
        "macs": result.macs,
        "input_size": [classifier.transforms.channels, classifier.transforms.size, classifier.transforms.size],
        "latency_ms": None if result.latency is None else asdict(result.latency),
    }


def suite_records(result: Result) -> list[dict[str, Any]]:
    title = result.task.classifier.title
    records = [asdict(suite) for suite in result.suites]
    if result.sets:
        rows = [
            {"case": f"{case}, {classes:,} classes", "at": None, "top1": top1, "images": images}
            for case, classes, images, top1 in result.sets
        ]
        about = "Top-1 on every set that the folder holds; where a set has some of the classes, those alone compete."
        records.insert(
            0, dict(name="imagenet", title="ImageNet's families", about=about, axis="set", rows=rows, summary={})
        )
    return [{**record, "model": title} for record in records]


def _beside(result: Result) -> dict[str, Any]:
    model = model_record(result)
    latency = None if result.latency is None else result.latency.median
    return {**model, "latency_ms": latency, "figures": result.figures, "absent": result.absent}


def page_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as `broadsight.report.render` takes it: the classifier's own row in the same form as the others'."""
    model = record["model"]
    latency = (model["latency_ms"] or {}).get("median")
    own = {"model": model["title"], "parameters": model["parameters"], "macs": model["macs"], "latency_ms": latency}
    return {**record, **own}


def _subtitle(evaluation: Evaluation) -> str:
    first = evaluation.results[0]
    images, classes = len(first.predictions), len(set(first.predictions.labels.tolist()))
    others = f", beside {len(evaluation.results) - 1} more" if len(evaluation.results) > 1 else ""
    return f"{images:,} images of {classes:,} classes{others}"


def headline(result: Result, how: Mapping[str, Any]) -> list[dict[str, str]]:
    """The few figures that come first."""
    shown = [name for name in ("real_top1", "top1", "top5", "balanced_accuracy", "ece") if name in result.figures][:4]
    entries = [{"label": label(name), "value": f"{result.figures[name]:.1f} %"} for name in shown]
    entries.append({"label": "parameters", "value": f"{result.task.classifier.parameters / 1e6:.2f} M"})
    if result.latency is not None:
        note = f"one image, {how['device']}, threads: {how['threads']}"
        entries.append({"label": "latency", "value": f"{result.latency.median:.1f} ms", "note": note})
    return entries


def model_facts(result: Result, how: Mapping[str, Any]) -> dict[str, Any]:
    classifier = result.task.classifier
    side = classifier.transforms.size
    rows = [
        ["model", classifier.title],
        ["from", classifier.source],
        ["parameters", f"{classifier.parameters:,}"],
        ["size", f"{4 * classifier.parameters / 1e6:.1f} MB in single precision"],
        ["image", f"{side} x {side} pixels, {classifier.transforms.channels} channels"],
        ["MACs", "not counted" if result.macs is None else f"{result.macs / 1e9:.3f} G"],
        ["latency", "not measured" if result.latency is None else _latency(result.latency, how)],
    ]
    return {"group": "Model", "rows": rows}


def _latency(summary: Summary, how: Mapping[str, Any]) -> str:
    spread = f"fastest {summary.minimum:.2f} ms, quartiles {100 * summary.spread:.0f} % of the median apart"
    return f"{summary.median:.2f} ms for one image ({spread}); {how['device']}, threads: {how['threads']}"


def data_facts(evaluation: Evaluation) -> dict[str, Any]:
    found, first = evaluation.found, evaluation.results[0]
    rows = [["images", f"{len(first.predictions):,}"], ["place", found.place]]
    if evaluation.request.samples and len(first.task.source) < len(found.source):
        rows.append(["drawn by chance", f"{len(first.task.source):,} of {len(found.source):,}"])
    rows += [
        [key, str(found.description[key])] for key in ("kind", "part", "split", "seed") if found.description.get(key)
    ]
    return {"group": "Data", "rows": rows}


def predictions_csv(result: Result) -> str:
    """A line for each image: what it shows, what was said, how surely, and how probable the truth seemed."""
    said, task = result.predictions, result.task
    text = io.StringIO()
    rows = CsvRows(text)
    rows.write(["file", "label", "predicted", "confidence", "rank", "loss"])
    for place in range(len(said)):
        row = int(said.rows[place])
        rows.write(
            [
                task.source.name(row),
                task.names[said.labels[place]],
                task.names[said.predicted[place]],
                f"{said.confidence[place]:.6f}",
                int(said.ranks[place]) + 1,
                f"{said.losses[place]:.6f}",
            ]
        )
    return text.getvalue()
