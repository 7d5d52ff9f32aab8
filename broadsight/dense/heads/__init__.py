"""The dense heads. Each file of this folder registers its own, and is found here by being in the folder."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from torch import nn

from ...errors import check_choice

TASKS = ("detect", "instances", "keypoints", "segment")


@dataclass(frozen=True)
class Head:
    """A registered head."""

    task: str  # one of TASKS
    build: Callable[..., nn.Module]  # from Stages, a number of classes and options to a model
    top_down: bool = False  # whether the model takes crops of single objects rather than whole images
    square: bool = False  # whether all images are resized to one square, whatever their aspect


HEADS: dict[str, Head] = {}


def register(name: str, task: str, *, top_down: bool = False, square: bool = False) -> Callable[[Any], Any]:
    """Decorate a function that builds a dense model; `build`, runs and the command line then know it by this name.

    The function takes Stages, the number of classes, and options as keywords. The model has `stages` and `task`; in
    train mode `model(images, targets)` returns a dict of losses, in eval mode `model(images)` what was found.
    Heads that find objects in whole images are given `image_size`, those for keypoints also `num_keypoints`.
    """
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
