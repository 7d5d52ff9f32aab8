"""Crops around persons, against hand-computed places; no half-pixel is lost on the way."""

import math

import pytest
import torch

from broadsight.data.dense.pose_geometry import apply_affine, crop_affine, encode, invert_affine


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_crop_affine__corners_of_the_region_are_those_of_the_crop(dtype):
    boxes = torch.tensor([(10, 20, 40, 120), (0, 0, 90, 60)], dtype=dtype)
    matrices = crop_affine(boxes, (256, 192), padding=1.25)
    assert matrices.dtype == (torch.float32 if dtype == torch.int64 else dtype)
    # 100 high asks for 75 wide; 90 wide asks for 120 high; a quarter more of each
    middle, half = torch.tensor([[25.0, 70], [45, 30]]), torch.tensor([[46.875, 62.5], [56.25, 75]])
    region = torch.stack([middle - half, middle + half, middle], 1).to(matrices)
    crop = torch.tensor([[0.0, 0.0], [192.0, 256.0], [96.0, 128.0]]).expand(2, 3, 2).to(matrices)
    torch.testing.assert_close(apply_affine(region, matrices), crop, atol=1e-4, rtol=0)


def test_crop_affine__box_of_no_area_counts_as_a_pixel():
    matrix = crop_affine(torch.tensor([[5.0, 5.0, 5.0, 5.0]]), (256, 192), padding=1)
    assert apply_affine(torch.tensor([[[5.0, 5.0], [5.5, 5.0]]]), matrix).tolist() == [[[96, 128], [192, 128]]]


def test_crop_affine__scale_above_one_shows_more():
    boxes = torch.tensor([[0.0, 0.0, 30.0, 40.0]] * 2)
    matrices = crop_affine(boxes, (40, 30), padding=1, scale=torch.tensor([1.0, 2.0], dtype=torch.float64))
    corner = apply_affine(torch.zeros(2, 1, 2), matrices)
    assert corner.tolist() == [[[0, 0]], [[7.5, 10]]]


def test_crop_affine__turns_counter_clockwise_about_the_centre():
    boxes = torch.tensor([[0.0, 0.0, 30.0, 40.0]])
    right_of_it = torch.tensor([[[25.0, 20.0]]])  # 10 from the centre (15, 20)
    moved = apply_affine(right_of_it, crop_affine(boxes, (40, 30), padding=1, rotation=90))
    torch.testing.assert_close(moved, torch.tensor([[[15.0, 10.0]]]))  # now above it
    half = math.sqrt(50)
    both = crop_affine(boxes.repeat(2, 1), (40, 30), padding=1, rotation=torch.tensor([45.0, -45.0]))
    moved = apply_affine(right_of_it.repeat(2, 1, 1), both)
    torch.testing.assert_close(moved, torch.tensor([[[15 + half, 20 - half]], [[15 + half, 20 + half]]]))


def test_crop_affine__mirrored_image_has_the_mirrored_crop():
    box, point, width = torch.tensor([[12.0, 7.0, 61.0, 90.0]]), torch.tensor([[[33.0, 40.0]]]), 101
    mirrored = torch.stack([width - box[:, 2], box[:, 1], width - box[:, 0], box[:, 3]], 1)
    x, y = apply_affine(point, crop_affine(box, (256, 192), rotation=20))[0, 0]
    point[..., 0] = width - point[..., 0]
    moved = apply_affine(point, crop_affine(mirrored, (256, 192), rotation=-20))[0, 0]
    torch.testing.assert_close(moved, torch.stack([192 - x, y]))


def test_invert_affine__leads_back():
    boxes = torch.tensor([[3.0, 4.0, 50.0, 90.0], [10.0, 0.0, 11.0, 80.0]], dtype=torch.float64)
    matrices = crop_affine(boxes, rotation=torch.tensor([30.0, -75.0]), scale=torch.tensor([0.7, 1.3]))
    points = torch.rand(2, 5, 2, dtype=torch.float64) * 100
    torch.testing.assert_close(apply_affine(apply_affine(points, matrices), invert_affine(matrices)), points)


def test_apply_affine__keeps_visibility_and_takes_no_persons():
    matrix = torch.tensor([[[2.0, 0.0, 1.0], [0.0, 2.0, -1.0]]])
    assert apply_affine(torch.tensor([[[3.0, 4.0, 2.0]]]), matrix).tolist() == [[[7, 7, 2]]]
    nobody = apply_affine(torch.zeros(0, 17, 3), crop_affine(torch.zeros(0, 4)))
    assert nobody.shape == (0, 17, 3)
    assert invert_affine(torch.zeros(0, 2, 3)).shape == (0, 2, 3)
    maps, weights = encode(nobody)
    assert maps.shape == (0, 17, 64, 48) and weights.shape == (0, 17)


def test_encode__gaussian_by_hand():
    # Cell (x 2, y 1) has its centre at (10, 6); sigma of 2 cells
    maps, weights = encode(torch.tensor([[[10.0, 6.0, 2.0]]]), (16, 24))
    assert maps.shape == (1, 1, 4, 6) and weights.tolist() == [[1]]
    expected = [1, math.exp(-4 / 8), math.exp(-(4 + 9) / 8)]
    assert maps[0, 0, [1, 1, 3], [2, 4, 5]].tolist() == pytest.approx(expected)
    maps, _ = encode(torch.tensor([[[8.0, 4.0, 1.0]]]), (16, 16), sigma=1)  # the corner of four cells
    torch.testing.assert_close(maps[0, 0, :2, 1:3], torch.full((2, 2), math.exp(-0.25)))


def test_encode__what_is_not_to_be_learned():
    points = torch.tensor([[[8.0, 8.0, 0.0], [-20.0, 8.0, 2.0], [-25.0, 8.0, 2.0], [8.0, 60.0, 1.0], [40.0, 8.0, 1.0]]])
    maps, weights = encode(points, (32, 16))
    # the outermost cells have their centres at 2 and at 14 (x) or 30 (y); three sigma are 24 pixels
    assert weights.tolist() == [[0, 1, 0, 0, 0]]
    assert (maps.amax((2, 3)) > 0).tolist() == [[False, True, False, False, False]]


def test_encode__mirrored_points_give_mirrored_maps_and_odd_sizes_round_up():
    points = torch.rand(3, 5, 3) * 60 + 1
    mirrored = torch.cat([64 - points[..., :1], points[..., 1:]], -1)
    torch.testing.assert_close(encode(mirrored, (64, 64))[0], encode(points, (64, 64))[0].flip(-1))
    assert encode(points, (33, 30))[0].shape == (3, 5, 9, 8)
