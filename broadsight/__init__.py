"""Efficient vision models that see the whole picture. Importing this registers every model with timm."""

import sys
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

_PARTS = ("analysis", "data", "dense", "evaluate", "evaluating", "explain", "layers", "losses", "models", "report")
_PARTS += ("train", "training")
_EXPORTS = {
    "add_context_broadcast": "broadcasting",
    "convert_release": "release",
    "fuse": "fusion",
    "load": "weights.folder",
    "load_release": "release",
    "open_classifier": "classifier",
    "save": "weights.folder",
    "swap_pool": "pooling",
}


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    if name in _PARTS:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS, *_PARTS])


# `broadsight --help` answers at once: a command registers the models when it needs them, not before.
if Path(next(iter(sys.argv), "")).name != "broadsight" and sys.orig_argv[1:3] != ["-m", "broadsight"]:
    from . import models as models
