"""Attention written out, where torch's fused kernel is slow: in bfloat16 on the CPU."""

from typing import Any

import torch
from torch import Tensor

from .slices import image_slices

LOGITS = 512**2  # of one head; beyond, what the fused kernel does not keep is worth its time
MAP_BYTES = 4 << 20  # of attention maps at a time, in inference


def is_bfloat16_on_cpu(queries: Tensor, keys: Tensor, *_: Any) -> bool:
    few = not torch.is_grad_enabled() or queries.shape[-2] * keys.shape[-2] <= LOGITS
    return few and queries.dtype == torch.bfloat16 and queries.device.type == "cpu"


def written_out(_: Any, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    """In inference a few images at a time. (B, h, N, d), (B, h, M, d), (B, h, M, d) -> (B, h, N, d)."""
    queries = queries * queries.shape[-1] ** -0.5
    row = queries.shape[1] * queries.shape[2] * keys.shape[2] * queries.element_size()
    budget = row * len(queries) if torch.is_grad_enabled() else MAP_BYTES
    parts = []
    for part in image_slices(len(queries), row, budget):
        logits = queries[part] @ keys[part].mT
        parts.append((logits if bias is None else logits + bias).softmax(-1) @ values[part])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
