"""Counts the multiply-accumulates that a model executes: convolutions and matrix products, fused attention too.

What a paper's figure holds beyond them is added in `papers/macs.py`.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from .meta_pass import undisturbed
from .watch import hooked

Beyond = Callable[[nn.Module, tuple, Any], int]  # (module, its inputs, its output) -> a number to add up

IN_PLACE = [getattr(Tensor, f"{name}_") for name in ("normal", "uniform", "erfinv", "mul", "add", "clamp", "fill")]


class _NoArithmetic(TorchFunctionMode):
    """Makes results without memory at once where no product is run: torch takes its time for shapes alone."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in IN_PLACE and args[0].is_meta and not torch.is_grad_enabled():  # the initial values of weights
            return args[0]
        if func in (F.layer_norm, F.batch_norm, F.gelu, F.relu) and args[0].is_meta:
            form = torch.contiguous_format if func is F.layer_norm else torch.preserve_format
            return torch.empty_like(args[0], memory_format=form)
        if func is F.linear and args[0].is_meta:  # without a bias, which is not counted
            return func(*args[:2])
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=32)  # several rows of a table may be of one model, which counting leaves alone
def blank_model(made: str | Callable[..., nn.Module], *arguments: Any, **kwargs: Any) -> nn.Module:
    """A timm model, or what a function makes, without memory for its weights, enough to count with."""
    with torch.device("meta"), _NoArithmetic():
        return timm.create_model(made, **kwargs) if isinstance(made, str) else made(*arguments, **kwargs)


def executed_macs(model: nn.Module, size: tuple[int, int], in_chans: int = 3) -> int:
    """Multiply-accumulates of convolutions and matrix products that the model runs for one image of size (H, W)."""
    return count_calls(model, (1, in_chans, *size))[0]


def count_calls(model: nn.Module, *shapes: Sequence[int], beyond: Beyond | None = None) -> tuple[int, int]:
    """Multiply-accumulates of one call on tensors of these shapes, and the sum of `beyond` over all modules' calls."""
    try:
        if all(x.is_meta for x in (*model.parameters(), *model.buffers())):  # a copy is not needed, and takes its time
            learning = [p for p in model.parameters() if p.requires_grad]
            try:
                with undisturbed(model):
                    return _count(model, shapes, beyond, "meta")
            finally:
                for parameter in learning:
                    parameter.requires_grad_(True)
        return _count(deepcopy(model).to("meta"), shapes, beyond, "meta")
    except (RuntimeError, NotImplementedError):  # something in a foreign model needs values, not shapes alone
        return _count(deepcopy(model).cpu().float(), shapes, beyond, "cpu")


def _count(model: nn.Module, shapes: Sequence, beyond: Beyond | None, device: str) -> tuple[int, int]:
    calls: list[tuple[nn.Module, tuple, Any]] = []
    counter = FlopCounterMode(display=False)
    seen = model.modules() if beyond is not None else ()
    with torch.no_grad(), hooked(seen, after=lambda *call: calls.append(call)), counter, _NoArithmetic():
        model.eval().requires_grad_(False)(*[torch.zeros(shape, device=device) for shape in shapes])
    with torch.no_grad():  # only now, so that what is computed for an answer is not counted
        return counter.get_total_flops() // 2, sum(beyond(*call) for call in calls) if beyond is not None else 0
