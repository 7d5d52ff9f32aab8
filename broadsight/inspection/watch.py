"""Watches a model while it runs as it is: by hooks on its modules, and by the torch functions that it calls."""

from collections.abc import Callable, Container, Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class FunctionWatch(TorchFunctionMode):
    """Shows torch functions that are called while this is open to `called`, and changes nothing.

    What `called` computes is without gradients, and hidden from others who watch.
    """

    functions: Container[Callable] | None = None  # those to show; all if None

    def called(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        raise NotImplementedError

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.functions is not None and func not in self.functions:
            return result
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self.called(func, args, kwargs, result)
        return result


def uncompiled(model: nn.Module) -> Any:
    """The model itself, without the compiler that may wrap it; to be run under `eager`."""
    inner: Any = model
    while "_orig_mod" in inner._modules:
        inner = inner._orig_mod
    return inner


@contextmanager
def eager(model: nn.Module) -> Generator[None, None, None]:
    """Run a model without what a compiler made of it or of a part of it, in which nothing can be watched."""
    compiled = any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield


@contextmanager
def hooked(
    modules: Iterable[nn.Module],
    *,
    before: Callable[[nn.Module, tuple, dict], None] | None = None,
    after: Callable[[nn.Module, tuple, Any], None] | None = None,
    always: bool = False,
) -> Generator[None, None, None]:
    """Put forward hooks on some modules for as long as this is open.

    Args:
        before: Called before a module runs, with its arguments.
        after: Called with what a module gave.
        always: Whether `after` is called after an error too, with None.
    """
    handles: list[Any] = []
    try:
        for module in modules:
            if before is not None:
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            if after is not None:
                handles.append(module.register_forward_hook(after, always_call=always))
        yield
    finally:
        for handle in handles:
            handle.remove()
