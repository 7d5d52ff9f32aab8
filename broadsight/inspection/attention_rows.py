"""The rows of attention weights that a soft-max gives, computed again from what it was called with, a few at once."""

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


class Rows:
    """The rows of one soft-max, to be gone through while whoever is told of them is called, and not later.

    Iterating gives (images, queries, logits, weights, head_axis), a few rows at a time: slices of the first axis and of
    the last but one of the weights (B, ..., N, M), and what is there, (b, ..., n, M), in float32 or float64. The first
    axis has images, or windows of images where the model cuts them up.

    Args:
        shape: Of all weights, (B, ..., N, M): N queries and M keys.
        head_axis: Which of the axes has the heads; None if they are not apart.
        pieces: Computes the rows.
        written_out: Logits and weights of all rows, where the model has them as a whole.
    """

    def __init__(
        self,
        shape: torch.Size,
        head_axis: int | None,
        pieces: Callable[[], Iterator[Piece]],
        written_out: tuple[Tensor, Tensor] | None = None,
    ):
        self.shape, self.head_axis, self._pieces, self._written_out = shape, head_axis, pieces, written_out

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor, Tensor, int | None]]:
        for images, queries, logits, weights in self.pieces():
            yield images, queries, logits, logits.softmax(-1) if weights is None else weights, self.head_axis

    def pieces(self) -> Iterator[Piece]:
        """Like iterating, without the soft-max: weights are None unless the model made them itself.

        Logits that come without weights may be written to; others are the model's.
        """
        return self._pieces()

    def split(self, sizes: Sequence[int], head_axis: int) -> "Rows":
        """The same rows (B, N, M) as (B, *sizes, M), for a layer that has more than queries in their axis.

        Only where the model writes its weights out.
        """
        assert self._written_out is not None
        logits, weights = (x.unflatten(-2, tuple(sizes)) for x in self._written_out)
        return Rows(weights.shape, head_axis, lambda: pieces_of_softmax(weights, logits), (logits, weights))


def pieces_of_softmax(result: Tensor, input: Tensor, *_: Any, **__: Any) -> Iterator[Piece]:
    rounded = result.dtype not in (torch.float32, torch.float64)
    for images, queries in _parts(result.shape, 8 if result.dtype == torch.float64 else 4):
        logits = _precise(input[images, ..., queries, :])
        yield images, queries, logits, logits.softmax(-1) if rounded else result[images, ..., queries, :]


def rows_of_product(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[torch.Size, Callable[[], Iterator[Piece]]]:
    """Of torch's scaled dot product attention, with its arguments: (..., N, d), (..., M, d) -> rows of (..., N, M)."""
    groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1  # of heads of queries that share one of keys
    (N, d), M = query.shape[-2:], key.shape[-2]
    heads = key.shape[:-2] if groups == 1 else (*key.shape[:-3], query.shape[-3])
    lead = heads if heads == query.shape[:-2] else torch.broadcast_shapes(query.shape[:-2], heads)
    shape = torch.Size((*(lead or (1,)), N, M))

    def pieces() -> Iterator[Piece]:
        keys = key if groups == 1 else key.repeat_interleave(groups, -3)
        asked, keys = _precise(query).expand(*shape[:-1], d), _precise(keys).expand(*shape[:-2], M, d).mT
        mask = None if attn_mask is None else attn_mask.expand(shape)
        for images, queries in _parts(shape, asked.element_size()):
            scaled = asked[images, ..., queries, :] * (d**-0.5 if scale is None else scale)
            with torch.autocast(query.device.type, enabled=False):
                logits = scaled @ keys[images]
            if is_causal:
                places = torch.arange(N, device=query.device)[queries, None]
                logits.masked_fill_(torch.arange(M, device=query.device) > places, float("-inf"))
            if mask is not None:
                part = mask[images, ..., queries, :]
                logits = logits.masked_fill_(~part, float("-inf")) if part.dtype == torch.bool else logits.add_(part)
            yield images, queries, logits, None

    return shape, pieces


def rows_of_multi_head(given: Mapping[str, Any]) -> tuple[torch.Size, Callable[[], Iterator[Piece]]]:
    """Of the function behind nn.MultiheadAttention, with its arguments: (N, B, C), (M, B, C) -> of (B, heads, N, M)."""
    asking, asked = (x if x.ndim == 3 else x[:, None] for x in (given["query"], given["key"]))
    heads, images = given["num_heads"], asking.shape[1]
    more = (given["bias_k"] is not None) + bool(given["add_zero_attn"])  # keys that no token stands for
    shape = torch.Size((images, heads, len(asking), len(asked) + more))

    def pieces() -> Iterator[Piece]:
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
        return rows_of_product(query, key, attn_mask=_multi_head_mask(given, shape, more, query.dtype))[1]()

    return shape, pieces


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


def _parts(shape: torch.Size, bytes_per_weight: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the first axis and of the queries of weights (B, ..., N, M), each small enough to be computed aside."""
    most = WEIGHTS_BYTES // (3 * bytes_per_weight)  # logits, weights, and what is made of them
    query = max(1, math.prod(shape[1:-2]) * shape[-1])
    queries = min(max(1, most // query), shape[-2])
    images = max(1, most // (query * shape[-2])) if queries == shape[-2] else 1
    for i in range(0, shape[0], images):
        for j in range(0, shape[-2], queries):
            yield slice(i, i + images), slice(j, j + queries)


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
