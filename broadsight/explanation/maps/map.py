"""Maps of what a model does while one image passes, and the base of the collectors that make them."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from ...inspection.attention import AttentionWatch, Call
from ...inspection.attention_rows import Rows

# Of each kind: its name on sheets, what it shows, what the page offers it as, and models that have it.
KNOWN: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text("utf-8"))


@dataclass(frozen=True)
class Look:
    """A map over an image.

    Args:
        kind: Which sort of map, one of `broadsight.explanation.inside.KINDS`.
        title: What it shows, such as "group 1, token 3"; different for every look of one kind and depth.
        layer: Path of the module that it was taken from.
        depth: Number of that layer among those of its kind, from 0 in order of execution.
        form: "heat" (float, 0 or more), "labels" (integers: the region of each place) or "mask" (bool).
        values: (h, w) on the CPU, at its own resolution. Over the image a heat map is resized linearly.
        note: One line on how to read it.
        mark: A place of the image that the map is about, (x, y) as shares of its width and height.
        heads: (heads, h, w), of which the values are the mean, where these are not looks of their own.
    """

    kind: str
    title: str
    layer: str
    depth: int
    form: str
    values: Tensor
    note: str = ""
    mark: tuple[float, float] | None = None
    heads: Tensor | None = None


@dataclass
class LayerCall:
    """One call of a layer."""

    layer: str  # its path
    module: Any
    given: Any  # what `Collector.given` kept of its arguments
    rows: list[Rows] = field(default_factory=list)  # of its attentions, in order

    def weights(self, axes: int, axis: int = -1) -> list[Tensor]:
        """Weights with that number of axes, of soft-maxes over that axis from the end; it is the last of the result."""
        return [rows.weights() for rows in self.rows if (len(rows.shape), rows.axis) == (axes, axis)]


class Collector:
    """Collects the looks of one kind from calls of some layers while one image (1, C, H, W) passes a model.

    A context manager: hooks are on the model inside the `with` alone. `looks` is valid after the pass.
    """

    kind: str
    layers: tuple[type[nn.Module], ...]
    marks: Sequence[tuple[float, float]] = ()  # places that are asked for, (x, y) as shares of the image's sides

    def __init__(self, model: nn.Module, image_size: tuple[int, int]):
        self.model, self.image_size = model, image_size
        self.calls: list[LayerCall] = []
        self._opened = ExitStack()

    @classmethod
    def find(cls, model: nn.Module) -> dict[str, nn.Module]:
        """The layers to watch, by path."""
        return modules_of(model, *cls.layers)

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether the model has what this collects; without running it."""
        return bool(cls.find(model))

    def given(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """What to keep of a call's arguments."""

    def __enter__(self) -> "Collector":
        self.calls.clear()
        running: dict[int, LayerCall] = {}

        def begins(call: Call) -> None:
            kept = LayerCall(call.name, call.module, self.given(call.module, *call.args, **call.kwargs))
            running[id(call)] = kept
            self.calls.append(kept)

        def see(calls: list[Call], rows: Rows) -> None:
            for call in calls:
                running[id(call)].rows.append(rows)

        names = {module: name.replace("_orig_mod.", "") for name, module in self.find(self.model).items()}
        self._opened.enter_context(AttentionWatch(names, see, begins))
        return self

    def __exit__(self, *_: Any) -> None:
        self._opened.close()

    def looks(self) -> list[Look]:
        """By depth, as the layers ran."""
        return [look for depth, call in enumerate(self.calls) for look in self.looks_of(depth, call)]

    def looks_of(self, depth: int, call: LayerCall) -> list[Look]:
        raise NotImplementedError

    def heat(self, depth: int, layer: str, title: str, values: Tensor, note: str, **more: Any) -> Look:
        """A heat map (h, w)."""
        return Look(self.kind, title, layer, depth, "heat", values.detach().float().cpu().contiguous(), note, **more)


def modules_of(model: nn.Module, *kinds: type[nn.Module]) -> dict[str, nn.Module]:
    """All modules of some kinds, by path."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
