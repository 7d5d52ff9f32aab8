"""Digests of a run's description: they show damage and files of another run, but do not keep out an attacker."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIGEST = "digest"  # below "broadsight" in config.json
RUN = "run"  # in the metadata of a run's weights

# The parts of a description that its weights depend on; neither the hour nor the folder
MEANING = ("architecture", "num_classes", "num_features", "label_names", "model_args", "pretrained_cfg")
HISTORY = ("task", "recipe", "seed", "labels", "goal")


def sealed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's description with its own digest."""
    plain = json.loads(json.dumps(config))
    return plain | ({"broadsight": {**plain["broadsight"], DIGEST: _digest(plain)}} if "broadsight" in plain else {})


def check_seal(config: Any, path: Path) -> None:
    """Refuse a description, read from a path, that is not what was written; those of older runs have no digest."""
    about = config.get("broadsight") if isinstance(config, dict) else None
    if not isinstance(about, dict) or DIGEST not in about:
        return
    plain = {**config, "broadsight": {key: value for key, value in about.items() if key != DIGEST}}
    if _digest(plain) != about[DIGEST]:
        raise ValueError(
            f"{path} is damaged or was changed: its digest is of other content; restore it, or if the change is meant, "
            f'remove "{DIGEST}" from its "broadsight"'
        )


def is_sealed(config: Mapping[str, Any]) -> bool:
    """Whether a description has a digest; without one it was changed on purpose, or is older."""
    return DIGEST in config.get("broadsight", {})


def identity(config: Mapping[str, Any]) -> str:
    """A digest of what decides a run's weights: runs of one identity give the same, wherever they are trained."""
    about = config.get("broadsight", {})
    kept = [config.get(key) for key in MEANING] + [about.get(key) for key in HISTORY]
    data = about.get("data", {})
    return _digest([*kept, data.get("fingerprint"), data.get("contents")])


def check_owner(config: Mapping[str, Any], weights: Mapping[str, str], path: Path) -> None:
    """Refuse weights of another run than a description with a digest.

    Args:
        weights: The metadata of their file.
        path: That file.
    """
    if is_sealed(config) and weights.get(RUN) != identity(config):
        raise ValueError(f"{path} holds weights of another run than the config.json beside it; restore what was there")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
