"""Depth-wise convolutions with the identity inside the kernel."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from broadsight.layers import DepthwiseConv
from tests.compare import assert_close, outputs_and_gradients


def by_hand(layer: DepthwiseConv, x: Tensor) -> Tensor:
    """Pixel by pixel on (B, H, W, C), in float64."""
    half = layer.kernel_size[0] // 2
    B, H, W, C = x.shape
    rows = []
    for y in range(H):
        row = []
        for z in range(W):
            total = torch.zeros(B, C, dtype=x.dtype) if layer.bias is None else layer.bias.expand(B, C)
            for dy in range(-half, half + 1):
                for dz in range(-half, half + 1):
                    if 0 <= y + dy < H and 0 <= z + dz < W:
                        total = total + x[:, y + dy, z + dz] * layer.weight[:, 0, half + dy, half + dz]
            row.append(total + x[:, y, z] if layer.residual else total)
        rows.append(torch.stack(row, 1))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("kernel_size", "size"), [(3, (4, 5)), (7, (5, 3)), (1, (2, 3)), (3, (1, 1))])
def test_forward__equals_x_plus_its_convolution_in_value_and_gradient(kernel_size, size, residual, bias):
    layer = DepthwiseConv(3, kernel_size, bias=bias, residual=residual).double()
    x = torch.randn(2, *size, 3, dtype=torch.float64)
    got, got_gradients = outputs_and_gradients(layer, lambda module, x: module(x), [x])
    expected, expected_gradients = outputs_and_gradients(layer, by_hand, [x])
    assert_close(got[0], expected[0], "output", 1e-12)
    assert got_gradients.keys() == {"input 0", "weight"} | ({"bias"} if bias else set())
    for name, gradient in got_gradients.items():
        assert_close(gradient, expected_gradients[name], name, 1e-12)


def test_kernel__holds_the_identity_at_its_centre():
    layer = DepthwiseConv(2, 5, residual=True)
    nn.init.zeros_(layer.weight)
    expected = torch.zeros(2, 1, 5, 5)
    expected[:, :, 2, 2] = 1
    assert torch.equal(layer.kernel(), expected)
    assert DepthwiseConv(2, 5).kernel().shape == (2, 1, 5, 5)


@pytest.mark.parametrize("residual", [False, True])
def test_reparameterize__keeps_the_output(residual):
    layer = DepthwiseConv(3, residual=residual).double()
    x = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    folded = deepcopy(layer)
    folded.reparameterize()
    assert not folded.residual and not folded.weight.requires_grad
    torch.testing.assert_close(folded(x), layer(x), rtol=0, atol=1e-13)
    folded.reparameterize()  # a second time adds no second identity
    torch.testing.assert_close(folded(x), layer(x), rtol=0, atol=1e-13)
