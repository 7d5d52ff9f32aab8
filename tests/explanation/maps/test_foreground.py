"""Looks at partial attention against scores set by hand and attention written from the equations."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from broadsight.explanation.maps.foreground import ForegroundLooks
from broadsight.layers import PartialAttention
from tests.compare import randomize
from tests.explanation.maps import collected
from tests.zoo import shallow


class Block(nn.Module):
    """Partial attention with given scores at several depths. (B, H, W, C) -> (B, H, W, C)"""

    def __init__(self, attn: PartialAttention, scores: Tensor):
        super().__init__()
        self.attn, self.scores = attn, scores

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x.flatten(1, 2), self.scores.flatten(1)).view(x.shape)


looks_of = partial(collected.looks_of, ForegroundLooks)


def test_looks__of_scores_set_by_hand():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            fine = torch.tensor([[[9.0, 0.0, 7.0, 0.0], [0.0, 7.0, 0.0, 7.0]]])  # of equals, the first in the raster
            self.first = Block(PartialAttention(4, 2, (3, 8)), fine)
            self.second = Block(PartialAttention(4, 2, (1, 0)), torch.tensor([[[0.0, 1.0]]]))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.avg_pool2d(self.first(x).permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1))

    found = looks_of(Model(), torch.randn(1, 2, 4, 4))
    titles = [look.title for look in found if look.depth == 1]
    assert titles == ["foreground", "history up to layer 2", "background query"]
    by = {(look.title, look.depth): look for look in found}
    assert by["foreground", 0].values.tolist() == [[True, False, True, False], [False, True, False, False]]
    assert by["foreground", 1].values.tolist() == [[False, True]]
    assert by["history up to layer 1", 0].values.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0]]
    assert by["history up to layer 2", 1].values.tolist() == [[0.5, 0, 1, 0.5], [0, 0.5, 0.5, 0.5]]
    assert by["background query", 1].values.tolist() == [[1.0, 0.0]]  # there is but one
    assert [by["foreground", i].layer for i in (0, 1)] == ["first.attn", "second.attn"]
    assert by["foreground", 0].form == "mask" and by["foreground", 0].note.startswith("3 of 8 places")


def test_looks__background_query_agrees_with_the_equations():
    torch.manual_seed(0)
    attn = randomize(PartialAttention(6, 2, (2, 6), head_expansion=2).double())
    scores = torch.randn(1, 2, 3, dtype=torch.float64)
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64)
    (look,) = [look for look in looks_of(Block(attn, scores), x) if look.title == "background query"]
    rows = x[0].view(6, 6)
    order = scores.flatten().argsort(descending=True)
    queried = torch.cat([attn.token[0], rows[order[:2]]])  # abstract token and foreground
    bias = torch.cat([attn.q_bias, torch.zeros(6, dtype=torch.float64), attn.v_bias])
    q, k, v = (part.unflatten(-1, (2, 3)) for part in F.linear(queried, attn.qkv.weight, bias).chunk(3, -1))
    maps = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(3)
    maps = torch.einsum("eh,hqk->eqk", attn.head_up, maps).softmax(-1)
    maps = torch.einsum("he,eqk->hqk", attn.head_down, maps)
    query = attn.proj(torch.einsum("hqk,khd->qhd", maps, v).reshape(3, 6))[0].view(2, 3)
    keys = F.linear(rows[order[2:]], attn.qkv.weight[6:12]).unflatten(-1, (2, 3))
    expected = torch.zeros(6, dtype=torch.float64)
    expected[order[2:]] = (torch.einsum("hd,khd->hk", query, keys) / math.sqrt(3)).softmax(-1).mean(0)
    torch.testing.assert_close(look.values, expected.view(2, 3).float())


def test_looks__all_foreground_and_no_map_around():
    attn = PartialAttention(4, 2, (1, 1), background_required=False)
    found = looks_of(attn, torch.randn(1, 12, 4), torch.randn(1, 12), size=(30, 42))
    assert [look.title for look in found] == ["foreground", "history up to layer 1"]
    assert found[0].values.shape == (3, 4) and bool(found[0].values.all())


def test_looks__of_a_model_of_odd_size():
    model = shallow("partialformer_b0").eval()
    assert ForegroundLooks.suits(model) and not ForegroundLooks.suits(nn.Conv2d(3, 3, 1))
    found = looks_of(model, torch.randn(1, 3, 52, 76))
    masks = [look.values for look in found if look.form == "mask"]
    assert [tuple(mask.shape) for mask in masks] == [(13, 19), (7, 10), (4, 5), (2, 3)]
    counts = [model.stages[i].blocks[0].attn.foreground_count(mask.numel()) for i, mask in enumerate(masks)]
    assert [int(mask.sum()) for mask in masks] == counts
    for mask, look in zip(masks, (look for look in found if look.title == "background query"), strict=True):
        assert not look.values[mask].any() and abs(look.values.sum().item() - 1) < 1e-5
    (last,) = [look for look in found if look.title == "history up to layer 4"]
    assert last.values.shape == (13, 19) and last.values.max() <= 1
