"""Attention with mixed heads, some queries at a time: whole, the maps of a large image would leave the cache."""

from typing import Any

import torch
from torch import Tensor

from .slices import image_slices

SLICE_BYTES = 2 << 20  # of mixed attention maps


def infers_on_cpu(layer: Any, queries: Tensor, *_: Tensor) -> bool:
    """In training every map is kept for the backward pass, and slices would save nothing."""
    return queries.device.type == "cpu" and not torch.is_grad_enabled()


def queries_in_slices(plain: Any, layer: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """(B, h, R, d), (B, h, d, F), (B, h, F, d) -> (B, h, R, d). Queries do not see each other."""
    B, h, R, _ = queries.shape
    row = B * layer.head_expansion * h * keys.shape[-1] * queries.element_size()
    parts = [plain(layer, queries[:, :, part], keys, values) for part in image_slices(R, row, SLICE_BYTES)]
    return torch.cat(parts, 2)
