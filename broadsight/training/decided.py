"""Arguments that users cannot give, since the data or other options decide them."""

from collections.abc import Mapping
from typing import Any

# What decides each of them; these in all places where arguments are given
EVERYWHERE = {
    "num_classes": "the classes of DATA decide it",
    "pretrained": "--pretrained begins from timm's weights",
    "checkpoint_path": "--init begins from a file of weights",
    "pretrained_cfg": "--init begins from a file of weights",
    "pretrained_cfg_overlay": "--init begins from a file of weights",
    "cache_dir": "the environment variable HF_HOME says where weights are kept",
    "features_only": "a run trains the whole model; --task asks for another head",
}
CHANNELS = {"in_chans": "--model-args in_chans=1 or in_chans=3 decides it"}
SIZES = dict.fromkeys(("img_size", "image_size", "input_size"), "--size decides it")
PARTS = dict.fromkeys(("backbone", "stages", "name", "neck", "neck_args"), "--model, --head and --neck decide it")
PARTS |= {"backbone_args": "--model-args are for it", "pretrained_backbone": EVERYWHERE["pretrained"]}
DECIDED: dict[str, dict[str, str]] = {
    "model_args": EVERYWHERE,
    "pool_args": EVERYWHERE | CHANNELS | SIZES | {"light": "a light model only infers; train --pool map"},
    "broadcast_args": EVERYWHERE | CHANNELS | SIZES,
    "head_args": EVERYWHERE | CHANNELS | SIZES | PARTS | {"num_keypoints": "the keypoints of DATA decide it"},
    "neck_args": EVERYWHERE | CHANNELS | SIZES,
}
# Fields of a recipe, and the argument of a model that means the same
TWICE = {"drop_path": "drop_path_rate", "drop_rate": "drop_rate"}


def refuse_decided(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Refuse arguments ("model_args" and others of the settings) that are decided elsewhere.

    Args:
        changes: Fields of the recipe that the user has set.
    """
    for place, table in DECIDED.items():
        flag, given = f"--{place.replace('_', '-')}", settings[place] or {}
        nested = given.get("pool_options")
        for name, value in [*given.items(), *(nested.items() if isinstance(nested, Mapping) else ())]:
            if name in table:
                raise ValueError(f"{flag} {name}={value}; leave it out: {table[name]}")
    channels = settings["model_args"].get("in_chans", 3)
    if isinstance(channels, bool) or channels not in (1, 3) or not isinstance(channels, int):
        raise ValueError(f"--model-args in_chans={channels}; images have 1 channel (grey) or 3 (RGB)")
    for field, name in TWICE.items():
        if field in changes and name in settings["model_args"]:
            value = settings["model_args"][name]
            raise ValueError(f"--set {field}={changes[field]} and --model-args {name}={value} are the same; give one")
