"""Counts multiply-accumulates: those really executed, and those of a paper's own formulation and counting tool.

One counter serves both: torch's flop counter, which sees every convolution and matrix product, fused attention too. A
paper's figure may hold more: operations that its tool counted (norms, pooling), and work that our faster form of a
layer does not do. The first are added by a Convention, the second by the layer itself, through `extra_macs`.
"""

from collections.abc import Generator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d, SelectAdaptivePool2d
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from .meta_pass import undisturbed

# What sets a tensor to random or constant values, in place.
INITIAL_VALUES = (
    Tensor.normal_,
    Tensor.uniform_,
    Tensor.erfinv_,
    Tensor.mul_,
    Tensor.add_,
    Tensor.clamp_,
    Tensor.fill_,
)


@dataclass(frozen=True)
class Convention:
    """What a counting tool adds to convolutions and matrix products, or that it knows layers alone.

    Args:
        name: How tables name the convention.
        layers_only: Of all products, those of Conv2d and Linear modules alone; attention and the like are free. A
            layer's `extra_macs` then gives whatever its published form has in such modules and ours has not.
        layer_norm, batch_norm, gelu: Operations per element of the result.
        sample: Operations per element sampled bilinearly.
        pool: Operations per element pooled globally.
        transposed_at_output: Transposed convolutions are counted on the larger map, a known slip of older tools.
    """

    name: str
    layers_only: bool = False
    layer_norm: int = 0
    batch_norm: int = 0
    gelu: int = 0
    sample: int = 0
    pool: int = 0
    transposed_at_output: bool = False


PRODUCTS = Convention("products")
LAYERS = Convention("layers", layers_only=True)
FVCORE = Convention("fvcore", layer_norm=5, batch_norm=2, sample=4, pool=1)
FVCORE_MEAN = Convention("fvcore, mean pool", layer_norm=5, batch_norm=2, sample=4)  # a mean is invisible to that tool
OLD_PROFILER = Convention("older profilers", layer_norm=5, batch_norm=2, gelu=1, sample=4, transposed_at_output=True)


class _NoInitialValues(TorchFunctionMode):
    """Initialisation of weights without memory changes nothing, and takes its time all the same."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in INITIAL_VALUES and args[0].is_meta and not torch.is_grad_enabled():
            return args[0]
        return func(*args, **(kwargs or {}))


# What gives a tensor of its first argument's shape and runs no product. Shapes alone take torch a millisecond or more.
NO_PRODUCTS = (F.layer_norm, F.batch_norm, F.gelu, F.relu)


class _NoArithmetic(TorchFunctionMode):
    """Results without memory are made at once where no product is run: nothing is there to count."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in NO_PRODUCTS and args[0].is_meta:
            return torch.empty_like(
                args[0], memory_format=torch.contiguous_format if func is F.layer_norm else torch.preserve_format
            )
        if func is F.linear and args[0].is_meta:  # without a bias, which is not counted
            return func(*args[:2])
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=32)  # several rows of a table may be of one model, which counting leaves alone
def blank_model(name: str, **kwargs: Any) -> nn.Module:
    """A timm model without memory for its weights, enough to count with."""
    with torch.device("meta"), _NoInitialValues():
        return timm.create_model(name, **kwargs)


def executed_macs(model: nn.Module, size: tuple[int, int], in_chans: int = 3) -> int:
    """Multiply-accumulates of convolutions and matrix products that the model runs for one image of size (H, W)."""
    return count(model, (1, in_chans, *size), PRODUCTS)[0]


def published_macs(model: nn.Module, size: tuple[int, int], convention: Convention, in_chans: int = 3) -> int:
    """Multiply-accumulates of the paper's formulation for one image of size (H, W), as the paper's tool counts them."""
    return sum(count(model, (1, in_chans, *size), convention))


def count(model: nn.Module, *shapes_and_convention) -> tuple[int, int]:
    """(executed, extra) of one call on tensors of the given shapes, the convention last.

    `extra` is what the paper's formulation and tool hold beyond the products that are executed; it is negative where
    the tool overlooks more than that.
    """
    *shapes, convention = shapes_and_convention
    try:
        if all(x.is_meta for x in (*model.parameters(), *model.buffers())):
            with undisturbed(model), _frozen(model):  # a copy is not needed, and takes its time
                return _count(model, shapes, convention, "meta")
        return _count(deepcopy(model).to("meta"), shapes, convention, "meta")
    except (RuntimeError, NotImplementedError):  # something in a foreign model needs values, not shapes alone
        return _count(deepcopy(model).cpu().float(), shapes, convention, "cpu")


@contextmanager
def _frozen(model: nn.Module) -> Generator[None, None, None]:
    learning = [p for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _count(model: nn.Module, shapes: list, convention: Convention, device: str) -> tuple[int, int]:
    terms: list[int] = []
    asked: list[tuple[Any, tuple, Any]] = []

    def add(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if isinstance(module, nn.LayerNorm | LayerNorm2d):
            terms.append(convention.layer_norm * output.numel())
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            terms.append(convention.batch_norm * output.numel())
        elif isinstance(module, nn.GELU):
            terms.append(convention.gelu * output.numel())
        elif isinstance(module, SelectAdaptivePool2d) and not module.is_identity():
            terms.append(convention.pool * inputs[0].numel())
        elif convention.layers_only and isinstance(module, nn.Conv2d):
            terms.append(output.numel() * module.weight[0].numel())
        elif convention.layers_only and isinstance(module, nn.Linear):
            terms.append(output.numel() * module.in_features)
        if hasattr(module, "extra_macs"):
            asked.append((module, inputs, output))

    hooks = [module.register_forward_hook(add) for module in model.modules()]
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter, _NoArithmetic():
            model.eval().requires_grad_(False)(*[torch.zeros(shape, device=device) for shape in shapes])
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():  # only now, so that whoever must compute something for an answer is not counted
        terms += [module.extra_macs(convention, inputs, output) for module, inputs, output in asked]
    executed = counter.get_total_flops() // 2
    return executed, sum(terms) - (executed if convention.layers_only else 0)
