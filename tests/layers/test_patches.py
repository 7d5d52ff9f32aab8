"""Depth-wise convolutions, with the identity inside the kernel or of one column, and means of coarse cells."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from broadsight.layers.patches import ChannelConv, DepthwiseConv, average_pool
from tests.compare import assert_close, assert_equal_to, randomize


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


@pytest.mark.parametrize("height, stride, kernel", [(1, 2, (3, 3)), (3, 2, (3, 3)), (5, 1, (3, 3)), (4, 1, (1, 3))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channel_conv__one_column_of_pixels_in_value_and_gradient(height, stride, kernel, dtype):
    conv = randomize(ChannelConv(16, kernel, stride)).to(dtype)
    x = torch.randn(2, height, 1, 16).to(dtype)
    y = conv(x)
    border = (0, 0, kernel[1] // 2, kernel[1] // 2, kernel[0] // 2, kernel[0] // 2)
    padded, weight = nn.functional.pad(x.float(), border), conv.weight.detach().float().requires_grad_()
    rows = [padded[:, i : i + kernel[0]] for i in range(0, height, stride)]  # each B k k C
    expected = torch.stack([(row * weight[:, 0].permute(1, 2, 0)).sum((1, 2)) for row in rows], 1)[:, :, None]
    direction = torch.randn(y.shape).to(dtype)
    y.backward(direction)
    expected.backward(direction.float())
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    assert_close(y.float(), expected, tolerance=tolerance)
    assert_close(conv.weight.grad.float(), weight.grad, tolerance=tolerance)


def test_average_pool__is_the_mean_of_the_pixels_that_exist():
    x = torch.arange(35.0).view(1, 5, 7, 1)
    cells = [[x[0, i : i + 3, j : j + 3].mean() for j in (0, 3, 6)] for i in (0, 3)]
    assert [round(cell.item(), 4) for cell in cells[1]] == [25.5, 28.5, 30.5]  # two rows; the last column alone
    torch.testing.assert_close(average_pool(x, 3)[0, :, :, 0], torch.tensor(cells))
    for side, cells in [(7, 2), (1, 1)]:
        assert average_pool(torch.randn(2, side, side, 3), 6).shape == (2, cells, cells, 3)
