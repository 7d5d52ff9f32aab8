"""Whether a fast form may run: the one rule, asked by all kernels and nowhere else.

A fast form gives what a layer's own forward gives, by other steps. It may run where both hold:

1. Operations run as they are called: nobody compiles, exports or transforms the function.
2. Every module that it bypasses, or shows only a part of the batch, is as it was built: of the very class that the
   layer gave it (not wrapped, adapted, quantised or parametrized), without a forward of its own, and without a hook.

Everywhere else the layer's own forward runs, which calls each submodule once with the whole batch. So hooks, LoRA and
quantisers work on every submodule; what they cost is the speed of the fast form.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module


def accelerated(fast: Callable[..., Any], suits: Callable[..., bool]) -> Callable[[Any], Any]:
    """Let a fast form stand in for the decorated function or method wherever the rule allows it.

    Args:
        fast: Called with the decorated function and its arguments; gives the same.
        suits: Called with the arguments: whether the fast form is meant for them, and the modules that it bypasses are
            `untouched`. Operations run as they are called then.
    """

    def decorate(plain: Any) -> Any:
        @wraps(plain)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            if runs_eagerly() and suits(*args, **kwargs):
                return fast(plain, *args, **kwargs)
            return plain(*args, **kwargs)

        return chosen

    return decorate


def runs_eagerly() -> bool:
    """Whether operations run as they are called: nobody compiles, exports or transforms the function."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def untouched(module: nn.Module, kind: type) -> bool:
    """Whether calling the module is nothing but its class's arithmetic: not replaced, wrapped or hooked."""
    return type(module) is kind and "forward" not in module.__dict__ and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Whether a hook waits for this very module, or for all modules, to be called."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )
