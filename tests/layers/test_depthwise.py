"""Depth-wise convolutions with the identity inside the kernel."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from broadsight.layers import DepthwiseConv
from tests.compare import assert_equal_to


def by_hand(layer: DepthwiseConv, x: Tensor) -> Tensor:
    """Tap by tap on (B, H, W, C), in float64."""
    half, (_, H, W, _) = layer.kernel_size[0] // 2, x.shape
    padded = nn.functional.pad(x, (0, 0, half, half, half, half))
    total = x if layer.residual else torch.zeros_like(x)
    for dy in range(2 * half + 1):
        for dz in range(2 * half + 1):
            total = total + padded[:, dy : dy + H, dz : dz + W] * layer.weight[:, 0, dy, dz]
    return total if layer.bias is None else total + layer.bias


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("kernel_size", "size"), [(3, (4, 5)), (7, (5, 3)), (1, (2, 3)), (3, (1, 1))])
def test_forward__equals_x_plus_its_convolution_in_value_and_gradient(kernel_size, size, residual, bias):
    layer = DepthwiseConv(3, kernel_size, bias=bias, residual=residual).double()
    assert len(list(layer.parameters())) == 1 + bias
    assert_equal_to(by_hand, layer, torch.randn(2, *size, 3, dtype=torch.float64), tolerance=1e-12)


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
