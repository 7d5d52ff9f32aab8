"""Rows of attention weights, computed again from what a soft-max or fused attention was called with, a few at once."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Of logits, weights and what is made of them together that are there at once: more would not stay in a CPU's caches.
WEIGHTS_BYTES = 4 << 20

# Slices of the first axis and of the queries, and those rows' logits; and their weights where the model made them.
Piece = tuple[slice, slice, Tensor, Tensor | None]
ALL = slice(None)


class Rows:
    """The rows of attention weights that one soft-max gives, a few at a time.

    Read them at once: the model's next steps may overwrite what the rows are computed from.

    Args:
        shape: Of all weights, (B, ..., N, M): images or windows, N queries and M keys.
        pieces: Gives for a slice of the queries logits and weights (b, ..., n, M), in float32 or float64. Logits that
            come without weights may be written to; others are the model's.
        head_axis: Which of the axes has the heads; None if they are not apart.
        axis: Which axis of the model's tensor the soft-max is over, from the end; here it is always the last.
        written_out: Logits and weights of all rows, where the model has them as a whole.
    """

    def __init__(
        self,
        shape: torch.Size,
        pieces: Callable[..., Iterator[Piece]],
        *,
        head_axis: int | None = None,
        axis: int = -1,
        written_out: tuple[Tensor, Tensor] | None = None,
    ):
        self.shape, self.head_axis, self.axis = shape, head_axis, axis
        self.pieces, self._written_out = pieces, written_out

    def with_weights(self, queries: slice = ALL) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """The pieces, with weights in any case."""
        for images, part, logits, weights in self.pieces(queries):
            yield images, part, logits, logits.softmax(-1) if weights is None else weights

    def weights(self, queries: slice = ALL) -> Tensor:
        """All weights (B, ..., n, M) of some queries; for few of them."""
        start, stop, _ = queries.indices(self.shape[-2])
        whole: Any = None
        for images, part, _, weights in self.with_weights(queries):
            if whole is None:
                whole = weights.new_zeros(*self.shape[:-2], stop - start, self.shape[-1])
            whole[images, ..., part.start - start : part.stop - start, :] = weights
        return whole

    def received(self, queries: slice = ALL, counted: Tensor | None = None) -> Tensor:
        """What every key receives on average over some queries, (B, ..., M).

        Rows in which all is masked do not count, nor those that are not `counted` (B, ..., N).
        """
        shape = (*self.shape[:-2], self.shape[-1])
        total: Any = None
        for images, part, logits, weights in self.with_weights(queries):
            if total is None:
                total, count = weights.new_zeros(shape), weights.new_zeros(shape[:-1])
            used = torch.ones_like(weights[..., 0], dtype=torch.bool)
            if counted is not None:
                used &= counted[images, ..., part].to(used.device)
            if weights[..., 0].isnan().any():
                used &= ~logits.isneginf().all(-1)
            if not used.all():
                weights = weights.masked_fill(~used[..., None], 0)
            total[images] += weights.sum(-2)
            count[images] += used.sum(-1)
        return total / count.clamp(min=1)[..., None]

    def split(self, sizes: Sequence[int], head_axis: int) -> "Rows":
        """The same rows (B, N, M) as (B, *sizes, M), for a layer that has more than queries in their axis."""
        assert self._written_out is not None  # such a layer writes its weights out
        logits, weights = (x.unflatten(-2, tuple(sizes)) for x in self._written_out)
        return rows_of_softmax(logits, weights, head_axis=head_axis)


def rows_of_softmax(logits: Tensor, weights: Tensor, axis: int = -1, head_axis: int | None = None) -> Rows:
    """Rows of a soft-max over that axis, counted from the end, from what it got and gave."""
    logits, weights = logits.movedim(axis, -1), weights.movedim(axis, -1)
    rounded = weights.dtype not in (torch.float32, torch.float64)

    def pieces(queries: slice = ALL) -> Iterator[Piece]:
        for images, part in _parts(weights.shape, 8 if weights.dtype == torch.float64 else 4, queries):
            given = _precise(logits[images, ..., part, :])
            yield images, part, given, given.softmax(-1) if rounded else weights[images, ..., part, :]

    return Rows(weights.shape, pieces, head_axis=head_axis, axis=axis, written_out=(logits, weights))


def rows_of_product(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Rows:
    """Of torch's scaled dot product attention, with its arguments: (..., N, d), (..., M, d) -> rows of (..., N, M)."""
    groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1  # of heads of queries that share one of keys
    (N, d), M = query.shape[-2:], key.shape[-2]
    heads = key.shape[:-2] if groups == 1 else (*key.shape[:-3], query.shape[-3])
    lead = heads if heads == query.shape[:-2] else torch.broadcast_shapes(query.shape[:-2], heads)
    shape = torch.Size((*(lead or (1,)), N, M))
    query, key = query.detach(), key.detach()

    def pieces(queries: slice = ALL) -> Iterator[Piece]:
        keys = key if groups == 1 else key.repeat_interleave(groups, -3)
        asked, keys = _precise(query).expand(*shape[:-1], d), _precise(keys).expand(*shape[:-2], M, d).mT
        mask = None if attn_mask is None else attn_mask.expand(shape)
        for images, part in _parts(shape, asked.element_size(), queries):
            scaled = asked[images, ..., part, :] * (d**-0.5 if scale is None else scale)
            with torch.autocast(query.device.type, enabled=False):
                logits = scaled @ keys[images]
            if is_causal:
                places = torch.arange(N, device=query.device)[part, None]
                logits.masked_fill_(torch.arange(M, device=query.device) > places, float("-inf"))
            if mask is not None:
                bias = mask[images, ..., part, :]
                logits = logits.masked_fill_(~bias, float("-inf")) if bias.dtype == torch.bool else logits.add_(bias)
            yield images, part, logits, None

    return Rows(shape, pieces)


