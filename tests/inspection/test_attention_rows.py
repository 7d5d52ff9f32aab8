"""Rows of attention weights: whole, in parts, and what is made of them."""

import math

import pytest
import torch
from torch import Tensor

from broadsight.inspection import attention_rows
from broadsight.inspection.attention_rows import Rows, rows_of_product, rows_of_softmax


def by_hand(x: Tensor) -> Tensor:
    return (x * 8**-0.5 @ x.mT).softmax(-1)


def written_out(x: Tensor) -> Rows:
    logits = x * 8**-0.5 @ x.mT
    return rows_of_softmax(logits, logits.softmax(-1))


@pytest.mark.parametrize("limit", [1 << 20, 1], ids=["at once", "row by row"])
@pytest.mark.parametrize("rows_of", [lambda x: rows_of_product(x, x, x), written_out], ids=["fused", "written out"])
def test_rows__are_the_weights(rows_of, limit, monkeypatch):
    monkeypatch.setattr(attention_rows, "WEIGHTS_BYTES", limit)
    x = torch.randn(3, 2, 5, 8)
    rows, whole, found = rows_of(x), by_hand(x), torch.full((3, 2, 5, 5), torch.nan)
    assert rows.shape == found.shape and rows.axis == -1
    for images, queries, logits, weights in rows.with_weights():
        assert torch.allclose(logits.softmax(-1), weights)
        found[images, ..., queries, :] = weights
    counted = torch.rand(3, 2, 5, 1) < 0.5
    counted[..., 2, :] = True
    for got, expected in (
        (found, whole),
        (rows.weights(), whole),
        (rows.weights(slice(1, 3)), whole[..., 1:3, :]),
        (rows.received(), whole.mean(-2)),
        (rows.received(slice(2, 5)), whole[..., 2:, :].mean(-2)),
        (rows.received(counted=counted[..., 0]), (whole * counted).sum(-2) / counted.sum(-2)),
    ):
        assert torch.allclose(got, expected, atol=1e-6)


def test_rows__over_another_axis_split_and_less_those_masked_as_a_whole():
    x = torch.randn(3, 6, 5)
    rows = rows_of_softmax(x, x.softmax(1), -2)
    assert rows.axis == -2 and torch.equal(rows.weights(), x.softmax(1).mT)
    rows = rows_of_softmax(x, x.softmax(-1)).split((2, -1), 1)
    assert rows.head_axis == 1 and torch.equal(rows.weights(), x.softmax(-1).view(3, 2, 3, 5))
    x, mask = torch.randn(2, 3, 5, 8), torch.ones(5, 5, dtype=torch.bool)
    mask[1] = False
    expected = by_hand(x)[..., [0, 2, 3, 4], :].mean(-2)
    assert torch.allclose(rows_of_product(x, x, x, mask).received(), expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 6, 197, 197), (2, 12, 3136, 3136), (7, 9, 9), (1, 1, 1, 1), (3, 2, 5, 100_000)])
def test_parts__cover_all_rows_and_stay_small(shape):
    rows = torch.zeros(shape[0], shape[-2], dtype=torch.int)
    for images, queries in attention_rows._parts(torch.Size(shape), 4):
        rows[images, queries] += 1
        taken = rows[images, queries].numel() * math.prod(shape[1:-2]) * shape[-1]
        assert 3 * 4 * taken <= attention_rows.WEIGHTS_BYTES <= 64 << 20
    assert (rows == 1).all()
