"""Bilinear patch embedding against mean pooling and against a reference that reads pixels one corner at a time."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from broadsight.layers import BilinearPatchEmbed
from tests.compare import assert_close, assert_same_function, randomize
from tests.reference import mat as reference


@pytest.mark.parametrize("size", [(8, 6), (9, 6), (7, 7), (2, 2), (1, 1), (1, 4), (3, 1)])
@pytest.mark.parametrize("reach", [0.5, 4.0])
def test_forward__agrees_with_the_slow_reference_in_value_and_gradient(size, reach):
    ours = randomize(BilinearPatchEmbed(4, 8).double()).eval()
    nn.init.normal_(ours.offset_proj.weight, std=reach)  # 4 pixels: many samples lie beyond the border
    x = torch.randn(2, 4, *size, dtype=torch.float64)
    assert_same_function(ours, reference.BilinearEmbed(4).double().eval(), x, tolerance=1e-10)


def test_forward__training_uses_the_statistics_of_the_batch():
    ours = randomize(BilinearPatchEmbed(4, 8).double()).train()
    slow = reference.BilinearEmbed(4).double().train()
    assert_same_function(ours, slow, torch.randn(3, 4, 9, 6, dtype=torch.float64), tolerance=1e-9)
    for name, buffer in slow.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)


def test_sample__by_hand_and_with_sub_pixel_positions_in_half_precision():
    """One row of pixels 0, 10, 20, 30: centres lie at 0.5 and 2.5, offsets are pixels, beyond the border it is flat."""
    layer, x = BilinearPatchEmbed(1, 1), torch.tensor([0.0, 10.0, 20.0, 30.0]).view(1, 1, 1, 4)
    for offsets, expected in [([0.0, 0.0, 0.25, 3.0], [5.0, 27.5]), ([-9.0, 0.0, 9.0, 0.0], [0.0, 30.0])]:
        sampled = layer.sample(x, torch.tensor(offsets).view(1, 1, 2, 2))  # (dx, dy)
        assert sampled.flatten().tolist() == pytest.approx(expected)
    # A bfloat16 position near pixel 500 would be off by a pixel or more; the values of the map itself are
    # exact.
    layer = BilinearPatchEmbed(1, 1)
    ramp = (torch.arange(1000.0) % 16).view(1, 1, 1, 1000)
    offsets = torch.zeros(1, 1, 500, 2)
    got = layer.sample(ramp.bfloat16(), offsets.bfloat16())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), layer.sample(ramp, offsets), rtol=0.01, atol=0)


@pytest.mark.parametrize("size", [(8, 6), (7, 1), (1, 1)])
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_half_precision__offsets_are_those_of_the_stride_and_a_hook_is_called(how, size):
    wide, calls = randomize(BilinearPatchEmbed(4, 8)), []
    narrow = wide if how == "autocast" else deepcopy(wide).bfloat16()
    x, found = torch.randn(2, 4, *size), []
    for layer in (wide, narrow, narrow):
        layer.zero_grad()
        leaf = x.to(layer.dw.weight.dtype).detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(found) and how == "autocast"):
            y = layer.offsets(leaf)
        y.float().square().sum().backward()
        found.append({"offsets": y, "input": leaf.grad, "weight": layer.offset_dw.weight.grad})
        if len(found) == 2:
            narrow.offset_dw.register_forward_hook(lambda *_: calls.append(1))
    assert found[1]["offsets"].dtype == torch.bfloat16 and calls == [1]
    for name, expected in found[0].items():
        for other in found[1:]:
            assert_close(other[name].float(), expected.float(), name, 0.05)


def test_reparameterize__folds_the_norm():
    layer = randomize(BilinearPatchEmbed(3, 5).double()).eval()
    folded = deepcopy(layer)
    folded.reparameterize()
    assert isinstance(folded.norm, nn.Identity)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    assert_close(folded(x), layer(x), "folded", 1e-12)
