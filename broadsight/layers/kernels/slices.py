"""A few images, or a few queries, at a time, so that what is worked on stays in the processor's cache."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .dispatch import hooked, runs_eagerly, sees_whole_batches

STAGE_BYTES = 7 << 18  # of one slice of a batch, measured at the input of a stage
QUERY_BYTES = 2 << 20  # of attention maps with mixed heads


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


def infers_on_cpu(layer: Any, queries: Tensor, *_: Tensor) -> bool:
    # In training every map is kept for the backward pass, and slices would save nothing.
    return queries.device.type == "cpu" and not torch.is_grad_enabled()


def queries_in_slices(plain: Any, layer: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention with mixed heads, some queries at a time. (B, h, R, d), (B, h, d, F), (B, h, F, d) -> (B, h, R, d)."""
    B, h, R, _ = queries.shape
    row = B * layer.head_expansion * h * keys.shape[-1] * queries.element_size()
    parts = [plain(layer, queries[:, :, part], keys, values) for part in image_slices(R, row, QUERY_BYTES)]
    return torch.cat(parts, 2)
