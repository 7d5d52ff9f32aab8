"""SimpleBaseline: the stride of its heat maps, its loss by hand, and that it learns."""

import math

import pytest
import torch
from torch import nn

from broadsight.data.dense.pose_geometry import encode
from broadsight.dense.pose import decode, flip_test
from tests.refusals import refused

from .small import small as small_head


def small(**options):
    return small_head("simple_baseline", 1, "test_convnext", **options)


@pytest.mark.parametrize(("deconvs", "stride"), [(0, 32), (3, 4), (4, 2)])
def test_heatmaps__are_of_the_stride(deconvs, stride):
    model = small(deconvs=deconvs).eval()
    assert model.stride == stride
    for height, width in ((64, 32), (65, 47)):
        maps = model(torch.rand(1, 3, height, width))
        assert maps.shape == (1, 4, math.ceil(height / stride), math.ceil(width / stride))
        assert maps.shape == encode(torch.ones(1, 4, 3), (height, width), stride=stride)[0].shape


def test_loss__by_hand_without_labelled_points_and_for_targets_of_another_size():
    model = small(num_keypoints=2).train()
    nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor([0.5, 3.0])
    heatmaps = torch.zeros(2, 2, 8, 8)
    heatmaps[0, 0, 0, 0] = 1.5
    weights = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    loss = model(torch.rand(2, 3, 32, 32), (heatmaps, weights))["loss"]
    # keypoint 0: 0.25 in 127 cells and 1 in one; keypoint 1: of the second crop alone, 9 in 64 cells
    assert loss.item() == pytest.approx((127 * 0.25 + 1 + 64 * 9) / 256)
    model = small().train()
    loss = model(torch.rand(2, 3, 32, 32), encode(torch.zeros(2, 4, 3), (32, 32)))["loss"]
    loss.backward()
    assert loss == 0 and all(p.grad is not None for p in model.parameters() if p.requires_grad)
    words = r"heat maps \(2, 4, 4, 4\) .*expected \(2, 4, 8, 8\) .* stride=4"
    refused(words, model, torch.rand(2, 3, 32, 32), (torch.zeros(2, 4, 4, 4), torch.ones(2, 4)))


@pytest.mark.slow
def test_training__finds_the_bright_spot():
    model = small(num_keypoints=1, channels=16).train()
    places = torch.tensor([[[10.0, 14.0, 1.0]], [[38.0, 50.0, 1.0]], [[42.0, 10.0, 1.0]]])
    crops = 0.5 * encode(places, (64, 64), stride=1, sigma=6.0)[0].expand(3, 3, 64, 64) + 0.2
    targets = encode(places, (64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(crops, targets)["loss"].backward()
        optimizer.step()
    model.training = False  # of itself alone: so few steps leave the running statistics behind
    found = decode(model(crops))
    assert (found[..., :2] - places[..., :2]).abs().max() < 4  # within a cell


def test_flip_test__of_the_model_is_symmetric_and_keeps_no_gradients():
    model, crops, pairs = small().eval(), torch.rand(1, 3, 64, 64), [(0, 1), (2, 3)]
    maps, mirrored = flip_test(model, crops, pairs), flip_test(model, crops.flip(-1), pairs)
    torch.testing.assert_close(mirrored.flip(-1)[:, [1, 0, 3, 2]], maps)
    assert not maps.requires_grad
