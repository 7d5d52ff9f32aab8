"""Watches calls of some of a model's modules: what their soft-maxes and fused attentions compute meanwhile.

Nothing is computed while the model runs: somebody else may watch too, and would see it. Only what was there anyway is
kept, for one image, and looked at afterwards.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..layers.kernels.slices import image_slices

# Of attention weights that are computed at once.
WEIGHTS_BYTES = 16 << 20
WATCHED = {F.scaled_dot_product_attention, F.softmax, torch.softmax, torch.Tensor.softmax}


class Product(NamedTuple):
    """What one scaled dot product attention was called with: (..., N, d), (..., M, d), and a mask for (..., N, M)."""

    query: Tensor
    key: Tensor
    mask: Tensor | None

    def weights(self) -> Iterator[Tensor]:
        """Its weights (..., n, M), computed again in single precision at least, for some n of all N rows at a time.

        Not to be called under autocast, which would round them.
        """
        precise = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        N, d = self.query.shape[-2:]
        query, key = self.query.to(precise) * d**-0.5, self.key.to(precise).mT
        row = query[..., 0, 0].numel() * key.shape[-1] * precise.itemsize
        for part in image_slices(N, row, WEIGHTS_BYTES):
            logits = query[..., part, :] @ key
            if self.mask is not None:
                mask = self.mask if self.mask.shape[-2] == 1 else self.mask[..., part, :]
                logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
            yield logits.softmax(-1)


@dataclass
class Call:
    """One call of a watched module.

    Args:
        layer: Path of the module.
        module: The module.
        given: What `Calls.given` kept of its arguments.
        softmaxes: Results of the soft-maxes in it that were wanted, and
        products: of the fused attentions what they were called with, in order.
    """

    layer: str
    module: Any
    given: Any
    softmaxes: list[Tensor] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)


class Calls:
    """A context manager that fills `calls` while a model runs, in order of execution.

    Args:
        modules: Those to watch, by path.
        softmax: Keep results of soft-maxes of so many axes, over this axis from the end; None: of none.
        products: Keep what fused attentions are called with.
    """

    def __init__(
        self, modules: dict[str, nn.Module], *, softmax: tuple[int, int] | None = None, products: bool = False
    ):
        self.modules, self.softmax, self.products = modules, softmax, products
        self.calls: list[Call] = []
        self._handles: list[Any] = []

    def given(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """What to keep of a call's arguments."""
        return None

    def __enter__(self) -> Any:
        self.calls.clear()
        for name, module in self.modules.items():
            self._watch(name.replace("_orig_mod.", ""), module)
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, name: str, module: nn.Module) -> None:
        running: list[_Operations] = []

        def begins(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            call = Call(name, module, self.given(module, *args, **kwargs))
            self.calls.append(call)
            running.append(_Operations(call, self.softmax, self.products))
            running[-1].__enter__()

        def ends(module: nn.Module, inputs: tuple, output: Any) -> None:
            if running:
                running.pop().__exit__(None, None, None)

        for hook in (begins, ends):
            hook.__dict__["image_by_image"] = True
        # Whoever began last ends first.
        self._handles += [
            module.register_forward_pre_hook(begins, with_kwargs=True),
            module.register_forward_hook(ends, prepend=True, always_call=True),
        ]


class _Operations(TorchFunctionMode):
    """Keeps of the operations in one call what `Calls` wants."""

    def __init__(self, call: Call, softmax: tuple[int, int] | None, products: bool):
        super().__init__()
        self.call, self.softmax, self.products = call, softmax, products

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if func in WATCHED:
            self.keep(func, args, kwargs or {}, result)
        return result

    def keep(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Tensor) -> None:
        if func is F.scaled_dot_product_attention:
            if self.products:
                self.call.products.append(_product(*args, **kwargs))
        elif (result.ndim, _axis(*args, **kwargs) % result.ndim - result.ndim) == self.softmax:
            self.call.softmaxes.append(result.detach())


def _axis(input: Tensor, dim: int, *_: Any, **__: Any) -> int:
    return dim


def _product(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Product:
    return Product(query.detach(), key.detach(), attn_mask)


def modules_of(model: nn.Module, *kinds: type[nn.Module]) -> dict[str, nn.Module]:
    """All modules of some kinds, by path."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def shown(x: Tensor) -> Tensor:
    """A heat map (h, w) as a look keeps it."""
    return x.detach().float().cpu().contiguous()
