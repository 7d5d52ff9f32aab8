"""Watches what the activations of a model give, wherever in it they are called."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from timm import layers as timm_layers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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


class ActivationWatch(TorchFunctionMode):
    """Sees what activations give. No hooks: some models, ours among them, would then take another way."""

    def __init__(self, model: nn.Module, size: tuple[int, int]):
        super().__init__()
        self.model, self.size = model, size
        self.names = {module: name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self.layers: dict[tuple, Layer] = {}
        self.passed = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        function = _function(getattr(func, "__name__", ""), args, kwargs or {})
        if function is not None and isinstance(result, Tensor) and result.ndim > 1 and result.numel():
            with torch.no_grad():
                self.see(function, result)
        return result

    def see(self, function: str, x: Tensor) -> None:
        key, name = self.place()
        if key not in self.layers:
            number = sum(layer.name.partition("#")[0] == name for layer in self.layers.values()) + 1
            self.layers[key] = Layer(name if number == 1 else f"{name}#{number}", function)
        layer = self.layers[key]
        layer.counted += int((x == 0 if layer.exact else x <= 0).count_nonzero())
        layer.all += x.numel()
        axis = _channel_axis(x, self.size)
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
        frame = sys._getframe(3)
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
    frame: FrameType | None = sys._getframe(2)
    for _ in range(3):  # a module calls the function, or a function of timm's or torch's that does
        if frame is None or isinstance(frame.f_locals.get("self"), nn.Module):
            break
        frame = frame.f_back
    kind = type(frame.f_locals.get("self")) if frame is not None else object
    if kind in WRITTEN_OUT:
        return WRITTEN_OUT[kind] if product else None
    return None if kind is timm_layers.HardSigmoid else function


def _channel_axis(x: Tensor, size: tuple[int, int]) -> int:
    """1 of (B, C, h, w), the last of (B, h, w, C) and rows; known by whose sides have the image's proportions."""
    if x.ndim != 4:
        return x.ndim - 1
    first, last = (abs(math.log(x.shape[i] * size[1] / (x.shape[i + 1] * size[0]))) for i in (2, 1))
    return 1 if first <= last else 3
