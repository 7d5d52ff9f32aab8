"""What there is to see inside a model while one image passes: maps, and who collects them."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class Look:
    """One thing to look at: a map over an image.

    Args:
        kind: Which sort of map: "gradcam", "attention", "map-tokens", "super-tokens", "abstract-tokens", "fusion",
            "foreground" or "c-mhsa".
        title: What is seen, such as "group 1, token 3"; different for every look of one kind and depth.
        layer: Path of the module that it was taken from.
        depth: Number of that layer among those of its kind, from 0 in order of execution.
        form: "heat" (float, 0 or more), "labels" (integers: which region each place belongs to) or "mask" (bool).
        values: (h, w) on the CPU, at its own resolution. Over the image, it is resized: linearly if it is a heat map,
            to the nearest place otherwise.
        note: One line on how to read it.
    """

    kind: str
    title: str
    layer: str
    depth: int
    form: str
    values: Tensor
    note: str = ""


class Collector(Protocol):
    """Collects the looks of one kind while one image (1, C, H, W) passes a model.

    It is a context manager: hooks are on the model inside the `with`, and gone after it, however that ends.
    What it sees of a pass it must not change. `looks` is valid after the pass, inside the `with` or after it.
    """

    kind: str

    @staticmethod
    def suits(model: nn.Module) -> bool:
        """Whether the model has what this collects; without running it."""
        ...

    def __init__(self, model: nn.Module, image_size: tuple[int, int]) -> None: ...

    def __enter__(self) -> "Collector": ...

    def __exit__(self, *_: Any) -> None: ...

    def looks(self) -> list[Look]:
        """By depth, as the layers ran."""
        ...
