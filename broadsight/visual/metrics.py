"""What metrics are called and mean, from the one table of them, metrics.yaml, and the headlines of each task."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .words import NOTHING, SPACE, amount, known, number, percent


class Meaning(NamedTuple):
    """A figure; `better` is 1 if higher values are better, -1 if lower ones are, else 0."""

    label: str
    unit: str = ""
    better: int = 0
    about: str = ""


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
MEANS = frozenset(_TABLE["means"])  # over the classes that occur
TASKS: dict[str, str] = {task: name for task, (name, *_) in _TABLE["tasks"].items()}
HEADLINES: dict[str, list[str]] = {task: names for task, (_, *names) in _TABLE["tasks"].items()}
GOALS = {task: names[0] for task, names in HEADLINES.items()}
_OF_OBJECTS = {"box": "IoU of boxes", "mask": "IoU of masks", "keypoint": "keypoint similarity"}
_FIGURES = {key: Meaning(*row) for key, row in _TABLE["figures"].items()}
_FIGURES |= {
    f"{kind}_{key}": Meaning(f"{kind} {name}", "%", 1, about.format(what=what))
    for kind, what in _OF_OBJECTS.items()
    for key, (name, about) in _TABLE["objects"].items()
}


def meaning(key: str) -> Meaning:
    """The entry of a figure; for others, one with their name."""
    return _FIGURES.get(key) or Meaning(key.replace("_", " "))


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


def label(key: str) -> str:
    """The label of a figure, with or without `val_` before its name as in metrics.jsonl."""
    return meaning(key.removeprefix("val_")).label
