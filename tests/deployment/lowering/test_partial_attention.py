import pytest
import torch

from broadsight.deployment.lowering.partial_attention import rank_foreground


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
    index, rank = rank_foreground(torch.tensor([[float("inf"), 3.0, 1.0, 3.0]]), 2)
    assert index.tolist() == [[0, 1]] and rank.tolist() == [[1, 2, 0, 0]]
