"""The same distribution, scale and gradient as nn.Dropout; what is kept for the backward pass is a mask."""

import pytest
import torch

from broadsight.layers.pooling.group_linear import LeanDropout
from tests.compare import saved_bytes


def test_dropout__drops_and_scales_and_keeps_a_byte_for_each_element():
    drop, x = LeanDropout(0.25), torch.full((400, 500), 3.0, requires_grad=True)
    y = drop(x)
    kept = y != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.005
    assert torch.allclose(y[kept], torch.tensor(4.0))
    y.sum().backward()
    assert torch.equal(x.grad, kept / 0.75)
    assert saved_bytes(lambda: LeanDropout(0.5)(torch.randn(10, 10, requires_grad=True))) == 100
    assert torch.equal(LeanDropout(1.0)(torch.ones(5)), torch.zeros(5))


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_dropout__leaves_alone(p, training):
    x = torch.randn(3, 4)
    assert LeanDropout(p).train(training)(x) is x
