import pytest
import torch

from broadsight.deployment.lowering.partial_attention import choose_foreground


@pytest.mark.parametrize("values", [2, 3, 1000])
@pytest.mark.parametrize("n", [1, 5, 16])
def test_choose_foreground__is_a_stable_sort(values, n):
    scores = torch.randint(values, (4, 16), generator=torch.Generator().manual_seed(n)).float()  # with many ties
    index, chosen = choose_foreground(scores, n)
    expected = scores.argsort(dim=1, descending=True, stable=True)[:, :n].sort(1).values
    assert torch.equal(index.sort(1).values, expected)
    assert torch.equal(chosen, torch.zeros(4, 16, dtype=torch.bool).scatter(1, expected, True))
    index, chosen = choose_foreground(torch.tensor([[float("inf"), 3.0, 1.0, 3.0]]), 2)
    assert index.tolist() == [[0, 1]] and chosen.tolist() == [[True, True, False, False]]


def test_choose_foreground__is_exact_in_half_precision():
    scores = torch.zeros(1, 3136, dtype=torch.bfloat16)  # all equal, more places than it has whole numbers
    index, chosen = choose_foreground(scores, 39)
    assert sorted(index[0].tolist()) == list(range(39)) and chosen.sum() == 39
