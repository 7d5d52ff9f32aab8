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


def sees_whole_batch(module: nn.Module) -> bool:
    """Whether a hook waits for this very module that must see the batch as a whole, as all may but those marked."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if hooks and all(getattr(hook, "image_by_image", False) for hook in hooks):
        hooks = [*torch_module._global_forward_hooks, *torch_module._global_forward_pre_hooks]
        return bool(hooks or module._backward_hooks or module._backward_pre_hooks)
    return listened_to(module)


def untouched(module: nn.Module, kind: type) -> bool:
    """Whether calling the module is nothing but its class's arithmetic: not replaced, wrapped or hooked."""
    return type(module) is kind and "forward" not in module.__dict__ and not listened_to(module)
