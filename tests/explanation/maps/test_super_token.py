"""Super-token looks against a hand-computed map and a loop over pixels."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from broadsight.explanation.maps.tokens import SuperTokenLooks
from broadsight.layers import SuperTokenAttention
from tests.explanation.maps import collected
from tests.zoo import shallow

looks_of = partial(collected.looks_of, SuperTokenLooks)


def shares(x: Tensor, cell: tuple[int, int], iterations: int) -> dict[tuple[int, int], dict[tuple[int, int], float]]:
    """Of every pixel (y, x), what each super token (row, column) around it holds; x (C, H, W). Pixel by pixel."""
    C, H, W = x.shape
    (h, w), (p, q) = cell, (-(-H // cell[0]), -(-W // cell[1]))
    pixels = torch.zeros(C, p * h, q * w, dtype=x.dtype)
    pixels[:, :H, :W] = x
    places = [(y, z) for y in range(p * h) for z in range(q * w)]
    tokens = {
        (i, j): pixels[:, i * h : (i + 1) * h, j * w : (j + 1) * w].mean((1, 2)) for i in range(p) for j in range(q)
    }
    found = {}
    for _ in range(iterations):
        for y, z in places:
            around = [(y // h + i, z // w + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
            logits = [float(pixels[:, y, z] @ tokens[at]) * C**-0.5 if at in tokens else 0.0 for at in around]
            total = sum(map(math.exp, logits))
            found[y, z] = {at: math.exp(n) / total for at, n in zip(around, logits, strict=True) if at in tokens}
        tokens = {
            at: sum(found[place].get(at, 0.0) * pixels[:, place[0], place[1]] for place in places)
            / sum(found[place].get(at, 0.0) for place in places)
            for at in tokens
        }
    return found


def test_looks__hand_computed():
    layer = SuperTokenAttention(1, 2, 1)
    x = torch.tensor([[[[5.0, 5.0, -5.0, -5.0], [5.0, -5.0, -5.0, -5.0]]]])  # super tokens 2.5 and -5
    association, share = looks_of(layer, x)
    assert association.values.tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    strayed = math.exp(25) / (math.exp(25) + math.exp(-12.5) + 7)  # seven of the nine lie beyond the border
    assert share.values[1, 1].item() == pytest.approx(strayed, rel=1e-6)
    assert (association.form, share.form) == ("labels", "heat")
    assert (association.kind, association.layer, association.depth) == ("super-tokens", "", 0)


def test_looks__nothing_belongs_beyond_the_border():
    layer = SuperTokenAttention(1, 2, 1)
    association, share = looks_of(layer, torch.tensor([[[[3.0, 3.0], [3.0, -1.0]]]]))  # one super token: 2
    assert association.values.tolist() == [[0, 0], [0, 0]]
    assert share.values[1, 1].item() == pytest.approx(math.exp(-2) / (math.exp(-2) + 8), rel=1e-6)


@pytest.mark.parametrize(
    ("cell", "iterations", "size", "memory", "residual"),
    [
        ((2, 2), 1, (6, 4), torch.contiguous_format, False),
        ((2, 3), 2, (5, 7), torch.channels_last, True),
        ((4, 1), 3, (7, 3), torch.contiguous_format, True),
    ],
)
def test_looks__agree_with_a_loop_over_pixels(cell, iterations, size, memory, residual):
    torch.manual_seed(0)
    layer = SuperTokenAttention(4, cell, 2, iterations).double()
    x = (2 * torch.randn(1, 4, *size, dtype=torch.float64)).contiguous(memory_format=memory)
    association, share = looks_of(layer, x, *([torch.randn_like(x)] if residual else []))
    assert association.values.shape == share.values.shape == size
    columns, expected = -(-size[1] // cell[1]), shares(x[0], cell, iterations)
    for y in range(size[0]):
        for z in range(size[1]):
            (row, column), largest = max(expected[y, z].items(), key=lambda item: item[1])
            assert association.values[y, z] == row * columns + column
            assert share.values[y, z].item() == pytest.approx(largest, rel=1e-5)


def test_looks__shares_of_a_half_precision_run_and_layers_with_cells_alone():
    model = shallow("stvit_small").eval()
    assert SuperTokenLooks.suits(model) and not SuperTokenLooks.suits(nn.Conv2d(3, 3, 1))
    found = looks_of(model.bfloat16(), torch.randn(1, 3, 40, 72).bfloat16())
    assert [look.layer for look in found] == ["stages.0.blocks.0.attn"] * 2 + ["stages.1.blocks.0.attn"] * 2
    assert [look.depth for look in found] == [0, 0, 1, 1]
    assert {look.values.dtype for look in found} == {torch.int64, torch.float32}
