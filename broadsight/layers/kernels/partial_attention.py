"""Partial attention on the CPU: mixed heads innermost in memory, and a few high scores without a sort of all."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .slices import image_slices

QUERY_BYTES = 2 << 20  # of attention maps with mixed heads
VECTOR = 16  # heads that the processor takes at a time; fewer are slower innermost
LONG = 512  # scores, above which to sort them all takes longer


def is_on_cpu(layer: Any, queries: Tensor, *_: Tensor) -> bool:
    return queries.device.type == "cpu"


def mixed_heads(plain: Any, layer: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """In inference some queries at a time. (B, h, R, d), (B, h, d, F), (B, h, F, d) -> (B, h, R, d)."""
    B, h, R, _ = queries.shape
    attend = heads_last if len(layer.head_up) >= VECTOR else plain
    if torch.is_grad_enabled():  # every map is kept for the backward pass, and slices would save nothing
        return attend(layer, queries, keys, values)
    row = B * len(layer.head_up) * keys.shape[-1] * queries.element_size()
    parts = [attend(layer, queries[:, :, part], keys, values) for part in image_slices(R, row, QUERY_BYTES)]
    return torch.cat(parts, 2)


def heads_last(layer: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    # The mixings are products of rows then, and the soft-max runs over many heads at once: a row of keys is short.
    logits = F.linear((queries @ keys).permute(0, 2, 3, 1), layer.head_up * layer.scale)  # B R F e*h
    weights = F.linear(logits.softmax(2), layer.head_down)  # B R F h
    return weights.permute(0, 3, 1, 2) @ values


def is_long(scores: Tensor, n: int) -> bool:
    return scores.device.type == "cpu" and scores.dtype == torch.float32 and scores.shape[1] > LONG


def top_k(_: Any, scores: Tensor, n: int) -> Tensor:
    """Places of the n highest scores of each row, in order; of equals the lower place is first. (B, N) -> (B, n)."""
    bits = (scores + 0.0).view(torch.int32)  # whose order as integers is that of the scores; and -0.0 is 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    return (order | torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)).topk(n).indices
