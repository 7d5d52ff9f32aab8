"""Boxes, masks and keypoints under resizing, cropping and mirroring, by hand."""

import torch

from broadsight.data.dense import object_geometry as geometry
from broadsight.data.dense.transforms import GROUND, crop, crop_planes, flip, left_over, resize, resize_masks


def sample():
    pixels = torch.arange(4 * 6, dtype=torch.uint8).reshape(1, 4, 6).repeat(3, 1, 1)
    masks = torch.zeros(2, 4, 6, dtype=torch.uint8)
    masks[0, 1:3, 0:3] = 1
    masks[1, 3, 5] = 1
    target = dict(
        boxes=torch.tensor([[0.0, 1, 3, 3], [5, 3, 6, 4]]),
        labels=torch.tensor([4, 7]),
        area=torch.tensor([5.0, 1.0]),
        masks=masks,
        keypoints=torch.tensor([[[0.5, 1.5, 2.0], [2.5, 2.5, 1.0]], [[5.5, 3.5, 2.0], [0, 0, 0]]]),
        image_id=9,
    )
    return pixels, target


def test_resize__by_hand():
    pixels, target = sample()
    bigger, moved = resize(pixels, target, (8, 18))
    assert bigger.shape == (3, 8, 18) and bigger.dtype == torch.uint8
    lists = {key: moved[key].tolist() for key in ("boxes", "area", "keypoints", "labels")}
    points = [[[1.5, 3, 2], [7.5, 5, 1]], [[16.5, 7, 2], [0, 0, 0]]]
    assert lists == dict(boxes=[[0, 2, 9, 6], [15, 6, 18, 8]], area=[30, 6], keypoints=points, labels=[4, 7])
    assert torch.equal(moved["masks"], target["masks"].repeat_interleave(2, 1).repeat_interleave(3, 2))
    assert moved["image_id"] == 9
    assert target["boxes"].tolist() == [[0, 1, 3, 3], [5, 3, 6, 4]]  # what was given is left alone
    line = torch.arange(6, dtype=torch.uint8).reshape(1, 1, 6)
    assert resize_masks(line, (1, 2)).tolist() == [[[1, 4]]]  # centres at 1.5 and 4.5
    assert resize_masks(torch.zeros(0, 4, 6, dtype=torch.uint8), (8, 2)).shape == (0, 8, 2)


def test_crop__inside_of_the_image():
    pixels, target = sample()
    part, moved = crop(pixels, target, (1, 2, 3, 3))
    assert torch.equal(part, pixels[:, 1:4, 2:5])
    assert moved["boxes"].tolist() == [[-2, 0, 1, 2], [3, 2, 4, 3]]
    left = left_over(moved, 3, 3)
    assert left["boxes"].tolist() == [[0, 0, 1, 2]] and left["labels"].tolist() == [4]
    assert left["masks"].tolist() == [[[1, 0, 0], [1, 0, 0], [0, 0, 0]]]
    assert torch.allclose(left["area"], torch.tensor([5.0 / 3]))  # a third of the box is left
    assert left["keypoints"].tolist() == [[[0, 0, 0], [0.5, 1.5, 1]]]


def test_crop__beyond_the_image_shows_the_ground():
    pixels, target = sample()
    wide, moved = crop(pixels, target, (-1, -2, 7, 9))
    expected = torch.tensor(GROUND, dtype=torch.uint8)[:, None, None].repeat(1, 7, 9)
    expected[:, 1:5, 2:8] = pixels
    assert torch.equal(wide, expected)
    assert moved["masks"].sum() == target["masks"].sum() and moved["masks"][1, 4, 7] == 1
    assert moved["boxes"].tolist() == [[2, 2, 5, 4], [7, 4, 8, 5]]
    assert left_over(moved, 7, 9)["keypoints"].tolist() == [[[2.5, 2.5, 2], [4.5, 3.5, 1]], [[7.5, 4.5, 2], [0, 0, 0]]]
    # of which nothing is in the window, and of grey images
    assert crop_planes(torch.ones(1, 2, 2, dtype=torch.uint8), (-5, 0, 3, 2), 255).tolist() == [[[255] * 2] * 3]
    assert crop_planes(torch.ones(1, 2, 2, dtype=torch.uint8), (0, 4, 1, 2), 7).tolist() == [[[7, 7]]]
    assert geometry.ground_of(torch.zeros(1, 2, 2)) == (114,) and geometry.ground_of(torch.zeros(3, 2, 2)) == GROUND


def test_flip__swaps_left_and_right():
    pixels, target = sample()
    mirrored, moved = flip(pixels, target, {0: 1, 1: 0})
    assert torch.equal(mirrored, pixels[:, :, [5, 4, 3, 2, 1, 0]])
    assert moved["boxes"].tolist() == [[3, 1, 6, 3], [0, 3, 1, 4]]
    assert torch.equal(moved["masks"], target["masks"][:, :, [5, 4, 3, 2, 1, 0]])
    assert moved["keypoints"][0].tolist() == [[3.5, 2.5, 1], [5.5, 1.5, 2]]
    # What is not labelled is so under its new name too, wherever it went.
    assert left_over(moved, 4, 6)["keypoints"][1].tolist() == [[0, 0, 0], [0.5, 3.5, 2]]
    assert flip(pixels, target, {})[1]["keypoints"][0].tolist() == [[5.5, 1.5, 2], [3.5, 2.5, 1]]


def test_left_over__drops_slivers_and_objects_of_which_nothing_is_seen():
    _, target = sample()
    target["boxes"] = torch.tensor([[0.0, 1, 0.9, 3], [5, 3, 6, 4]])
    assert left_over(target, 4, 6)["labels"].tolist() == [7]
    target["masks"][1] = 0
    left = left_over(target, 4, 6)
    shapes = {key: tuple(value.shape) for key, value in left.items() if key != "image_id"}
    assert shapes == dict(boxes=(0, 4), labels=(0,), area=(0,), masks=(0, 4, 6), keypoints=(0, 2, 3))
    assert left["image_id"] == 9
