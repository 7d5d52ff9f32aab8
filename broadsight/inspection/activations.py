"""Counts how often the activations of a model do not fire, wherever in it they are called."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from timm import layers as timm_layers
from torch import Tensor, nn

from .layout import layouts_of
from .watch import FunctionWatch

# torch's functions, whose results are 0 where nothing fires; and those whose results are 0 or less there.
RECTIFIERS = {"relu": "relu", "relu_": "relu", "relu6": "relu6", "relu6_": "relu6"}
SMOOTH = {name: name for name in ("gelu", "silu", "mish", "hardswish", "elu", "selu", "celu", "leaky_relu", "prelu")}
SMOOTH |= {f"{name}_": name for name in SMOOTH}
FUNCTIONS = RECTIFIERS | SMOOTH
# timm's modules that end in a product of two tensors, and consist of other functions.
WRITTEN_OUT: dict[type, str] = {
    timm_layers.Swish: "silu",
    timm_layers.Mish: "mish",
    timm_layers.HardMish: "hard_mish",
    timm_layers.HardSwish: "hardswish",
    timm_layers.QuickGELU: "quick_gelu",
}


@dataclass
class Layer:
    """Sums of one activation.

    Args:
        counted, all: Activations of the pass that goes on.
        share: Sum over images of the finished passes.
        silent: (C,) channels that have never fired.
    """

    name: str
    function: str
    counted: int = 0
    all: int = 0
    share: float = 0.0
    silent: Tensor = field(default_factory=lambda: torch.ones(0, dtype=torch.bool))

    @property
    def exact(self) -> bool:
        """Whether what counts is exactly 0, rather than 0 or less."""
        return self.function in RECTIFIERS.values()


class ActivationWatch(FunctionWatch):
    """Counts what activations give.

    Where one is called is read from the stack of Python's frames. Hooks, such as those of torch's ModuleTracker, do not
    serve: with them some models, ours among them, take another form, and two calls at one place look like one
    call at each of two places.
    """

    def __init__(self, model: nn.Module, size: tuple[int, int]):
        super().__init__()
        self.model, self.size = model, size
        self.names = {module: name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self.layers: dict[tuple, Layer] = {}
        self.passed = 0

    def called(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        function = _function(getattr(func, "__name__", ""), args, kwargs)
        if function is not None and isinstance(result, Tensor) and result.ndim > 1 and result.numel():
            self.count(function, result)

    def count(self, function: str, x: Tensor) -> None:
        """Add a result to the sums of its layer."""
        key, name = self.place()
        if key not in self.layers:
            number = sum(layer.name.partition("#")[0] == name for layer in self.layers.values()) + 1
            self.layers[key] = Layer(name if number == 1 else f"{name}#{number}", function)
        layer = self.layers[key]
        layer.counted += int((x == 0 if layer.exact else x <= 0).count_nonzero())
        layer.all += x.numel()
        # Of four axes, those two are the map's sides that are nearest to the image's proportions.
        maps = layouts_of(x.shape, self.size, nearest=True) if x.ndim == 4 else []
        axis = 1 if maps and maps[0].form == "NCHW" else x.ndim - 1
        if layer.silent.shape != x.shape[axis : axis + 1]:
            layer.silent = torch.ones(x.shape[axis], dtype=torch.bool)
        if layer.silent.any():
            largest = x.amax([i for i in range(x.ndim) if i != axis]).cpu()  # nan is not silent
            layer.silent &= largest <= 0

    def place(self) -> tuple[tuple, str]:
        """Which call this is: the way to it through the model's modules; and the name of the innermost of these.

        One module may be called at several places of another, and one place several times, for parts of a batch, by a
        function in between that does not always take the same way: only those inside the innermost module count.
        """
        way: list[Any] = []
        name: str | None = None
        frame = sys._getframe(4)
        while frame is not None:
            module = frame.f_locals.get("self")
            inside = isinstance(module, nn.Module) and module in self.names
            if inside or name is None:
                way.append((frame.f_code, frame.f_lasti, id(module) if inside else None))
            if inside and name is None:
                name = self.names[module]
            if module is self.model:
                break
            frame = frame.f_back
        return tuple(way), name or "model"

    def end_pass(self, passed: int) -> None:
        """So many images have passed in all."""
        for layer in self.layers.values():
            if layer.all:
                layer.share += (passed - self.passed) * layer.counted / layer.all
            layer.counted = layer.all = 0
        self.passed = passed


def _function(name: str, args: tuple, kwargs: Mapping[str, Any]) -> str | None:
    """What activation a call is, if it is one."""
    function = FUNCTIONS.get(name)
    if name in ("hardtanh", "hardtanh_"):  # nn.ReLU6 is one
        function = "relu6" if (args[1] if len(args) > 1 else kwargs.get("min_val")) == 0 else None
    product = name in ("mul", "mul_") and len(args) == 2 and all(isinstance(x, Tensor) for x in args)
    if function is None and not product:
        return None
    frame: FrameType | None = sys._getframe(3)
    for _ in range(3):  # a module calls the function, or a function of timm's or torch's that does
        if frame is None or isinstance(frame.f_locals.get("self"), nn.Module):
            break
        frame = frame.f_back
    kind = type(frame.f_locals.get("self")) if frame is not None else object
    if kind in WRITTEN_OUT:
        return WRITTEN_OUT[kind] if product else None
    return None if kind is timm_layers.HardSigmoid else function
