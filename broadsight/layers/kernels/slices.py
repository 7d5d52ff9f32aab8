"""A few images at a time, so that what is worked on stays in the processor's cache."""

import math

import torch
from torch import Tensor, nn

from .dispatch import hooked, runs_eagerly, sees_whole_batches

STAGE_BYTES = 7 << 18  # of one slice of a batch, measured at the input of a stage


def image_slices(batch: int, bytes_per_image: int, budget: int) -> list[slice]:
    """Consecutive slices of as many images as fit into the budget, one at least."""
    step = max(1, budget // bytes_per_image)
    return [slice(i, min(i + step, batch)) for i in range(0, batch, step)]


def in_slices(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), in inference on the CPU a few images at a time: large maps would fall out of the cache in between."""
    # What is no plain tensor is a tracer's stand-in.
    if type(x) is not Tensor or torch.is_grad_enabled() or x.device.type != "cpu" or not runs_eagerly():
        return module(x)
    count = math.ceil(x.numel() * x.element_size() / STAGE_BYTES)
    if count < 2 or any(m.training or (hooked(m) and sees_whole_batches(m)) for m in module.modules()):
        return module(x)
    return torch.cat([module(part) for part in x.tensor_split(min(count, len(x)))])
