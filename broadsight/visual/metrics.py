"""What metrics are called and mean, from the one table of them, metrics.yaml, and the headlines of each task."""

from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from .words import NOTHING, SPACE, amount, known, number, percent


class Meaning(NamedTuple):
    """A figure; `better` is 1 if higher values are better, -1 if lower ones are, else 0."""

    label: str
    unit: str = ""
    better: int = 0
    about: str = ""


@cache
def _figures() -> dict[str, Meaning]:
    table = yaml.safe_load((files("broadsight.visual") / "metrics.yaml").read_text(encoding="utf-8"))
    known_ones = {key: Meaning(*row) for key, row in table["figures"].items()}
    for kind, what in (("box", "IoU of boxes"), ("mask", "IoU of masks"), ("keypoint", "keypoint similarity")):
        for key, (name, about) in table["objects"].items():
            known_ones[f"{kind}_{key}"] = Meaning(f"{kind} {name}", "%", 1, about.format(what=what))
    return known_ones


def meaning(key: str) -> Meaning:
    """The entry of a figure; for others, one with their name."""
    return _figures().get(key) or Meaning(key.replace("_", " "))


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

# A task's headline, first the goal that chooses the best epoch; detection is last of those whose runs have box AP.
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
