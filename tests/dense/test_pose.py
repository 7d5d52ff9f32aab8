"""Pose models: heat maps there and back, the mirrored crop."""

import math

import pytest
import torch
from torch import nn

from broadsight.data.dense.pose_geometry import encode
from broadsight.dense import build
from broadsight.dense.heads.simple_baseline import SimpleBaseline
from broadsight.dense.pose import decode, flip_test
from tests.refusals import refused


def small(**options) -> SimpleBaseline:
    model = build("simple_baseline", "test_convnext", 1, **{"channels": 8, "num_keypoints": 5, **options})
    assert isinstance(model, SimpleBaseline)
    return model


@pytest.mark.parametrize(("deconvs", "stride"), [(0, 32), (3, 4), (4, 2)])
def test_heatmaps__are_of_the_stride(deconvs, stride):
    model = small(deconvs=deconvs).eval()
    assert model.stride == stride
    for height, width in ((64, 32), (65, 47)):
        with torch.no_grad():
            maps = model(torch.rand(1, 3, height, width))
        assert maps.shape == (1, 5, math.ceil(height / stride), math.ceil(width / stride))
        assert maps.shape == encode(torch.ones(1, 5, 3), (height, width), stride=stride)[0].shape


@pytest.mark.parametrize("options", [dict(in_chans=1, num_keypoints=1), dict(neck="map", num_keypoints=2)])
def test_training__what_learns_gets_a_gradient(options):
    model = small(**options).train()
    crops, count = torch.rand(2, model.stages.in_chans, 64, 32), model.num_keypoints
    losses = model(crops, encode(torch.rand(2, count, 3) * 30 + 1, (64, 32)))
    losses["loss"].backward()
    assert losses.keys() == {"loss"}
    assert [name for name, p in model.named_parameters() if p.requires_grad == (p.grad is None)] == []
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    if "neck" in options:
        assert "stages.neck.to_stages.0.weight" in frozen and "stages.neck.to_stages.3.weight" not in frozen
    assert all(name.startswith("stages.") for name in frozen)


def test_loss__by_hand():
    model = small(num_keypoints=2).train()
    nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor([0.5, 3.0])
    heatmaps = torch.zeros(2, 2, 8, 8)
    heatmaps[0, 0, 0, 0] = 1.5
    weights = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    loss = model(torch.rand(2, 3, 32, 32), (heatmaps, weights))["loss"]
    # keypoint 0: 0.25 in 127 cells and 1 in one; keypoint 1: of the second crop alone, 9 in 64 cells
    assert loss.item() == pytest.approx((127 * 0.25 + 1 + 64 * 9) / 256)


def test_loss__without_labelled_points_is_zero_and_has_gradients():
    model = small().train()
    loss = model(torch.rand(2, 3, 32, 32), encode(torch.zeros(2, 5, 3), (32, 32)))["loss"]
    loss.backward()
    assert loss == 0 and all(p.grad is not None for p in model.parameters() if p.requires_grad)


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
    with torch.no_grad():
        found = decode(model(crops))
    assert (found[..., :2] - places[..., :2]).abs().max() < 4  # within a cell


def test_bfloat16__loss_in_float32():
    with torch.autocast("cpu", torch.bfloat16):
        loss = small().train()(torch.rand(2, 3, 32, 32), encode(torch.ones(2, 5, 3), (32, 32)))["loss"]
    assert loss.dtype == torch.float32 and loss.isfinite()


@pytest.mark.parametrize(("refine", "tolerance"), [("none", 2.0), ("quarter", 1.0), ("taylor", 1e-2)])
@pytest.mark.parametrize("input_size", [(256, 192), (64, 40)])
def test_decode__leads_back_without_bias(refine, tolerance, input_size):
    height, width = input_size
    side = torch.arange(501) / 500
    x, y = 6 + side * (width - 12), 6 + side.flip(0) * (height - 12)  # not in the outermost cells
    points = torch.stack([x, y, torch.ones(501)], 1)[None]
    found = decode(encode(points, input_size)[0], refine=refine)
    error = (found - points)[0, :, :2]
    assert error.abs().max() <= tolerance + 1e-3  # pixels: half a cell, a quarter of one, nothing
    assert error.mean(0).abs().max() < 0.05


@pytest.mark.parametrize("refine", ["none", "quarter", "taylor"])
def test_decode__is_within_half_a_cell_at_the_borders_too(refine):
    points = torch.tensor([[[0.1, 0.1, 1], [63.9, 31.9, 1], [0.1, 16.3, 1], [33.7, 31.9, 1]]])
    found = decode(encode(points, (32, 64))[0], refine=refine)
    assert (found - points)[..., :2].abs().max() <= 2


