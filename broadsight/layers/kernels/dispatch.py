"""Whether a fast form may run: the one rule, asked by all kernels and nowhere else.

A fast form gives what a layer's own forward gives, by other steps. It may run where both hold:

1. Operations run as they are called: nobody compiles, exports or transforms the function.
2. Every module that it bypasses, or shows only a part of the batch, is as it was built: of the very class that the
   layer gave it (not wrapped, adapted, quantised or parametrized), without a forward of its own, and without a hook.
   Hooks that are declared to treat each image by itself (`per_image`) may see a part of the batch.

Everywhere else the layer's own forward runs: hooks, LoRA and quantisers work on every submodule, at its speed.
"""

from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

PER_IMAGE: list[Any] = []


def accelerated(fast: Callable[..., Any], suits: Callable[..., bool], hides: bool = False) -> Callable[[Any], Any]:
    """Let fast(decorated, *arguments) stand in for the decorated function or method wherever the rule allows it.

    suits(*arguments) says whether it is meant for them, and the modules that it bypasses are `untouched`. If it `hides`
    functions that are watched, such as attention, the decorated one runs too where somebody watches, to be seen.
    """

    def decorate(plain: Any) -> Any:
        @wraps(plain)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            if not (runs_eagerly() and suits(*args, **kwargs)):
                return plain(*args, **kwargs)
            if not (hides and watched()):
                return fast(plain, *args, **kwargs)
            with torch.no_grad():
                plain(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                return fast(plain, *args, **kwargs)

        return chosen

    return decorate


def per_image(hook: Any) -> Any:
    """Declare a hook function, or a class of hooks, that does the same to an image whatever else is in the batch."""
    PER_IMAGE.append(hook)
    return hook


def runs_eagerly() -> bool:
    """Whether operations run as they are called: nobody compiles, exports or transforms the function."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def watched() -> bool:
    """Whether somebody sees the functions that are called. A default device is a mode too, but looks at nothing."""
    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def untouched(module: nn.Module, kind: type) -> bool:
    """Whether calling the module is nothing but its class's arithmetic: not replaced, wrapped or hooked."""
    return type(module) is kind and "forward" not in module.__dict__ and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Whether a hook waits for this very module, or for all modules, to be called."""
    return any(_hooks(module))


def sees_whole_batches(module: nn.Module) -> bool:
    """Whether one of the hooks expects the whole batch."""
    found = chain(*(hooks.values() for hooks in _hooks(module)))
    return not all(any(hook is known or type(hook) is known for known in PER_IMAGE) for hook in found)


def _hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    forward = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    return *own, *forward, torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks
