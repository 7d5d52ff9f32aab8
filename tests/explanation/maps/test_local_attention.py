"""Looks at EMSNet's attentions against windows visited one by one."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from broadsight.explanation.maps.local_attention import LocalAttentionLooks
from broadsight.layers import CMHSA, GMHSA
from broadsight.surgery.fusion import fuse
from tests.compare import randomize
from tests.explanation.maps import collected
from tests.zoo import shallow

looks_of = partial(collected.looks_of, LocalAttentionLooks)


@pytest.mark.parametrize("size", [(5, 4), (1, 3), (4, 6)])
def test_looks__agree_with_windows_one_by_one(size):
    torch.manual_seed(0)
    layer = randomize(CMHSA(64).double())
    x = torch.randn(1, *size, 64, dtype=torch.float64)
    found = {look.title.removeprefix("C-MHSA, "): look.values for look in looks_of(layer, x)}
    padded = torch.zeros(size[0] + 3, size[1] + 3, 64, dtype=torch.float64)
    padded[1 : size[0] + 1, 1 : size[1] + 1] = x[0]
    mass, windows = torch.zeros(size), torch.zeros(size)
    for row in range(-(-size[0] // 2)):
        for column in range(-(-size[1] // 2)):
            around = padded[2 * row : 2 * row + 3, 2 * column : 2 * column + 3]  # of the centre (2*row, 2*column)
            centre = torch.einsum("yxc,cyx->c", around, layer.dw.weight[:, 0])
            weights = (layer.mix.weight @ centre).view(2, 9, 9).softmax(-1)  # heads outputs values
            entropy = -(weights * weights.log()).sum(-1).mean().item()
            assert found["concentration"][row, column].item() == pytest.approx(1 - entropy / math.log(9), abs=1e-6)
            for place in range(9):
                y, z = 2 * row - 1 + place // 3, 2 * column - 1 + place % 3
                if 0 <= y < size[0] and 0 <= z < size[1]:
                    mass[y, z] += weights[:, :, place].sum(1).mean().item()
                    windows[y, z] += 1
    torch.testing.assert_close(found["received"], mass)
    torch.testing.assert_close(found["received, over uniform"], mass / windows)


def test_looks__uniform_by_hand():
    layer = CMHSA(32)
    nn.init.zeros_(layer.mix.weight)
    received, over, concentration = looks_of(layer, torch.randn(1, 4, 3, 32))
    one_two_four = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1], [1, 2, 1]])  # no window begins at the last row
    torch.testing.assert_close(received.values, one_two_four)
    torch.testing.assert_close(over.values, torch.ones(4, 3))
    torch.testing.assert_close(concentration.values, torch.zeros(2, 2), atol=1e-6, rtol=0)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.near, self.far = CMHSA(32), randomize(GMHSA(64).double())

    def forward(self, x: Tensor) -> Tensor:
        self.near(x[..., :32].float())
        return self.far(x)


def test_looks__of_all_cells():
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(1, 3, 4, 64, dtype=torch.float64)
    found = looks_of(model, x)
    assert [look.layer for look in found] == ["near"] * 3 + ["far"]
    assert [look.depth for look in found] == [0] * 4
    qk = (x.view(12, 64) @ model.far.qkv.weight.T)[:, :128].view(12, 2, 2, 32)
    weights = [(qk[:, 0, head] @ qk[:, 1, head].T / math.sqrt(32)).softmax(1) for head in range(2)]
    torch.testing.assert_close(found[-1].values, torch.stack(weights).mean((0, 1)).view(3, 4).float())


def test_looks__of_a_model_and_its_folded_form():
    torch.manual_seed(0)
    model = shallow("emsnet_xxtiny").eval()
    x = torch.randn(1, 3, 72, 100)
    found, folded = looks_of(model, x), looks_of(fuse(model), x)
    assert LocalAttentionLooks.suits(fuse(model)) and not LocalAttentionLooks.suits(GMHSA(32))
    assert [look.depth for look in found] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [tuple(look.values.shape) for look in found[:4]] == [(5, 7), (5, 7), (3, 4), (3, 5)]
    for look, other in zip(found, folded, strict=True):
        torch.testing.assert_close(look.values, other.values, rtol=1e-3, atol=1e-5)
        assert (look.title, look.depth) == (other.title, other.depth)
    assert found[3].layer == "stages.0.blocks.0.mixer.dynamic.global_.attn"
    assert folded[3].layer == "stages.0.blocks.0.mixer.global_.attn"
    without_far = shallow("emsnet_xxtiny", mixer="c_mhsa").eval()
    assert {look.title.split(",")[0] for look in looks_of(without_far, x)} == {"C-MHSA"}
