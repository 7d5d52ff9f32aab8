"""What exported programs are built of computes what eager layers do."""

import pytest
import torch
import torch.nn.functional as F

from broadsight.layers.exported import attention, exporting, rank_foreground, split_heads
from broadsight.layers.super_token_exported import fold_index, gather_neighbours, neighbour_index


@pytest.mark.parametrize("values", [2, 3, 1000])
@pytest.mark.parametrize("n", [1, 5, 16])
def test_rank_foreground__is_a_stable_sort(values, n):
    scores = torch.randint(values, (4, 16), generator=torch.Generator().manual_seed(n)).float()  # with many ties
    index, rank = rank_foreground(scores, n)
    expected = scores.argsort(dim=1, descending=True, stable=True)[:, :n].sort(1).values
    assert torch.equal(index, expected)
    slow = torch.zeros(4, 16, dtype=torch.long)
    for row, places in enumerate(expected.tolist()):
        for number, place in enumerate(places):
            slow[row, place] = number + 1
    assert torch.equal(rank, slow)


def test_rank_foreground__infinity_comes_first():
    scores = torch.tensor([[float("inf"), 3.0, 1.0, 3.0]])
    index, rank = rank_foreground(scores, 2)
    assert index.tolist() == [[0, 1]] and rank.tolist() == [[1, 2, 0, 0]]


@pytest.mark.parametrize("hidden", [False, True])
def test_attention__is_scaled_dot_product_attention(hidden):
    torch.manual_seed(0)
    q, k, v = split_heads(torch.randn(2, 7, 3 * 12, dtype=torch.float64), 3, 4)
    mask = torch.zeros(2, 1, 1, 7, dtype=torch.float64)
    mask[1, ..., 4:] = float("-inf")
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask if hidden else None)
    torch.testing.assert_close(attention(q, k, v, mask if hidden else None), expected)


def test_split_heads__by_kind_then_head():
    x = torch.arange(12.0).view(1, 1, 12)
    q, k = split_heads(x, 2, 3)
    assert q.flatten().tolist() == [0, 1, 2, 3, 4, 5] and k.shape == (1, 3, 1, 2)
    assert k[0, 2, 0].tolist() == [10, 11]


def test_neighbours__are_those_of_unfold():
    x = torch.randn(2, 3, 4, 5)  # B p q C
    nine = gather_neighbours(x, neighbour_index(3, 4, x.device)).view(2, 12, 9, 5)
    expected = F.unfold(x.permute(0, 3, 1, 2), 3, padding=1).view(2, 5, 9, 12).permute(0, 3, 2, 1)
    assert torch.equal(nine, expected)


def test_fold_index__collects_what_neighbours_hold():
    p, q, C = 3, 4, 2
    held = torch.randn(1, p, q, 9, C)  # every cell's part of each of its nine tokens
    around = neighbour_index(p, q, held.device)
    padded = F.pad(held.flatten(3), [0, 0, 1, 1, 1, 1]).view(1, (p + 2) * (q + 2) * 9, C)
    got = padded.index_select(1, fold_index(around)).view(1, p, q, 9, C).sum(3)
    expected = torch.zeros(1, p + 2, q + 2, C)
    for place in range(9):
        rows, columns = divmod(place, 3)
        expected[:, rows : rows + p, columns : columns + q] += held[:, :, :, place]
    torch.testing.assert_close(got, expected[:, 1:-1, 1:-1])


def test_exporting__only_while_somebody_exports():
    seen = []

    class Watched(torch.nn.Module):
        def forward(self, x):
            seen.append(exporting())
            return x + 1

    Watched()(torch.zeros(1))
    torch.export.export(Watched(), (torch.zeros(1),))
    assert seen[0] is False and seen[-1] is True and not exporting()
