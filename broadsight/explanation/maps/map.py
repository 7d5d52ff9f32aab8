"""What there is to see inside a model while one image passes: maps, and who collects them."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from ...inspection.attention import Call, capture_attention
from ...inspection.attention_rows import Rows


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


@dataclass
class LayerCall:
    """One call of a layer.

    Args:
        layer: Path of the layer.
        module: The layer.
        given: What `LayerCalls.given` kept of its arguments.
        rows: Of all its attentions, in order; what they are computed from stays as it is in a pass without gradients.
    """

    layer: str
    module: Any
    given: Any
    rows: list[Rows] = field(default_factory=list)

    def weights(self, axes: int, axis: int = -1) -> list[Tensor]:
        """Weights that have so many axes, of soft-maxes over that one from the end, which is the last of the result."""
        return [rows.weights() for rows in self.rows if (len(rows.shape), rows.axis) == (axes, axis)]


class LayerCalls:
    """A context manager that keeps the calls of some layers and their attentions, in order of execution.

    Args:
        modules: The layers, by path.
    """

    def __init__(self, modules: dict[str, nn.Module]):
        self.modules = modules
        self.calls: list[LayerCall] = []
        self._opened = ExitStack()

    def given(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """What to keep of a call's arguments."""
        return None

    def __enter__(self) -> Any:
        self.calls.clear()
        running: dict[int, LayerCall] = {}

        def begins(call: Call) -> None:
            kept = LayerCall(call.name, call.module, self.given(call.module, *call.args, **call.kwargs))
            running[id(call)] = kept
            self.calls.append(kept)

        def see(calls: list[Call], rows: Rows) -> None:
            for call in calls:
                running[id(call)].rows.append(rows)

        names = {module: name.replace("_orig_mod.", "") for name, module in self.modules.items()}
        self._opened.enter_context(capture_attention(names, see, begins))
        return self

    def __exit__(self, *_: Any) -> None:
        self._opened.close()


def modules_of(model: nn.Module, *kinds: type[nn.Module]) -> dict[str, nn.Module]:
    """All modules of some kinds, by path."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def shown(x: Tensor) -> Tensor:
    """A heat map (h, w) as a look keeps it."""
    return x.detach().float().cpu().contiguous()
