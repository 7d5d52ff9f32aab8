"""The one table of metrics: label, unit, direction and meaning of each, and the headlines of each task."""

from dataclasses import dataclass
from typing import Any

from .words import NOTHING, SPACE, amount, known, number, percent


@dataclass(frozen=True)
class Meaning:
    """A figure; `better` is 1 if higher values are better, -1 if lower ones are, else 0."""

    label: str
    unit: str = ""
    better: int = 0
    about: str = ""


FIGURES = {
    "top1": Meaning("top-1", "%", 1, "the class with the highest score is the right one"),
    "top5": Meaning("top-5", "%", 1, "the right class is among the five highest scores"),
    "real_top1": Meaning("top-1, ReaL", "%", 1, "the class with the highest score is among the reassessed labels"),
    "confidence": Meaning("confidence", "%", 0, "mean probability of the class with the highest score"),
    "loss": Meaning("loss", "nats", -1, "mean cross-entropy of an image"),
    "nll": Meaning("negative log-likelihood", "nats", -1, "mean over the images, of the right class"),
    "balanced_accuracy": Meaning("balanced accuracy", "%", 1, "mean recall of the classes"),
    "precision": Meaning("precision", "%", 1, "share of predictions of a class that are correct, mean over classes"),
    "recall": Meaning("recall", "%", 1, "share of the images of a class that are found, mean over classes"),
    "f1": Meaning("F1", "%", 1, "mean over the classes of the harmonic mean of precision and recall"),
    "macro_f1": Meaning("macro F1", "%", 1, "mean over the classes of the harmonic mean of precision and recall"),
    "auroc": Meaning("AUROC", "%", 1, "an image of the class scores higher than one of another; 50 % is chance"),
    "average_precision": Meaning("average precision", "%", 1, "area under precision-recall curves, mean over classes"),
    "ece": Meaning("ECE", "%", -1, "expected calibration error: mean distance of confidence and accuracy"),
    "mce": Meaning("MCE", "%", -1, "maximum calibration error: that distance in the worst bin"),
    "brier": Meaning("Brier score", "", -1, "mean squared distance of probabilities and truth, 0 to 2"),
    "kappa": Meaning("Cohen's kappa", "", 1, "agreement beyond chance, at most 1"),
    "mcc": Meaning("Matthews correlation", "", 1, "of prediction and truth, -1 to 1"),
    **{
        f"{kind}_{key}": Meaning(f"{kind} {label}", "%", 1, about.format(what=what))
        for kind, what in (("box", "IoU of boxes"), ("mask", "IoU of masks"), ("keypoint", "keypoint similarity"))
        for key, label, about in (
            ("ap", "AP", "COCO's average precision: mean over {what} of 0.50 to 0.95"),
            ("ap50", "AP50", "average precision at {what} of 0.50"),
            ("ap75", "AP75", "average precision at {what} of 0.75"),
            ("ap_small", "AP, small", "of objects up to 32 x 32 pixels"),
            ("ap_medium", "AP, medium", "of objects up to 96 x 96 pixels"),
            ("ap_large", "AP, large", "of larger objects"),
            ("ar", "AR", "recall of at most 20 poses, mean over {what} of 0.50 to 0.95"),
            ("ar1", "AR, 1", "recall of the best detection of an image"),
            ("ar10", "AR, 10", "recall of the ten best detections of an image"),
            ("ar100", "AR, 100", "recall of the hundred best detections of an image"),
            ("ar50", "AR50", "recall at {what} of 0.50"),
            ("ar75", "AR75", "recall at {what} of 0.75"),
            ("ar_small", "AR, small", "recall of objects up to 32 x 32 pixels"),
            ("ar_medium", "AR, medium", "recall of objects up to 96 x 96 pixels"),
            ("ar_large", "AR, large", "recall of larger objects"),
        )
    },
    "miou": Meaning("mIoU", "%", 1, "intersection over union of pixels, mean over the classes"),
    "macc": Meaning("mAcc", "%", 1, "correct pixels of a class, mean over the classes"),
    "aacc": Meaning("aAcc", "%", 1, "correct pixels"),
    "iou": Meaning("IoU", "%", 1),
    "acc": Meaning("accuracy", "%", 1),
    "images": Meaning("images", "", 0, "that were evaluated"),
    "parameters": Meaning("parameters", "", -1),
    "macs": Meaning("MACs", "", -1),
    "latency_ms": Meaning("latency", "ms", -1),
    "throughput": Meaning("throughput", "images/s", 1),
}


def meaning(key: str) -> Meaning:
    """The entry of a figure; for others, one with their name."""
    return FIGURES.get(key) or Meaning(key.replace("_", " "))


def figure(key: str, value: Any) -> str:
    """The value of a figure with its unit."""
    unit = meaning(key).unit
    if not known(value):
        return value if isinstance(value, str) else NOTHING
    if unit == "%":
        return percent(value)
    if key in ("parameters", "macs"):
        return amount(value)
    return f"{number(value)}{SPACE}{unit}" if unit else number(value)


MEANS = ("balanced_accuracy", "macro_f1", "auroc", "miou", "macc")  # over the classes that occur

# The figures in a task's headline; the first is the goal, by which the best epoch is chosen. Instances and keypoints
# come before detection, since their runs have box AP as well.
HEADLINES = {
    "classify": ("top1", "top5"),
    "instances": ("mask_ap", "mask_ap50", "box_ap"),
    "keypoints": ("keypoint_ap", "keypoint_ap50", "keypoint_ap75"),
    "detect": ("box_ap", "box_ap50", "box_ap75"),
    "segment": ("miou", "macc", "aacc"),
}
GOALS = {task: names[0] for task, names in HEADLINES.items()}


def label(key: str) -> str:
    """The label of a figure, with or without `val_` before its name as in metrics.jsonl."""
    return meaning(key.removeprefix("val_")).label
