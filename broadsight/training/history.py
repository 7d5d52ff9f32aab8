"""The history of a run in its config.json: checks before it is used, and digests, which show damage but no attack."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TASKS = ("classify", "detect", "instances", "segment", "keypoints")
NONE = type(None)

# Kinds of values below "broadsight" in config.json, and below its settings and labels; any may be missing.
ABOUT: dict[str, Any] = dict.fromkeys(("task", "command", "started", "goal"), str)
ABOUT |= dict.fromkeys(("settings", "recipe", "data", "labels", "versions"), dict)
ABOUT |= dict.fromkeys(("parameters", "seed", "threads", "processes"), int)
ABOUT |= dict.fromkeys(("commit", "launch"), (str, NONE))
SETTINGS: dict[str, Any] = dict.fromkeys(("data", "model", "task", "recipe"), str)
SETTINGS |= dict.fromkeys(("val", "root", "pool", "broadcast", "head", "neck", "init"), (str, NONE))
SETTINGS |= dict.fromkeys(("model_args", "pool_args", "broadcast_args", "head_args", "neck_args", "changes"), dict)
SETTINGS |= dict.fromkeys(("seed", "log_every", "seeds"), int) | {"split": (int, float, NONE)}
LABELS: dict[str, Any] = dict.fromkeys(("keypoint_names", "flip_pairs", "skeleton"), list)
LABELS |= dict(category_ids=dict, keypoint_offset=(int, float))
# How data is named that is fetched: timm's names of remote datasets, and paths to another machine
FETCHED = ("hfds/", "hfids/", "tfds/", "//", "\\\\")
# The parts of a description that its weights depend on; neither the hour nor the folder
MEANING = ("architecture", "num_classes", "num_features", "label_names", "model_args", "pretrained_cfg")
HISTORY = ("task", "recipe", "seed", "labels", "goal")
DIGEST = "digest"  # below "broadsight" in config.json
RUN = "run"  # in the metadata of a run's weights


def sealed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's description with its own digest."""
    plain = json.loads(json.dumps(config))
    return plain | ({"broadsight": {**plain["broadsight"], DIGEST: _digest(plain)}} if "broadsight" in plain else {})


def is_sealed(config: Mapping[str, Any]) -> bool:
    """Whether a description has a digest; without one it was changed on purpose, or is older."""
    return DIGEST in config.get("broadsight", {})


def identity(config: Mapping[str, Any]) -> str:
    """A digest of what decides a run's weights: runs of one identity give the same, wherever they are trained."""
    about = config.get("broadsight", {})
    kept = [config.get(key) for key in MEANING] + [about.get(key) for key in HISTORY]
    data = about.get("data", {})
    return _digest([*kept, data.get("fingerprint"), data.get("contents")])


def check_history(config: Mapping[str, Any], where: str | Path) -> None:
    """Refuse a description, read from `where`, that is not what was written, or whose parts are not those of a run."""
    if "broadsight" not in config:
        return
    about = config["broadsight"]
    if isinstance(about, dict) and DIGEST in about:  # those of older runs have none
        plain = {**config, "broadsight": {key: value for key, value in about.items() if key != DIGEST}}
        if _digest(plain) != about[DIGEST]:
            advice = f'restore it, or if the change is meant, remove "{DIGEST}" from its "broadsight"'
            raise ValueError(f"{where} is damaged or was changed: its digest is of other content; {advice}")
    _check_kinds(config, {"broadsight": dict}, "", where)
    _check_kinds(about, ABOUT, "", where)
    settings, labels = about.get("settings", {}), about.get("labels", {})
    _check_kinds(settings, SETTINGS, "settings.", where)
    _check_kinds(labels, LABELS, "labels.", where)
    if about.get("task", TASKS[0]) not in TASKS:
        raise ValueError(f"{where} says task={short(repr(about['task']))}; expected one of {', '.join(TASKS)}")
    if "settings" in about:
        check_there(about, {"settings": ("data", "model", "pool", "broadcast", "seed")}, where)
    ids = labels.get("category_ids", {}).items()
    wrong = [key for key, number in ids if not _is_count(number) or not re.fullmatch("[0-9]{1,15}", key)]
    wrong += [name for name in labels.get("keypoint_names", []) if not isinstance(name, str)]
    pairs = [*labels.get("flip_pairs", []), *labels.get("skeleton", [])]
    wrong += [p for p in pairs if not isinstance(p, list) or len(p) != 2 or not all(map(_is_count, p))]
    if wrong:
        raise ValueError(f"{where} is damaged (labels: {short(repr(wrong[0]))}, expected names, numbers and pairs)")
    model = settings.get("model", "")
    if any(letter in model for letter in ":/\\"):
        raise ValueError(f"{where} says model={short(repr(model))}; expected the name of a model, not a place")


def check_own_data(settings: Mapping[str, Any], given: str | None = None) -> None:
    """Refuse to fetch data that a run's settings name and the user has not `given`."""
    for name in ("data", "val", "root"):
        place = settings.get(name)
        if isinstance(place, str) and place.startswith(FETCHED) and place != given:
            fetched = f"{short(repr(place))}, which would be fetched"
            raise ValueError(f"the run reads its {name} from {fetched}; give the data yourself to allow that")


def short(text: str) -> str:
    """The beginning of a text, for messages."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_kinds(values: Mapping[str, Any], kinds: Mapping[str, Any], below: str, where: str | Path) -> None:
    for name, kind in kinds.items():
        wanted = kind if isinstance(kind, tuple) else (kind,)
        if name in values and (not isinstance(values[name], wanted) or isinstance(values[name], bool)):
            names = " or ".join("null" if one is NONE else one.__name__ for one in wanted)
            raise ValueError(f"{where} is damaged ({below}{name}={short(repr(values[name]))}, expected {names})")


def check_there(about: Mapping[str, Any], needed: Mapping[str, Iterable[str]], where: str | Path) -> None:
    """Refuse a history without some parts, or names in them."""
    for part, names in needed.items():
        missing = [part] if part not in about else [f"{part}.{name}" for name in names if name not in about[part]]
        if missing:
            raise ValueError(f"{where} is damaged ({missing[0]} is not there)")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
