"""Reports of runs and evaluations: figures, curves and images in one HTML file beside what they are about."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from torch import Tensor

from ..data.decoding import UnreadableImage
from ..data.loading import SourceDataset, TrainOrder, default_workers
from ..data.normalising import Normalise
from ..data.seeds import seed_everything
from ..data.sources import Splits
from ..dense.average_precision import write_results
from ..dense.scoring import defined, why_missing
from ..evaluation import dense as dense_evaluation
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
from ..training.records import check_records, history
from ..training.run_folder import CLASSES_JUDGED, REPORT, WEIGHTS, RunFolder, is_run, over_classes, write_page
from ..training.settings import title
from ..visual.canvas import CaptionedImage
from ..visual.metrics import GOALS, HEADLINES, label, meaning
from ..visual.words import percent
from .page import render

EVALUATION, PREDICTIONS, RESULTS = "evaluation.json", "predictions.csv", "results.json"
SHOWN = 24  # images of a kind
# Settings of a recipe that a reader looks for, in the order of a report, by what it calls them.
SETTINGS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text("utf-8"))


def write_evaluation(evaluation: Any, folder: Path | None) -> Any:
    """Write what an evaluation found into a folder, if there is one; it is returned with its record and folder."""
    is_dense = isinstance(evaluation, DenseEvaluation)
    record = dense_evaluation.record_of(evaluation) if is_dense else record_of(evaluation)
    if folder is not None:
        if is_dense:
            page = render(_dense_page_of(record), findings=evaluation.shown)
        else:
            page = render(page_of(record), mistakes=mistakes(evaluation.results[0]))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(record, folder / EVALUATION)
            if not is_dense:
                write_text(predictions_csv(evaluation.results[0]), folder / PREDICTIONS)
            elif evaluation.results:
                write_results(evaluation.results, folder / RESULTS)
            write_text(page, folder / REPORT)
        except OSError as error:
            raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another --out") from None
    return replace(evaluation, record=record, folder=folder)


def report_run(
    path: Path,
    *,
    splits: Splits | None = None,
    seconds: float | None = None,
    workers: int | None = None,
    device: str = "auto",
    evaluated: bool = True,
) -> Path:
    """Write a run's report.html: what it is, how it went, and if `evaluated` what its best model says of the images."""
    folder, is_dense_run = RunFolder(path), is_dense(path)
    check_records(folder)
    run, config, lines = history(folder), folder.config(), folder.metrics()
    epochs = [line for line in lines if line["kind"] == "epoch"]
    record: dict[str, Any] = {"absent": {"figures": "the model was not evaluated, since the run has not finished"}}
    images: dict[str, Any] = {}
    asked = evaluated and (path / WEIGHTS).is_file()
    if asked and is_dense_run:
        options: dict[str, Any] = dict(workers=workers, device=device)
        found = dense_evaluation.evaluate_dense(Request(str(path), **options, command=run["command"]))
        record, images = _dense_page_of(dense_evaluation.record_of(found)), dict(findings=found.shown)
    elif asked:
        classifier = open_classifier(path, device=device)
        splits = splits or own_splits(classifier)
        evaluation = _evaluation(classifier, splits, workers, run["command"])
        record = page_of(record_of(evaluation))
        images = dict(mistakes=mistakes(evaluation.results[0]), samples=samples(classifier, splits))
        del record["asked"]
    about = _about_dense(config, epochs, seconds) if is_dense_run else _about(run, epochs, seconds)
    record |= {
        **about,
        "kind": "run",
        "facts": [*record.get("facts", []), *about["facts"]],
        "skipped": {**folder.skipped(), **record.get("skipped", {})},
        "twins": [] if is_dense_run else _twins(path),
        **{key: run[key] for key in ("command", "seed", "versions", "commit")},
    }
    write_page(render(record, curves=lines, **images), path / REPORT)
    return path / REPORT


def _evaluation(classifier: Classifier, splits: Splits, workers: int | None, command: str = "") -> Evaluation:
    task = Task(classifier, splits.val, classifier.labels or tuple(splits.classes))
    said = ask(task, 64, default_workers() if workers is None else workers)
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
    run, ours = classifier.run["broadsight"], classifier.transforms
    recipe, classes = Recipe().change(run["recipe"]), classifier.labels or tuple(splits.classes)
    transforms = transforms_of(recipe, classifier.run["pretrained_cfg"], ours.channels)
    transforms = replace(transforms, mean=ours.mean, std=ours.std)
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
    shown = [Image.fromarray(one.squeeze(-1) if one.shape[-1] == 1 else one) for one in pixels]
    names = [_target(target, classes) for target in targets]
    return [CaptionedImage(image, name, name) for image, name in zip(shown, names, strict=True)]


def _target(target: Tensor, classes: Sequence[str]) -> str:
    """Name what an image shows, and the share of each class if two were mixed."""
    if target.ndim == 0:
        return classes[int(target)]
    floor = target.min()  # what label smoothing gives to all
    shares = (target - floor) / (target - floor).sum().clamp_min(1e-9)
    found = [(float(share), classes[index]) for index, share in enumerate(shares) if share > 0.005]
    mixed = " + ".join(f"{name} {100 * share:.0f} %" for share, name in sorted(found, reverse=True))
    return found[0][1] if len(found) == 1 else mixed


