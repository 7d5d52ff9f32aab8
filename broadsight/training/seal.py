"""What a run says of itself, with a digest: damage is noticed, whoever reads it. It does not keep out an attacker."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIGEST = "digest"  # below "broadsight" in config.json
RUN = "run"  # in what a run's weights say of themselves

# What of a run its weights depend on; neither the hour nor the folder.
MEANING = ("architecture", "num_classes", "num_features", "label_names", "model_args", "pretrained_cfg")
HISTORY = ("task", "recipe", "seed", "labels", "goal")


def sealed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's description with its own digest."""
    plain = json.loads(json.dumps(config))
    return plain | ({"broadsight": {**plain["broadsight"], DIGEST: _digest(plain)}} if "broadsight" in plain else {})


def check_seal(config: Any, path: Path) -> None:
    """Refuse a description that is not what was written; those of older runs have no digest and are taken as they are.

    Args:
        path: Where it was read.
    """
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
    """Whether a description has its digest; one without was changed on purpose, or is older."""
    return DIGEST in config.get("broadsight", {})


def identity(config: Mapping[str, Any]) -> str:
    """A digest of what makes a run: two with the same give the same weights, wherever and whenever they are trained."""
    about = config.get("broadsight", {})
    kept = [config.get(key) for key in MEANING] + [about.get(key) for key in HISTORY]
    data = about.get("data", {})
    return _digest([*kept, data.get("fingerprint"), data.get("contents")])


def check_owner(config: Mapping[str, Any], weights: Mapping[str, str], path: Path) -> None:
    """Refuse weights that say that they are of another run.

    Args:
        config: The run's description; of one that is not sealed nothing is known.
        weights: What their file says of itself.
        path: That file.
    """
    if is_sealed(config) and weights.get(RUN) != identity(config):
        raise ValueError(f"{path} holds weights of another run than the config.json beside it; restore what was there")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
