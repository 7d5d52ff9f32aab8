"""Checks of the history in a run's config.json before it is used: a stranger may have written it."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TASKS = ("classify", "detect", "instances", "segment", "keypoints")
NONE = type(None)
NUMBER = (int, float)

# Kinds of values below "broadsight" in config.json, and below its settings and labels; any may be missing.
ABOUT: dict[str, Any] = {
    **dict.fromkeys(("task", "command", "started", "goal"), str),
    **dict.fromkeys(("settings", "recipe", "data", "labels", "versions"), dict),
    **dict.fromkeys(("parameters", "seed", "threads", "processes"), int),
    **dict.fromkeys(("commit", "launch"), (str, NONE)),
}
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("data", "model", "task", "recipe"), str),
    **dict.fromkeys(("val", "root", "pool", "broadcast", "head", "neck", "init"), (str, NONE)),
    **dict.fromkeys(("model_args", "pool_args", "broadcast_args", "head_args", "neck_args", "changes"), dict),
    **dict.fromkeys(("seed", "log_every", "seeds"), int),
    "split": (*NUMBER, NONE),
}
LABELS: dict[str, Any] = {
    **dict.fromkeys(("keypoint_names", "flip_pairs", "skeleton"), list),
    "category_ids": dict,
    "keypoint_offset": NUMBER,
}
# What every run has written of its settings, and what dense runs have written besides
NEEDED = {"settings": ("data", "model", "pool", "broadcast", "seed")}
NEEDED_DENSE = {"settings": ("head", "neck"), "recipe": (), "parameters": (), "labels": LABELS}
# How data is named that is fetched: timm's names of remote datasets, and paths to another machine
FETCHED = ("hfds/", "hfids/", "tfds/", "//", "\\\\")


def check_history(config: Mapping[str, Any], where: str | Path) -> None:
    """Refuse a description whose parts have other types than a run's.

    Args:
        config: All of config.json.
        where: Its file, for messages.

    Raises:
        ValueError: Names the part.
    """
    if "broadsight" not in config:
        return
    about = config["broadsight"]
    _check_kinds({"broadsight": about}, {"broadsight": dict}, "", where)
    _check_kinds(about, ABOUT, "", where)
    settings, labels = about.get("settings", {}), about.get("labels", {})
    _check_kinds(settings, SETTINGS, "settings.", where)
    _check_kinds(labels, LABELS, "labels.", where)
    if about.get("task", TASKS[0]) not in TASKS:
        raise ValueError(f"{where} says task={_short(about['task'])}; expected one of {', '.join(TASKS)}")
    if "settings" in about:
        _check_there(about, NEEDED, where)
    _check_labels(labels, where)
    model = settings.get("model", "")
    if any(letter in model for letter in ":/\\"):
        raise ValueError(f"{where} says model={_short(model)}; expected the name of a model, not a place")


def check_dense_history(config: Mapping[str, Any], where: str | Path) -> None:
    """Refuse the description of a dense run that lacks what its model is built from."""
    _check_there(config.get("broadsight", {}), NEEDED_DENSE, where)


def check_own_data(settings: Mapping[str, Any], given: str | None = None) -> None:
    """Refuse to fetch data that a run's settings name and the user has not `given`; raises ValueError."""
    for name in ("data", "val", "root"):
        place = settings.get(name)
        if isinstance(place, str) and place.startswith(FETCHED) and place != given:
            raise ValueError(
                f"the run reads its {name} from {_short(place)}, which would be fetched; give the data yourself "
                "to allow that"
            )


def _check_kinds(values: Mapping[str, Any], kinds: Mapping[str, Any], below: str, where: str | Path) -> None:
    for name, kind in kinds.items():
        wanted = kind if isinstance(kind, tuple) else (kind,)
        if name in values and (not isinstance(values[name], wanted) or isinstance(values[name], bool)):
            names = " or ".join("null" if one is NONE else one.__name__ for one in wanted)
            raise ValueError(f"{where} is damaged ({below}{name}={_short(values[name])}, expected {names})")


def _check_there(about: Mapping[str, Any], needed: Mapping[str, Iterable[str]], where: str | Path) -> None:
    """Refuse missing parts, and missing names in them."""
    for part, names in needed.items():
        missing = [part] if part not in about else [f"{part}.{name}" for name in names if name not in about[part]]
        if missing:
            raise ValueError(f"{where} is damaged ({missing[0]} is not there)")


def _check_labels(labels: Mapping[str, Any], where: str | Path) -> None:
    digits = re.compile("[0-9]{1,15}")
    ids = labels.get("category_ids", {}).items()
    wrong = [key for key, number in ids if not _is_count(number) or not digits.fullmatch(key)]
    wrong += [name for name in labels.get("keypoint_names", []) if not isinstance(name, str)]
    for name in ("flip_pairs", "skeleton"):
        pairs = labels.get(name, [])
        wrong += [p for p in pairs if not isinstance(p, list) or len(p) != 2 or not all(map(_is_count, p))]
    if wrong:
        raise ValueError(f"{where} is damaged (labels: {_short(wrong[0])}, expected names, numbers and pairs)")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
