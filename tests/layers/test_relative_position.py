"""The relative position bias against hand-computed grids."""

import pytest
import torch

from broadsight.layers import RelativePositionBias, SuperTokenAttention
from tests.compare import assert_close


def test_forward__two_by_two_by_hand():
    layer = RelativePositionBias(1, (2, 2))
    layer.table.data = torch.arange(9.0).view(1, 3, 3)  # row: dy + 1, column: dx + 1, of query minus key
    expected = torch.tensor(
        [
            # keys (0,0) (0,1) (1,0) (1,1)
            [4.0, 3.0, 1.0, 0.0],  # query (0,0)
            [5.0, 4.0, 2.0, 1.0],  # query (0,1)
            [7.0, 6.0, 4.0, 3.0],  # query (1,0)
            [8.0, 7.0, 5.0, 4.0],  # query (1,1)
        ]
    )
    assert torch.equal(layer(2, 2), expected[None])


@pytest.mark.parametrize("grid", [(3, 4), (1, 5), (2, 1), (1, 1)])
def test_forward__reference_grid_is_read_without_rounding(grid):
    H, W = grid
    layer = RelativePositionBias(2, grid)
    bias = layer(H, W)
    assert bias.shape == (2, H * W, H * W)
    for query in range(H * W):
        for key in range(H * W):
            dy, dx = query // W - key // W, query % W - key % W
            assert torch.equal(bias[:, query, key], layer.table[:, dy + H - 1, dx + W - 1])


@pytest.mark.parametrize("size", [(2, 3), (3, 5), (7, 2), (1, 4), (5, 1), (1, 1)])
def test_forward__other_grids_resize_the_table_bilinearly(size):
    """A table that is linear in the offset stays linear: corners stay the largest offsets, the centre stays zero."""
    layer = RelativePositionBias(1, (3, 4)).double()
    dy = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    dx = torch.linspace(-1, 1, 7, dtype=torch.float64)
    layer.table.data = (3 * dy + 5 * dx + 2 * dy * dx)[None]
    H, W = size
    bias = layer(H, W)
    assert bias.shape == (1, H * W, H * W)
    for query in range(H * W):
        for key in range(H * W):
            y, x = (query // W - key // W) / max(1, H - 1), (query % W - key % W) / max(1, W - 1)
            assert bias[0, query, key].item() == pytest.approx(3 * y + 5 * x + 2 * y * x, abs=1e-12)


def test_backward__counts_the_pairs_of_every_offset():
    layer = RelativePositionBias(1, (2, 3)).double()
    layer(2, 3).sum().backward()
    # An offset (dy, dx) occurs (2 - |dy|) * (3 - |dx|) times.
    assert layer.table.grad.tolist() == [
        [[1.0, 2.0, 3.0, 2.0, 1.0], [2.0, 4.0, 6.0, 4.0, 2.0], [1.0, 2.0, 3.0, 2.0, 1.0]]
    ]


def test_attention__adds_the_bias_to_the_scaled_logits():
    layer = SuperTokenAttention(8, 1, 2, relative_grid=(3, 2)).double()
    torch.nn.init.normal_(layer.position.table)
    x = torch.randn(2, 8, 3, 2, dtype=torch.float64)
    tokens = x.flatten(2).mT
    bias, out = layer.position(3, 2), []
    for head, rows in enumerate(layer.qkv(tokens).chunk(2, -1)):  # each head's query, key and value side by side
        q, k, v = rows.split(4, -1)
        out.append((q @ k.mT / 2 + bias[head]).softmax(-1) @ v)
    expected = layer.proj(torch.cat(out, -1)).mT.reshape(x.shape)
    assert_close(layer(x), expected, "output", 1e-12)
