"""The dense heads. Each file of this folder registers its own, and is found here by being in the folder."""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

from torch import nn

from ...errors import check_choice

TASKS = ("detect", "instances", "keypoints", "segment")


class Head(NamedTuple):
    """A registered head."""

    task: str  # one of TASKS
    build: Callable[..., nn.Module]  # from Stages, a number of classes and options to a model
    top_down: bool = False  # whether the model takes crops of single objects rather than whole images
    square: bool = False  # whether all images are resized to one square, whatever their aspect


HEADS: dict[str, Head] = {}


def register(name: str, task: str, *, top_down: bool = False, square: bool = False) -> Callable[[Any], Any]:
    """Decorate a function from Stages, a number of classes and options to a dense model, which is then known by this
    name. The model has `stages` and `task`; in train mode `model(images, targets)` returns a dict of losses, else
    `model(images)` what was found. Options are `image_size` for whole images, `num_keypoints` for keypoints."""
    check_choice("task", task, TASKS)

    def add(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        owner = HEADS[name].build.__module__ if name in HEADS else build.__module__
        if owner != build.__module__:
            raise ValueError(f"dense head {name!r} is registered by {owner}; choose another name")
        HEADS[name] = Head(task, build, top_down, square)
        return build

    return add


for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
