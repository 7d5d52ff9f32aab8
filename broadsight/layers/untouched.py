"""Whether a module may be computed from its weights, or somebody expects it to be called."""

from torch import nn
from torch.nn.modules import module as torch_module


def listened_to(module: nn.Module) -> bool:
    """Whether a hook waits for this very module to be called."""
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


def untouched(module: nn.Module, kind: type) -> bool:
    """Whether calling the module is nothing but its class's arithmetic: not replaced, wrapped or hooked."""
    return type(module) is kind and "forward" not in module.__dict__ and not listened_to(module)