def test_decode__by_hand():
    maps = torch.zeros(1, 4, 4, 5)
    maps[0, 0, 1, 2], maps[0, 0, 1, 3], maps[0, 0, 0, 2] = 0.8, 0.4, 0.2  # to the right, and up
    maps[0, 1, 2, 3], maps[0, 1, 2, 2], maps[0, 1, 3, 3] = 0.9, 0.3, 0.1  # to the left, and down
    maps[0, 2, 3, 4], maps[0, 2, 3, 3] = 0.7, 0.5  # a corner: its middle
    maps[0, 3] = -1.0  # nowhere: the first cell
    assert decode(maps, stride=4)[0, :, :2].tolist() == [[11, 5], [13, 11], [18, 14], [2, 2]]
    torch.testing.assert_close(decode(maps)[0, :, 2], torch.tensor([0.8, 0.9, 0.7, -1.0]))
    assert decode(maps, stride=1, refine="none")[0, :, :2].tolist() == [[2.5, 1.5], [3.5, 2.5], [4.5, 3.5], [0.5, 0.5]]
    assert decode(maps, refine="taylor").isfinite().all()


def test_decode__taylor_follows_a_slanted_gaussian():
    columns, rows = torch.meshgrid(torch.arange(12.0), torch.arange(10.0), indexing="xy")
    dx, dy = columns - 5.3, rows - 4.2
    slanted = torch.exp(-(dx**2 + dx * dy + 0.8 * dy**2) / 4)[None, None]
    found = decode(slanted, stride=1, refine="taylor")[0, 0, :2]
    torch.testing.assert_close(found, torch.tensor([5.8, 4.7]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("refine", ["quarter", "taylor"])
def test_decode__plateau_is_left_at_its_first_cell(refine):
    assert decode(torch.ones(1, 1, 6, 6), stride=2, refine=refine).tolist() == [[[1, 1, 1]]]
    flat = torch.zeros(1, 1, 6, 6)
    flat[..., 1:4, 1:4] = 0.5
    assert decode(flat, stride=2, refine=refine).isfinite().all()


def test_decode__takes_no_crops():
    assert decode(torch.zeros(0, 17, 64, 48)).shape == (0, 17, 3)


class Symmetric(nn.Module):
    """Heat maps that see no left and right of their own: keypoint 0 is dark, 1 and 2 the left and right of it."""

    def forward(self, crops):
        first = crops[:, :1]
        ramp = torch.linspace(1, 0, crops.shape[-1])
        return torch.cat([first, first * ramp, first * ramp.flip(0)], 1)


def test_flip_test__of_a_symmetric_model_changes_nothing():
    crops = torch.rand(2, 3, 4, 6)
    torch.testing.assert_close(flip_test(Symmetric(), crops, [(1, 2)]), Symmetric()(crops))


def test_flip_test__by_hand():
    def model(crops):  # keypoint 0 is what it sees, keypoint 1 ten times that
        return torch.cat([crops, 10 * crops], 1)

    crop = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 1, 3)
    swapped = flip_test(model, crop, [(0, 1)])
    assert swapped[0, :, 0].tolist() == [[5.5, 11, 16.5], [5.5, 11, 16.5]]
    assert flip_test(model, crop, [])[0, :, 0].tolist() == [[1, 2, 3], [10, 20, 30]]
    assert flip_test(model, crop, [], shift=True)[0, 0, 0].tolist() == [1, 1.5, 2.5]


def test_flip_test__of_the_model_is_symmetric_and_keeps_no_gradients():
    model, crops, pairs = small().eval(), torch.rand(1, 3, 64, 64), [(0, 1), (3, 4)]
    maps, mirrored = flip_test(model, crops, pairs), flip_test(model, crops.flip(-1), pairs)
    torch.testing.assert_close(mirrored.flip(-1)[:, [1, 0, 2, 4, 3]], maps)
    assert not maps.requires_grad


def test_errors__say_what_to_do():
    model = small().train()
    with pytest.raises(ValueError, match=r"was given no targets; pass \(heat maps, weights\) or call model.eval\(\)"):
        model(torch.rand(2, 3, 32, 32))
    with pytest.raises(ValueError, match=r"heat maps \(2, 5, 4, 4\) .*expected \(2, 5, 8, 8\) .* stride=4"):
        model(torch.rand(2, 3, 32, 32), (torch.zeros(2, 5, 4, 4), torch.ones(2, 5)))
    with pytest.raises(ValueError, match=r"unknown refine 'dark'; .*expected one of quarter, taylor, none"):
        decode(torch.zeros(1, 1, 4, 4), refine="dark")
    refused(r"deconvs=6; expected 0 to 5", small, deconvs=6)
