"""Descriptions of runs that strangers wrote: whatever config.json says, it is opened or refused in one line."""

import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch

from broadsight.dense.build import make_dense_model
from broadsight.runs import task_of
from broadsight.runs.classifier import open_classifier
from broadsight.runs.dense_model import open_dense
from broadsight.training.history import check_own_data
from broadsight.training.settings import stored_in
from broadsight.weights.loading import load_teacher
from broadsight.weights.writing import write_weights

from .watching import CANARY, refused

NOWHERE = f"/nonexistent/{CANARY}"
FROM_HUB = (
    "hf-hub:stranger/model",
    "hf_hub:stranger/model",
    "local-dir:" + NOWHERE,
    "https://example.org/model",
    NOWHERE,
)
SETTINGS = dict(
    dict.fromkeys(("val", "split", "root", "pool", "broadcast", "init", "head", "neck")),
    **{f"{name}_args": {} for name in ("model", "pool", "broadcast", "head", "neck")},
    data="scenes:8",
    model="test_resnet",
    task="classify",
    recipe="quick",
    seed=0,
    log_every=10,
)
ABOUT = dict(
    task="classify", settings=SETTINGS, recipe={}, data={}, parameters=1, command="broadsight train", threads=1
)
CFG = dict(input_size=[3, 32, 32], mean=[0.5] * 3, std=[0.5] * 3, num_classes=2, interpolation="bicubic", crop_pct=0.9)
PLAIN: dict[str, Any] = dict(
    architecture="test_resnet",
    num_classes=2,
    label_names=["a", "b"],
    model_args={},
    pretrained_cfg=CFG,
    broadsight=ABOUT,
)
EDITED: dict[str, Any] = PLAIN | dict(architecture="edited", model_args=dict(backbone="test_resnet", pool="gap"))
DENSE: dict[str, Any] = PLAIN | dict(
    architecture="dense_model",
    model_args=dict(
        head="semantic_fpn",
        backbone="test_resnet",
        head_args=dict(pyramid_channels=16, channels=8),
        backbone_args=dict(in_chans=3),
    ),
    broadsight=ABOUT
    | dict(
        task="segment",
        settings=SETTINGS | dict(task="segment", head="semantic_fpn", neck="fpn"),
        labels=dict(category_ids={}, keypoint_names=[], flip_pairs=[], skeleton=[], keypoint_offset=0.0),
    ),
)


def seeds() -> list[bytes]:
    """Sound descriptions, the findings, and what resembles them."""
    found: list[Any] = [PLAIN, EDITED, DENSE]
    for place in FROM_HUB:
        found += [PLAIN | dict(architecture=place)]
        found += [_with(one, ("model_args", "backbone"), place) for one in (EDITED, DENSE)]
        found += [_with(PLAIN, ("broadsight", "settings", name), place) for name in ("model", "data", "root", "init")]
        for key in ("file", "url", "hf_hub_id", "state_dict", "source"):
            found += [_with(PLAIN, ("pretrained_cfg", key), place)]
    for key in (
        "checkpoint_path",
        "cache_dir",
        "pretrained_cfg_overlay",
        "pretrained_cfg",
        "pretrained",
        "features_only",
    ):
        value = dict(file=NOWHERE, url=FROM_HUB[3]) if "cfg" in key else NOWHERE if "_" in key[:11] else True
        found += [_with(one, ("model_args", key), value) for one in (PLAIN, EDITED, DENSE)]
        found += [_with(DENSE, ("model_args", below, key), value) for below in ("backbone_args", "head_args")]
        found += [_with(EDITED, ("model_args", below), {key: value}) for below in ("pool_args", "broadcast_args")]
    found += [_with(DENSE, ("model_args", "pretrained_backbone"), True)]
    found += [_with(PLAIN, ("model_args", "norm_layer"), "os.system"), _with(PLAIN, ("model_args", "block"), "eval")]
    for value in (10**12, -1, 1e308, True, "2", None, [2], float("nan"), float("inf"), {}):
        found += [PLAIN | dict(num_classes=value), DENSE | dict(num_classes=value)]
        found += [_with(PLAIN, ("pretrained_cfg", key), value) for key in ("input_size", "mean", "std", "crop_pct")]
        found += [_with(PLAIN, ("model_args", "in_chans"), value), PLAIN | dict(label_names=value)]
    found += [
        _with(PLAIN, ("model_args", "layers"), [10**6] * 4),
        _with(PLAIN, ("model_args", "channels"), [60000] * 4),
    ]
    found += [
        _with(PLAIN, ("pretrained_cfg", "input_size"), [3, 10**9, 10**9]),
        PLAIN | dict(label_names=["<b>", "\x1b[2J"]),
    ]
    text = [json.dumps(one).encode() for one in found]
    text += [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"architecture": "a", "architecture": 1}',
    ]
    text += [json.dumps(_without(one, path)).encode() for one in (PLAIN, DENSE) for path in _paths(one)]
    return text + [
        _replaced(one, path, value) for one in (PLAIN, DENSE) for path in _paths(one) for value in (None, [], "x", -1)
    ]


def one(data: bytes) -> None:
    """Open a folder with this config.json as every command does.

    Raises:
        Violation: Something was fetched, read elsewhere or raised that must not be.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-run-") as folder:
        path = Path(folder)
        (path / "config.json").write_bytes(data)
        kind = "dense" if b'"dense_model"' in data else "edited" if b'"edited"' in data else "plain"
        (path / "model.safetensors").write_bytes(_weights(kind))
        refused(lambda: _open(path))
        refused(lambda: load_teacher(path))
        refused(lambda: check_own_data(stored_in(path)["settings"]))
        if kind == "edited":
            refused(lambda: _by_timm(path))


def _open(path: Path) -> None:
    with torch.inference_mode():
        if task_of(path) == "classify":
            classifier = open_classifier(path, device="cpu")
            size, channels = classifier.transforms.size, classifier.transforms.channels
            if size <= 64:
                classifier.logits(torch.zeros(1, channels, size, size))
        else:
            open_dense(path, device="cpu").model(torch.zeros(1, 3, 64, 64))


def _by_timm(path: Path) -> None:
    """As timm reads a folder itself; our entry points look at what it found."""
    try:
        timm.create_model(f"local-dir:{path}", pretrained=True)
    except (TypeError, KeyError, AttributeError, AssertionError) as error:  # timm's own word for what it cannot read
        raise ValueError(str(error).splitlines()[0] if str(error) else type(error).__name__) from None


@cache
def _weights(kind: str) -> bytes:
    torch.manual_seed(0)
    model: Any = timm.create_model("test_resnet", num_classes=2)
    if kind == "edited":
        model = timm.create_model("edited", backbone="test_resnet", pool="gap", num_classes=2)
    if kind == "dense":
        model = make_dense_model(**DENSE["model_args"], num_classes=2)
    with tempfile.TemporaryDirectory() as folder:
        write_weights(model, Path(folder) / "model.safetensors")
        return (Path(folder) / "model.safetensors").read_bytes()


def _with(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(config)
    below = found
    for key in path[:-1]:
        below = below.setdefault(key, {})
    below[path[-1]] = value
    return found


def _without(config: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    found = copy.deepcopy(config)
    below: Any = found
    for key in path[:-1]:
        below = below[key]
    del below[path[-1]]
    return found


def _paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is something in a description, all of it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, below in items for path in ((*above, key), *_paths(below, (*above, key)))]


def _replaced(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> bytes:
    return json.dumps(_with(config, path, value)).encode()
