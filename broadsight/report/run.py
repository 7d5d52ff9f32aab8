"""Reports of runs and evaluations: figures, curves and images in one HTML file beside what they are about."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..data.decoding import UnreadableImage
from ..data.loading import SourceDataset, TrainOrder, default_workers
from ..data.normalising import Normalise
from ..data.seeds import seed_everything
from ..data.sources import Splits
from ..evaluation.classification import figures, most_confident_mistakes
from ..evaluation.dense import DenseEvaluation
from ..evaluation.record import page_of, predictions_csv, record_of
from ..evaluation.request import Request
from ..evaluation.run import Evaluation, Result, ask, measure
from ..evaluation.tasks import Task, found_in, own_splits
from ..files import write_json, write_text
from ..runs.classifier import Classifier, open_classifier
from ..runs.opening import is_dense
from ..training.augmentation import BatchAugmentation, transforms_of
from ..training.recipes import Recipe
from ..training.records import check_records
from ..training.run_folder import REPORT, WEIGHTS, RunFolder, is_run, write_page
from ..training.settings import title
from . import CaptionedImage, render

EVALUATION, PREDICTIONS = "evaluation.json", "predictions.csv"
SHOWN = 24  # images of a kind
# Settings of a recipe that a reader looks for, in the order of a report.
SETTINGS = {
    "epochs": "epochs",
    "batch": "batch_size",
    "image": "image_size",
    "optimizer": "optimizer",
    "learning rate": "lr",
    "weight decay": "weight_decay",
    "warm-up epochs": "warmup_epochs",
    "mixup": "mixup",
    "cutmix": "cutmix",
    "erasing": "erasing",
    "auto-augment": "auto_augment",
    "label smoothing": "smoothing",
    "drop path": "drop_path",
    "distillation": "distill",
    "weights averaged": "ema",
    "precision": "precision",
}


def write_evaluation(evaluation: Any, folder: Path | None) -> Any:
    """Write evaluation.json, report.html, and predictions.csv or results.json into a folder, which is made.

    Args:
        evaluation: An Evaluation or a DenseEvaluation.
        folder: None makes the record alone.

    Returns:
        The evaluation, which knows its record and its folder by then.
    """
    if isinstance(evaluation, DenseEvaluation):
        from .dense import write_dense_evaluation

        record = write_dense_evaluation(evaluation, folder)
    else:
        record = _write(evaluation, folder)
    return replace(evaluation, record=record, folder=folder)


def _write(evaluation: Evaluation, folder: Path | None) -> dict[str, Any]:
    record = record_of(evaluation)
    if folder is None:
        return record
    page = render(page_of(record), mistakes=mistakes(evaluation.results[0]))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(record, folder / EVALUATION)
        write_text(predictions_csv(evaluation.results[0]), folder / PREDICTIONS)
        write_text(page, folder / REPORT)
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another --out") from None
    return record


def report_run(
    path: Path,
    *,
    splits: Splits | None = None,
    seconds: float | None = None,
    workers: int | None = None,
    device: str = "auto",
    evaluated: bool = True,
) -> Path:
    """Write a run's report.html: what it is, how it went, and what its best model says of the validation images.

    Args:
        splits: The run's data, if somebody has opened it already.
        seconds: How long it took, if somebody knows.
        evaluated: Whether to ask the model; without that, curves and settings alone.
    """
    if is_dense(path):
        from .dense import report_dense_run

        return report_dense_run(path, workers=workers, device=device, seconds=seconds, evaluated=evaluated)
    folder = RunFolder(path)
    check_records(folder)
    config, lines = folder.config(), folder.metrics()
    run, epochs = config["broadsight"], [line for line in lines if line["kind"] == "epoch"]
    record: dict[str, Any] = {"absent": {"figures": "the model was not evaluated, since the run has not finished"}}
    images: dict[str, Sequence[CaptionedImage]] = {}
    if evaluated and (path / WEIGHTS).is_file():
        classifier = open_classifier(path, device=device)
        splits = splits or own_splits(classifier)
        evaluation = _evaluation(classifier, splits, workers, run["command"])
        record = page_of(record_of(evaluation))
        images = dict(mistakes=mistakes(evaluation.results[0]), samples=samples(classifier, splits))
        del record["asked"]
    record |= {
        "title": f"{title(run['settings'])} on {run['settings']['data']}",
        "kind": "run",
        "subtitle": _state(run["recipe"], epochs),
        "skipped": {**folder.skipped(), **record.get("skipped", {})},
        "facts": [*record.get("facts", []), _facts(run, seconds)],
        "twins": _twins(path),
        **{key: run[key] for key in ("command", "seed", "versions", "commit")},
    }
    write_page(render(record, curves=lines, **images), path / REPORT)
    return path / REPORT


def _evaluation(classifier: Classifier, splits: Splits, workers: int | None, command: str = "") -> Evaluation:
    task = Task(classifier, splits.val, classifier.labels or tuple(splits.classes))
    workers = default_workers() if workers is None else workers
    said = ask(task, 64, workers)
    values, absent = figures(said)
    (measured,) = measure([classifier])
    how = dict(batch=64, threads=torch.get_num_threads(), device=classifier.device.type)
    result = Result(task, said, values, absent, **measured)
    return Evaluation(Request(classifier, command=command), (result,), found_in(classifier, splits), how)


def mistakes(result: Result, most: int = SHOWN) -> list[CaptionedImage]:
    """Images that the classifier was most sure and wrong about."""
    said, task, shown = result.predictions, result.task, []
    for place in most_confident_mistakes(said, most):
        row = int(said.rows[place])
        truth, answer = task.names[said.labels[place]], task.names[said.predicted[place]]
        try:
            image = task.source.open(row)
        except UnreadableImage:  # by now; it was readable when it was asked about
            continue
        sure = f"{100 * said.confidence[place]:.0f} % sure"
        caption = f"{truth}, taken for {answer}\n{sure}\n{task.source.name(row)}"
        shown.append(CaptionedImage(image, caption, f"{truth}, taken for {answer} and {sure}"))
    return shown


def samples(classifier: Classifier, splits: Splits, most: int = SHOWN) -> list[CaptionedImage]:
    """Training images as the run saw its first ones: transformed, erased and mixed as its recipe says."""
    run = classifier.run["broadsight"]
    recipe, classes = Recipe().change(run["recipe"]), classifier.labels or tuple(splits.classes)
    transforms = replace(
        transforms_of(recipe, classifier.run["pretrained_cfg"], classifier.transforms.channels),
        mean=classifier.transforms.mean,
        std=classifier.transforms.std,
    )
    learned = SourceDataset(splits.train, transforms.build(True), seed=run["seed"], training=True)
    count = min(most, len(splits.train)) // 2 * 2
    order = TrainOrder(splits.train, max(count, 1), seed=run["seed"], repeats=recipe.repeated_aug)
    normalise = Normalise(transforms.mean, transforms.std)
    with torch.random.fork_rng(devices=[]):
        batch = learned.__getitems__(next(iter(order)))
        if batch.failure or count < 2:
            return []
        seed_everything(run["seed"])
        augment = BatchAugmentation(recipe, len(classes), count, torch.device("cpu"))
        augment.begin_epoch(0)
        images, targets = augment(normalise(batch.images), batch.labels)
    pixels = normalise.invert(images).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()  # B H W C
    names = [_target(target, classes) for target in targets]
    shown = [Image.fromarray(one.squeeze(-1) if one.shape[-1] == 1 else one) for one in pixels]
    return [CaptionedImage(image, name, name) for image, name in zip(shown, names, strict=True)]


def _target(target: Tensor, classes: Sequence[str]) -> str:
    """Name what an image shows, and the share of each class if two were mixed."""
    if target.ndim == 0:
        return classes[int(target)]
    floor = target.min()  # what label smoothing gives to all
    shares = (target - floor) / (target - floor).sum().clamp_min(1e-9)
    found = [(float(share), classes[index]) for index, share in enumerate(shares) if share > 0.005]
    if len(found) == 1:
        return found[0][1]
    return " + ".join(f"{name} {100 * share:.0f} %" for share, name in sorted(found, reverse=True))


def _state(recipe: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]]) -> str:
    """Say in a line how far a run came."""
    whole = recipe["epochs"] + recipe["cooldown_epochs"]
    done = epochs[-1]["epoch"] if epochs else 0
    text = f"{'finished' if done >= whole else 'stopped'} after {done} of {whole} epochs"
    if not epochs or "best" not in epochs[-1]:
        return text
    if epochs[-1]["best"] is None:
        return f"{text}; no epoch has a top-1 to be compared by, so the model of the last one is kept"
    return f"{text}; the best model, that of epoch {epochs[-1]['best_epoch']}, is kept"


def _facts(run: Mapping[str, Any], seconds: float | None) -> dict[str, Any]:
    """Settings of a run as a group of facts."""
    settings, recipe = run["settings"], run["recipe"]
    changes = ", ".join(f"{key}={value}" for key, value in settings.get("changes", {}).items())
    rows = [["recipe", settings["recipe"]], ["changed", changes or "nothing"]]
    rows += [[name, f"{recipe[key]}"] for name, key in SETTINGS.items() if recipe.get(key) not in (None, 0, "none")]
    rows += [["started", str(run["started"])], ["device", f"{run['device']}, threads: {run['threads']}"]]
    rows += [["processes", str(run["processes"])]]
    rows += [["took", f"{seconds / 60:.1f} minutes"]] if seconds is not None else []
    return {"group": "Run", "rows": rows}


def _twins(path: Path) -> list[dict[str, Any]]:
    """Rows of the run and of those that were trained beside it, for comparison."""
    others = [folder for folder in sorted(path.glob("twin-*")) if is_run(folder)]
    rows = []
    for folder in [path, *others] if others else []:
        run, lines = RunFolder(folder).config()["broadsight"], RunFolder(folder).metrics()
        best = next((line["best"] for line in reversed(lines) if "best" in line), None)
        row = dict(title=title(run["settings"]), top1=best, parameters=run["parameters"], folder=folder.name)
        rows += [row] if best is not None else []
    return rows
