"""Counts how often the activations of a model do not fire, wherever in it they are called."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from timm import layers as timm_layers
from torch import Tensor, nn

from .layout import layouts_of
from .watch import Call, FunctionWatch

# torch's functions, whose results are 0 where nothing fires; and those whose results are 0 or less there.
RECTIFIERS = ("relu", "relu6")
SMOOTH = ("gelu", "silu", "mish", "hardswish", "elu", "selu", "celu", "leaky_relu", "prelu")
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
    """Sums of one activation."""

    name: str
    function: str
    exact: bool  # what counts is exactly 0, rather than 0 or less
    counted: int = 0  # in the pass that runs, those that do not fire, and all
    all: int = 0
    share: float = 0.0  # sum over images of the finished passes
    silent: Tensor = field(default_factory=lambda: torch.ones(0, dtype=torch.bool))  # (C,), have never fired


class ActivationWatch(FunctionWatch):
    """Counts what activations give, by the module that calls them; the second one of a module in a pass is "name#2".

    The hooks on all modules make our layers run as they are written. `size` is (H, W) of the images.
    """

    def __init__(self, model: nn.Module, size: tuple[int, int]):
        super().__init__({module: name.replace("_orig_mod.", "") for name, module in model.named_modules()})
        self.size = size
        self.layers: dict[str, Layer] = {}
        self.passed = 0
        self._calls: Counter[str] = Counter()  # of activations in the pass that runs, by module

    def called(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        caller = self.running[-1] if self.running else Call("model", nn.Identity())
        function = _function(getattr(func, "__name__", ""), args, kwargs, type(caller.module))
        if function is not None and isinstance(result, Tensor) and result.ndim > 1 and result.numel():
            name = caller.name or "model"
            self._calls[name] += 1
            if self._calls[name] > 1:
                name = f"{name}#{self._calls[name]}"
            self.count(self.layers.setdefault(name, Layer(name, function, function in RECTIFIERS)), result)

    def count(self, layer: Layer, x: Tensor) -> None:
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

    def end_pass(self, passed: int) -> None:
        """Finish a pass; `passed` is the number of images so far."""
        for layer in self.layers.values():
            if layer.all:
                layer.share += (passed - self.passed) * layer.counted / layer.all
            layer.counted = layer.all = 0
        self.passed = passed
        self._calls.clear()


def _function(name: str, args: tuple, kwargs: Mapping[str, Any], caller: type) -> str | None:
    """Which activation a call of a torch function by a module of that type is, if it is one."""
    name = name.removesuffix("_")
    if caller in WRITTEN_OUT:
        product = name == "mul" and len(args) == 2 and all(isinstance(x, Tensor) for x in args)
        return WRITTEN_OUT[caller] if product else None
    if caller is timm_layers.HardSigmoid:
        return None
    if name == "hardtanh":  # nn.ReLU6 is one
        return "relu6" if (args[1] if len(args) > 1 else kwargs.get("min_val")) == 0 else None
    return name if name in (*RECTIFIERS, *SMOOTH) else None
