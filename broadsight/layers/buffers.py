"""Buffers that no state dict holds, computed again after loading, by timm's contract of `init_non_persistent_buffers`.

timm and Hugging Face's transformers build on the meta device, take memory without content, and then load the weights.
"""

from typing import Any

import torch
from torch import nn


def restore_buffers(model: nn.Module, *_: Any) -> None:
    """Compute all buffers of a model that its state dict leaves out; also a hook for after `load_state_dict`."""
    with torch.no_grad():
        for module in model.modules():
            restore: Any = getattr(module, "init_non_persistent_buffers", None)
            if restore is not None:
                restore()


def restore_on_load(model: nn.Module) -> None:
    """Let `model.load_state_dict` restore these buffers by itself, for those who do not know of timm's contract."""
    needed = any(hasattr(module, "init_non_persistent_buffers") for module in model.modules())
    if needed and restore_buffers not in model._load_state_dict_post_hooks.values():
        model.register_load_state_dict_post_hook(restore_buffers)
