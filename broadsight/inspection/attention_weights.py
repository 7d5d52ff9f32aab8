"""The attention weights of a model while it runs as it is, with fused attention too.

What its attentions are called with is watched, and their weights are computed a second time, a few rows at once: there
is never a whole matrix of them beside what the model computes itself, and what comes out of it is untouched.
"""

import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .attention_rows import Rows, pieces_of_softmax, rows_of_multi_head, rows_of_product
from .branch_structure import QUERIES, is_attention
from .passing import Seen, check_model, pass_images, uncompiled

# Names of the children by which a block is known that attends by itself, without a module for it.
ATTENDING_BLOCKS = (("in_proj", "attn_out_proj"), ("local_in", "global_in"))
SOFTMAXES = (torch.softmax, torch.Tensor.softmax, torch.special.softmax, F.softmax)
_multi_head = inspect.signature(F.multi_head_attention_forward)

# Told the layer's name, the rows of its soft-max, and the module that it is computed in.
See = Callable[[str, Rows, nn.Module], None]


@contextmanager
def watch_attention(
    model: nn.Module, see: See, wanted: Callable[[str], bool] | None = None
) -> Generator[None, None, None]:
    """While this is open, every soft-max over attention weights in the model is shown to `see`.

    The weights are those that the soft-max gives: before dropout, and before what some models do to them afterwards.
    Only soft-maxes over the last axis count. A layer with several of them in one call is told of as "name", "name#2"
    and so on. Nothing is computed for layers whose rows are not gone through.

    Args:
        model: Any model with attention. Nothing can be watched in what a compiler made of it.
        see: Called with the layer's name, its rows and the attention module, in the order of execution.
        wanted: Given a layer's name, says whether `see` wants to be told of it.

    Raises:
        ValueError: The model has no module that looks like an attention.
    """
    names = {module: layer_name(name) for module, name in find_attention(model).items()}
    if not names:
        raise ValueError(no_attention(model))
    watch = _Watch(names, see, wanted)
    handles = watch.listen()
    try:
        with watch:
            yield
    finally:
        for handle in handles:
            handle.remove()


def pass_attention(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    see: See,
    *,
    batch_size: int,
    seen: Seen | None = None,
) -> None:
    """Run a model on all images, as `pass_images` does, and show its soft-maxes to `see`.

    Raises:
        ValueError: It has no attention, or there are no images, or they have no such form.
    """
    check_model(model)
    inner, compiled = uncompiled(model)
    found: set[str] = set()

    def noting(name: str, rows: Rows, module: nn.Module) -> None:
        found.add(name)
        see(name, rows, module)

    # Nothing can be watched in what a compiler made of a model.
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext(), watch_attention(inner, noting):
        pass_images(inner, images, batch_size=batch_size, seen=seen)
    if not found:
        raise ValueError(no_attention(inner))


def find_attention(model: nn.Module) -> dict[nn.Module, str]:
    """The modules that look like an attention, and where they are in the model."""
    return {module: name for name, module in model.named_modules() if _attends(module)}


def layer_name(name: str) -> str:
    """What the module of that name is called in results."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod") or "attention"


def no_attention(model: nn.Module) -> str:
    """What to say of a model in which no attention weights were found."""
    return (
        f"{type(model).__name__} has no attention weights; looked for a soft-max over the last axis, or "
        f"scaled_dot_product_attention, in modules that hold one of {', '.join(QUERIES)}; pass a vision transformer or "
        "a hybrid, such as vit_small_patch16_224, swin_tiny_patch4_window7_224 or stvit_small"
    )


def _attends(module: nn.Module) -> bool:
    if not module._modules:  # most of a model's modules are leaves
        return False
    return is_attention(module) or any(all(name in module._modules for name in names) for names in ATTENDING_BLOCKS)


class _Watch(TorchFunctionMode):
    """Finds the soft-maxes while an attention runs.

    Args:
        names: Of the modules in which a soft-max is one of attention weights.
        see, wanted: As of `watch_attention`.
    """

    def __init__(self, names: dict[nn.Module, str], see: See, wanted: Callable[[str], bool] | None):
        super().__init__()
        self.names, self.see, self.wanted = names, see, wanted
        self.running: list[nn.Module] = []  # outermost first, whose name counts
        self.found = 0  # soft-maxes in the present call of that

    def listen(self) -> list[Any]:
        def begins(module: nn.Module, inputs: tuple) -> None:
            self.found = self.found if self.running else 0
            self.running.append(module)

        def ends(module: nn.Module, inputs: tuple, output: Any) -> None:
            self.running.pop()

        for hook in (begins, ends):
            hook.__dict__["image_by_image"] = True
        handles: list[Any] = [module.register_forward_pre_hook(begins) for module in self.names]
        return handles + [module.register_forward_hook(ends, always_call=True) for module in self.names]

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.running:
            return result
        written_out = None
        if func is F.scaled_dot_product_attention:
            shape, pieces = rows_of_product(*args, **kwargs)
        elif func is F.multi_head_attention_forward:  # torch shows the whole, and nothing of what is inside
            shape, pieces = rows_of_multi_head(_multi_head.bind(*args, **kwargs).arguments)
        elif func in SOFTMAXES and _over_last_axis(*args, **kwargs):
            written_out = (args[0] if args else kwargs["input"]), result
            shape, pieces = result.shape, lambda: pieces_of_softmax(result, *args, **kwargs)
        else:
            return result
        self.found += 1
        name = self.names[self.running[0]] + (f"#{self.found}" if self.found > 1 else "")
        if self.wanted is None or self.wanted(name):
            with torch._C.DisableTorchFunction():  # others who watch should not see what is computed for us
                module = self.running[-1]
                self.see(name, Rows(shape, _head_axis(shape, module), pieces, written_out), module)
        return result


def _head_axis(shape: torch.Size, module: Any) -> int | None:
    """Where the heads are among the axes of weights (..., N, M), or None if they are not apart."""
    recorded = next((x for x in (getattr(module, name, None) for name in ("num_heads", "heads")) if x), None)
    if len(shape) == 4 and not isinstance(recorded, int):
        return 1
    if len(shape) < 4 or not isinstance(recorded, int):
        return None
    heads = recorded * getattr(module, "head_expansion", 1)
    return next((axis for axis in (1, len(shape) - 3) if shape[axis] == heads), None)


def _over_last_axis(input: Tensor, dim: Any = None, *_: Any, **__: Any) -> bool:
    return input.ndim > 2 and input.is_floating_point() and dim in (-1, input.ndim - 1)