def rows_of_multi_head(given: Mapping[str, Any]) -> Rows:
    """Of the function behind nn.MultiheadAttention, with its arguments: (N, B, C), (M, B, C) -> of (B, heads, N, M)."""
    asking, asked = (x if x.ndim == 3 else x[:, None] for x in (given["query"], given["key"]))
    heads, images = given["num_heads"], asking.shape[1]
    more = (given["bias_k"] is not None) + bool(given["add_zero_attn"])  # keys that no token stands for
    shape = torch.Size((images, heads, len(asking), len(asked) + more))

    def pieces(queries: slice = ALL) -> Iterator[Piece]:
        if given.get("use_separate_proj_weight"):
            weights = given["q_proj_weight"], given["k_proj_weight"]
        else:
            weights = given["in_proj_weight"].chunk(3)[:2]
        biases = (None, None) if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)[:2]
        query, key = (F.linear(*layer) for layer in zip((asking, asked), weights, biases, strict=True))
        if given["bias_k"] is not None:
            key = torch.cat([key, given["bias_k"].to(key.dtype).expand(1, images, -1)])
        if given["add_zero_attn"]:
            key = F.pad(key, (0, 0, 0, 0, 0, 1))
        query, key = (x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for x in (query, key))
        mask = _multi_head_mask(given, shape, more, query.dtype)
        return rows_of_product(query, key, attn_mask=mask).pieces(queries)

    return Rows(shape, pieces)


def _multi_head_mask(given: Mapping[str, Any], shape: torch.Size, more: int, dtype: torch.dtype) -> Tensor | None:
    """The masks of torch's multi-head attention as one that is added to logits of the shape (B, heads, N, M)."""
    mask: Tensor | None = None
    for name in ("attn_mask", "key_padding_mask"):
        one = given.get(name)
        if one is None:
            continue
        if one.dtype == torch.bool:  # here, true is what is hidden
            one = torch.zeros_like(one, dtype=dtype).masked_fill_(one, float("-inf"))
        if name == "key_padding_mask":
            one = one.view(shape[0], 1, 1, -1)
        elif one.ndim == 3:
            one = one.unflatten(0, tuple(shape[:2]))
        one = F.pad(one, (0, more))
        mask = one if mask is None else mask + one
    return mask


def _parts(shape: torch.Size, bytes_per_weight: int, queries: slice = ALL) -> Iterator[tuple[slice, slice]]:
    """Slices of the first axis and of the queries of weights (B, ..., N, M), each small enough to be computed aside."""
    start, stop, _ = queries.indices(shape[-2])
    most = WEIGHTS_BYTES // (3 * bytes_per_weight)  # logits, weights, and what is made of them
    query = max(1, math.prod(shape[1:-2]) * shape[-1])
    step = min(max(1, most // query), max(1, stop - start))
    images = max(1, most // (query * step)) if step >= stop - start else 1
    for i in range(0, shape[0], images):
        for j in range(start, stop, step):
            yield slice(i, i + images), slice(j, min(j + step, stop))


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
