"""Keypoints from heat maps, and the mirrored crop."""

import pytest
import torch

from broadsight.data.dense.pose_geometry import encode
from broadsight.dense.pose import decode, flip_test
from tests.refusals import refused


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
    assert decode(torch.zeros(0, 17, 64, 48)).shape == (0, 17, 3)
    refused("unknown refine 'dark'; .*expected one of quarter, taylor, none", decode, maps, refine="dark")
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


def test_flip_test__by_hand_and_of_a_symmetric_model():
    def model(crops):  # keypoint 0 is what it sees, keypoint 1 ten times that
        return torch.cat([crops, 10 * crops], 1)

    crop = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 1, 3)
    swapped = flip_test(model, crop, [(0, 1)])
    assert swapped[0, :, 0].tolist() == [[5.5, 11, 16.5], [5.5, 11, 16.5]]
    assert flip_test(model, crop, [])[0, :, 0].tolist() == [[1, 2, 3], [10, 20, 30]]
    assert flip_test(model, crop, [], shift=True)[0, 0, 0].tolist() == [1, 1.5, 2.5]

    def symmetric(crops):  # sees no left and right of its own: keypoint 0 is dark, 1 and 2 the left and right of it
        first, ramp = crops[:, :1], torch.linspace(1, 0, crops.shape[-1])
        return torch.cat([first, first * ramp, first * ramp.flip(0)], 1)

    crops = torch.rand(2, 3, 4, 6)
    torch.testing.assert_close(flip_test(symmetric, crops, [(1, 2)]), symmetric(crops))
