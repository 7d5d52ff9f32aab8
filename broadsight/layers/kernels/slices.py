"""A batch a few images at a time, so that what is worked on stays in the processor's cache."""

import math

import torch
from torch import Tensor, nn

from .dispatch import hooked, runs_eagerly

STAGE_BYTES = 7 << 18  # of one slice of a batch, measured at the input of a stage


def image_slices(batch: int, bytes_per_image: int, budget: int) -> list[slice]:
    """Consecutive slices of as many images as fit into the budget, one at least."""
    step = max(1, budget // bytes_per_image)
    return [slice(i, min(i + step, batch)) for i in range(0, batch, step)]


def in_slices(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), in inference on the CPU a few images at a time.

    Large maps fall out of the cache between two layers, and the allocator hands their pages back to the system and asks
    for them again, a page fault each. Images do not see each other in inference, so the result is the same.
    """
    if (
        type(x) is not Tensor  # a tracer's stand-in
        or torch.is_grad_enabled()
        or x.device.type != "cpu"
        or not runs_eagerly()
    ):
        return module(x)
    count = math.ceil(x.numel() * x.element_size() / STAGE_BYTES)
    if count < 2 or any(m.training or hooked(m) for m in module.modules()):
        return module(x)
    return torch.cat([module(part) for part in x.tensor_split(min(count, len(x)))])