def _about(run: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]], seconds: float | None) -> dict[str, Any]:
    """Title, subtitle and facts of the report of a run: how far it came, and its settings."""
    settings, recipe = run["settings"], run["recipe"]
    whole = recipe["epochs"] + recipe["cooldown_epochs"]
    last = epochs[-1] if epochs else {"epoch": 0}
    text = f"{'finished' if last['epoch'] >= whole else 'stopped'} after {last['epoch']} of {whole} epochs"
    if last.get("best") is not None:
        text += f"; the best model, that of epoch {last['best_epoch']}, is kept"
    elif "best" in last:
        text += "; no epoch has a top-1 to be compared by, so the model of the last one is kept"
    changes = ", ".join(f"{key}={value}" for key, value in settings.get("changes", {}).items())
    rows = [["recipe", settings["recipe"]], ["changed", changes or "nothing"]]
    rows += [[name, f"{recipe[key]}"] for name, key in SETTINGS.items() if recipe.get(key) not in (None, 0, "none")]
    rows += [["started", str(run["started"])], ["device", f"{run['device']}, threads: {run['threads']}"]]
    rows += [["processes", str(run["processes"])]]
    rows += [["took", f"{seconds / 60:.1f} minutes"]] if seconds is not None else []
    about = f"{title(settings)} on {settings['data']}"
    return dict(title=about, subtitle=text, facts=[{"group": "Run", "rows": rows}])


def _dense_page_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the record of an evaluation into that of a report."""
    task, scores, data = record["task"], record["figures"], record["data"]
    goal, place = GOALS[task], data.get("place") or data.get("val")
    names = [name for name in HEADLINES[task] if name in scores]
    there, classes = record["coverage"]["occurring"], record["coverage"]["classes"]
    over = over_classes(there, classes).strip()
    asked = [f"{data['images']:,} images of {place}"]
    asked += ["mirrored as well"] * record["views"]["flip"] + ["by windows"] * record["views"]["slide"]
    if record["views"]["scales"] != [1.0]:
        asked.append(f"scales {', '.join(f'{scale:g}' for scale in record['views']['scales'])}")
    absent = dict(record["absent"])
    if scores.get(goal) is None:
        absent["figures"] = f"{meaning(goal).label} {why_missing(goal, there)}"
    headline = [{"label": meaning(name).label, "value": percent(scores[name])} for name in names]
    headline = [card | ({"note": over} if name != "aacc" else {}) for name, card in zip(names, headline, strict=True)]
    latency = f"{record['latency_ms']:.1f} ms" if record["latency_ms"] else "-"
    device = f"{record['device']}, threads: {record['threads']}"
    rows = [["data", str(place)], ["time of an image", latency], ["device", device]]
    return {
        "title": record["model"]["title"],
        "kind": "evaluation",
        "subtitle": "; ".join(asked),
        "headline": headline,
        "figures": defined(scores),
        "absent": absent,
        "class_figures": record["per_class"],
        "parameters": record["model"]["parameters"],
        "notes": [*record["notes"], *(["interrupted: not all images were asked about"] * record["interrupted"])],
        "facts": [{"group": "Evaluation", "rows": rows}],
        **{key: record[key] for key in ("skipped", "command", "versions", "commit")},
    }


def _about_dense(config: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]], seconds: float | None) -> dict:
    """Title, subtitle and facts of the report of a run, from its configuration and the metrics of its epochs."""
    run = config["broadsight"]
    settings, recipe = run["settings"], run["recipe"]
    rows = [["data", str(settings["data"])], ["head", settings["head"]], ["neck", settings["neck"]]]
    rows += [[name.replace("_", " "), str(recipe[name])] for name in ("epochs", "batch_size", "image_size", "lr")]
    rows += [["minutes", f"{seconds / 60:.1f}"]] if seconds else []
    last = epochs[-1] if epochs else {}
    goal, text = label(run["goal"]), f"{len(epochs)} of {recipe['epochs']} epochs"
    if last.get("best") is not None:
        text += f"; best {goal} {last['best']:.1f} %{over_classes(last.get(CLASSES_JUDGED), config['num_classes'])}"
    elif "best" in last:
        text += f"; no epoch has a {goal} to be compared by, so the model of the last one is kept"
    title = f"{settings['head']} with {settings['model']} on {settings['data']}"
    return dict(title=title, subtitle=text, facts=[{"group": "Training", "rows": rows}])


def _twins(path: Path) -> list[dict[str, Any]]:
    """Rows of the run and of those that were trained beside it, for comparison."""
    others = [folder for folder in sorted(path.glob("twin-*")) if is_run(folder)]
    rows = []
    for folder in [path, *others] if others else []:
        run, lines = RunFolder(folder).config()["broadsight"], RunFolder(folder).metrics()
        best = next((line["best"] for line in reversed(lines) if "best" in line), None)
        rows.append(dict(title=title(run["settings"]), top1=best, parameters=run["parameters"], folder=folder.name))
    return [row for row in rows if row["top1"] is not None]
