"""Watches a model while it runs as it is: its modules by forward hooks, and the torch functions that they call."""

from collections.abc import Callable, Container, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .passing import check_model


@dataclass(eq=False)
class Call:
    """One call of a watched module: its name, as given to the watch, and the arguments."""

    name: str
    module: nn.Module
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class FunctionWatch(TorchFunctionMode):
    """Shows the torch functions called, and which of the modules named run; hidden from others, without gradients."""

    functions: Container[Callable] | None = None  # those to show; all if None

    def __init__(self, names: Mapping[nn.Module, str]):
        super().__init__()
        self.names = names
        self.running: list[Call] = []  # outermost first
        self._hooks = ExitStack()

    def called(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """A function was called."""

    def begins(self, call: Call) -> None:
        """A watched module is called."""

    def ends(self, call: Call, output: Any) -> None:
        """It returned its output, or None after an error."""

    def __enter__(self) -> Any:
        self._hooks.enter_context(hooked(self.names, before=self._enters, after=self._leaves, always=True))
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._hooks.close()

    def _enters(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.running.append(Call(self.names[module], module, args, kwargs))
        self.begins(self.running[-1])

    def _leaves(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self.running and self.running[-1].module is module:  # else an error came before it was entered
            self.ends(self.running.pop(), output)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.functions is None or func in self.functions:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self.called(func, args, kwargs, result)
        return result


def uncompiled(model: nn.Module) -> Any:
    """The model itself, without the compiler that may wrap it, to be run under `eager`; a ValueError if it is none."""
    check_model(model)
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
    """Call functions before some modules run and after, with what they gave; with None after an error if `always`."""
    with ExitStack() as hooks:
        for module in modules:
            if before is not None:
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            if after is not None:
                hooks.callback(module.register_forward_hook(after, always_call=always).remove)
        yield
