"""An evaluation as plain types: what evaluation.json holds and a report is made from."""

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..data.names import CsvRows
from ..provenance import header
from ..visual.metrics import label
from .classification import calibration, confusion_matrix, coverage, most_confused, per_class
from .run import Evaluation, Result

MOST_CLASSES = 200  # of a confusion matrix; a larger one says nothing that its most frequent pairs do not
ORDER = ("real_top1", "top1", "top5", "balanced_accuracy", "macro_f1", "auroc", "ece", "confidence", "loss")


def record_of(evaluation: Evaluation) -> dict[str, Any]:
    """All that was found out, with what was resolved to find it out."""
    request, (first, *others) = evaluation.request, evaluation.results
    data = str(request.data or evaluation.found.description.get("data") or evaluation.found.place)
    images, classes = len(first.predictions), len(set(first.predictions.labels.tolist()))
    beside = f", beside {len(others)} more" if others else ""
    record = {
        "title": f"{evaluation.title} on {data}",
        "kind": "evaluation",
        "subtitle": f"{images:,} images of {classes:,} classes{beside}",
        "headline": _headline(first, evaluation.how),
        "facts": [_model_facts(first, evaluation.how), _data_facts(evaluation)],
        **_result_record(first, request.bins),
        "suites": [entry for result in evaluation.results for entry in _suite_records(result)],
        "beside": [_beside(_model_record(one)) | dict(figures=one.figures, absent=one.absent) for one in others],
        "skipped": {file: why for one in evaluation.results for file, why in one.predictions.skipped.items()},
        "notes": list(evaluation.found.notes),
        "data": evaluation.found.description,
        "asked": request.as_json(),
        "how": evaluation.how,
        "seed": request.seed or 0,
        **header(request.command),
    }
    # Lists for tuples, and None for what is no number: whoever reads it finds what was written
    return json.loads(json.dumps(record), parse_constant=lambda _: None)


def _result_record(result: Result, bins: int) -> dict[str, Any]:
    """What one classifier said: figures, classes, confusions, calibration."""
    said, names = result.predictions, result.task.names
    record: dict[str, Any] = dict(model=_model_record(result), figures=result.figures, absent=dict(result.absent))
    record |= dict(classes=list(names), images=len(said))
    record["coverage"] = dict(zip(("occurring", "classes"), coverage(said), strict=True))
    record |= dict(per_class=per_class(said, names), confused=most_confused(said, names))
    if "ece" in result.absent:
        record["absent"]["calibration"] = f"the calibration error {result.absent['ece']}"
    else:
        record["calibration"] = calibration(said.confidence, said.ranks == 0, bins)
    return record | (dict(confusion=confusion_matrix(said).tolist()) if said.classes <= MOST_CLASSES else {})


def _model_record(result: Result) -> dict[str, Any]:
    classifier, transforms = result.task.classifier, result.task.classifier.transforms
    size = [transforms.channels, transforms.size, transforms.size]
    latency = None if result.latency is None else asdict(result.latency)
    names = {name: getattr(classifier, name) for name in ("title", "source", "parameters", "precision")}
    return {**names, "macs": result.macs, "input_size": size, "latency_ms": latency}


def _suite_records(result: Result) -> list[dict[str, Any]]:
    records = [asdict(suite) for suite in result.suites]
    if result.sets:
        rows = [dict(case=f"{x}, {n:,} classes", at=None, top1=top1, images=i) for x, n, i, top1 in result.sets]
        about = "Top-1 on every set that the folder holds; where a set has some of the classes, those alone compete."
        words = dict(name="imagenet", title="ImageNet's families", about=about, axis="set")
        records.insert(0, {**words, "rows": rows, "summary": {}})
    return [{**record, "model": result.task.classifier.title} for record in records]


def _beside(model: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a model with its median latency alone."""
    return {**model, "latency_ms": (model["latency_ms"] or {}).get("median")}


def page_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as `broadsight.report.render` takes it: the classifier's own row in the same form as the others'."""
    model = _beside(record["model"])
    return {**record, **{key: model[key] for key in ("parameters", "macs", "latency_ms")}, "model": model["title"]}


def _headline(result: Result, how: Mapping[str, Any]) -> list[dict[str, str]]:
    """The few figures that come first."""
    shown = [name for name in ("real_top1", "top1", "top5", "balanced_accuracy", "ece") if name in result.figures][:4]
    entries = [{"label": label(name), "value": f"{result.figures[name]:.1f} %"} for name in shown]
    entries.append({"label": "parameters", "value": f"{result.task.classifier.parameters / 1e6:.2f} M"})
    if result.latency is not None:
        note = f"one image, {how['device']}, threads: {how['threads']}"
        entries.append({"label": "latency", "value": f"{result.latency.median:.1f} ms", "note": note})
    return entries


def _model_facts(result: Result, how: Mapping[str, Any]) -> dict[str, Any]:
    classifier, side = result.task.classifier, result.task.classifier.transforms.size
    latency = "not measured"
    if summary := result.latency:
        spread = f"fastest {summary.minimum:.2f} ms, quartiles {100 * summary.spread:.0f} % of the median apart"
        latency = f"{summary.median:.2f} ms for one image ({spread}); {how['device']}, threads: {how['threads']}"
    rows = [
        ["model", classifier.title],
        ["from", classifier.source],
        ["parameters", f"{classifier.parameters:,}"],
        ["precision", classifier.precision],
        ["size", f"{4 * classifier.parameters / 1e6:.1f} MB in single precision"],
        ["image", f"{side} x {side} pixels, {classifier.transforms.channels} channels"],
        ["MACs", "not counted" if result.macs is None else f"{result.macs / 1e9:.3f} G"],
        ["latency", latency],
    ]
    return {"group": "Model", "rows": rows}


def _data_facts(evaluation: Evaluation) -> dict[str, Any]:
    found, first = evaluation.found, evaluation.results[0]
    rows = [["images", f"{len(first.predictions):,}"], ["place", found.place]]
    if evaluation.request.samples and len(first.task.source) < len(found.source):
        rows.append(["drawn by chance", f"{len(first.task.source):,} of {len(found.source):,}"])
    about = found.description
    rows += [[key, str(about[key])] for key in ("kind", "part", "split", "seed") if about.get(key)]
    return {"group": "Data", "rows": rows}


def predictions_csv(result: Result) -> str:
    """A line for each image: what it shows, what was said, how surely, and how probable the truth seemed."""
    said, task = result.predictions, result.task
    rows = CsvRows(text := io.StringIO())
    rows.write(["file", "label", "predicted", "confidence", "rank", "loss"])
    columns = (said.rows, said.labels, said.predicted, said.confidence, said.ranks, said.losses)
    for row, truth, answer, confidence, rank, loss in zip(*columns, strict=True):
        words = task.source.name(int(row)), task.names[truth], task.names[answer]
        rows.write([*words, f"{confidence:.6f}", int(rank) + 1, f"{loss:.6f}"])
    return text.getvalue()
