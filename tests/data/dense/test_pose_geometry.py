"""Crops around persons, against hand-computed places, and dots that are drawn at keypoints: heat maps peak there."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from broadsight.data.dense.pose_geometry import PoseCrops, apply_affine, crop_affine, cut_out, encode, invert_affine
from broadsight.data.seeds import seed_transforms
from tests.refusals import refused

NAMES = ("nose", "left_hand", "right_hand")
SIZE = (64, 48)


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


def test_crop_affine__a_pixel_for_no_area_more_by_scale_and_turned_counter_clockwise_about_the_centre():
    matrix = crop_affine(torch.tensor([[5.0, 5.0, 5.0, 5.0]]), (256, 192), padding=1)
    assert apply_affine(torch.tensor([[[5.0, 5.0], [5.5, 5.0]]]), matrix).tolist() == [[[96, 128], [192, 128]]]
    boxes = torch.tensor([[0.0, 0.0, 30.0, 40.0]] * 2)
    matrices = crop_affine(boxes, (40, 30), padding=1, scale=torch.tensor([1.0, 2.0], dtype=torch.float64))
    corner = apply_affine(torch.zeros(2, 1, 2), matrices)
    assert corner.tolist() == [[[0, 0]], [[7.5, 10]]]
    boxes = torch.tensor([[0.0, 0.0, 30.0, 40.0]])
    right_of_it = torch.tensor([[[25.0, 20.0]]])  # 10 from the centre (15, 20)
    moved = apply_affine(right_of_it, crop_affine(boxes, (40, 30), padding=1, rotation=90))
    torch.testing.assert_close(moved, torch.tensor([[[15.0, 10.0]]]))  # now above it
    half = math.sqrt(50)
    both = crop_affine(boxes.repeat(2, 1), (40, 30), padding=1, rotation=torch.tensor([45.0, -45.0]))
    moved = apply_affine(right_of_it.repeat(2, 1, 1), both)
    torch.testing.assert_close(moved, torch.tensor([[[15 + half, 20 - half]], [[15 + half, 20 + half]]]))
    box, point, width = torch.tensor([[12.0, 7.0, 61.0, 90.0]]), torch.tensor([[[33.0, 40.0]]]), 101
    mirrored = torch.stack([width - box[:, 2], box[:, 1], width - box[:, 0], box[:, 3]], 1)
    x, y = apply_affine(point, crop_affine(box, (256, 192), rotation=20))[0, 0]
    point[..., 0] = width - point[..., 0]
    moved = apply_affine(point, crop_affine(mirrored, (256, 192), rotation=-20))[0, 0]
    torch.testing.assert_close(moved, torch.stack([192 - x, y]))


def test_affine__leads_back_keeps_visibility_and_takes_no_persons():
    boxes = torch.tensor([[3.0, 4.0, 50.0, 90.0], [10.0, 0.0, 11.0, 80.0]], dtype=torch.float64)
    matrices = crop_affine(boxes, rotation=torch.tensor([30.0, -75.0]), scale=torch.tensor([0.7, 1.3]))
    points = torch.rand(2, 5, 2, dtype=torch.float64) * 100
    torch.testing.assert_close(apply_affine(apply_affine(points, matrices), invert_affine(matrices)), points)
    matrix = torch.tensor([[[2.0, 0.0, 1.0], [0.0, 2.0, -1.0]]])
    assert apply_affine(torch.tensor([[[3.0, 4.0, 2.0]]]), matrix).tolist() == [[[7, 7, 2]]]
    nobody = apply_affine(torch.zeros(0, 17, 3), crop_affine(torch.zeros(0, 4)))
    assert nobody.shape == (0, 17, 3)
    assert invert_affine(torch.zeros(0, 2, 3)).shape == (0, 2, 3)
    maps, weights = encode(nobody)
    assert maps.shape == (0, 17, 64, 48) and weights.shape == (0, 17)


def test_encode__by_hand_mirrored_and_without_what_is_not_to_be_learned():
    # Cell (x 2, y 1) has its centre at (10, 6); sigma of 2 cells
    maps, weights = encode(torch.tensor([[[10.0, 6.0, 2.0]]]), (16, 24))
    assert maps.shape == (1, 1, 4, 6) and weights.tolist() == [[1]]
    expected = [1, math.exp(-4 / 8), math.exp(-(4 + 9) / 8)]
    assert maps[0, 0, [1, 1, 3], [2, 4, 5]].tolist() == pytest.approx(expected)
    maps, _ = encode(torch.tensor([[[8.0, 4.0, 1.0]]]), (16, 16), sigma=1)  # the corner of four cells
    torch.testing.assert_close(maps[0, 0, :2, 1:3], torch.full((2, 2), math.exp(-0.25)))
    points = torch.tensor([[[8.0, 8.0, 0.0], [-20.0, 8.0, 2.0], [-25.0, 8.0, 2.0], [8.0, 60.0, 1.0], [40.0, 8.0, 1.0]]])
    maps, weights = encode(points, (32, 16))
    # the outermost cells have their centres at 2 and at 14 (x) or 30 (y); three sigma are 24 pixels
    assert weights.tolist() == [[0, 1, 0, 0, 0]]
    assert (maps.amax((2, 3)) > 0).tolist() == [[False, True, False, False, False]]
    points = torch.rand(3, 5, 3) * 60 + 1
    mirrored = torch.cat([64 - points[..., :1], points[..., 1:]], -1)
    torch.testing.assert_close(encode(mirrored, (64, 64))[0], encode(points, (64, 64))[0].flip(-1))
    assert encode(points, (33, 30))[0].shape == (3, 5, 9, 8)


class Dots:
    """Images of persons with a red, a green and a blue dot at their keypoints; and some that are no use."""

    classes = ("person",)
    keypoint_names = NAMES

    def __len__(self) -> int:
        return 3

    def name(self, i: int) -> str:
        return f"{i}.png"

    def points(self, i: int) -> np.ndarray:
        x, y = 60 + 10 * i, 50
        return np.array([[x + 20.5, y + 10.5, 2], [x + 10.5, y + 40.5, 2], [x + 30.5, y + 40.5, 1]], np.float32)

    def open(self, i: int) -> Image.Image:
        pixels = np.zeros((140, 160, 3), np.uint8)
        for channel, (x, y, _) in enumerate(self.points(i)):
            pixels[int(y) - 2 : int(y) + 3, int(x) - 2 : int(x) + 3, channel] = 255
        return Image.fromarray(pixels)

    def target(self, i: int) -> dict:
        x = 60.0 + 10 * i
        boxes = torch.tensor([[0.0, 0, 9, 9], [x, 50, x + 40, 100], [0, 0, 50, 50], [9, 9, 9, 20], [1, 1, 5, 5]])
        points = torch.from_numpy(self.points(i))[None].repeat(5, 1, 1)
        points[0, :, 2] = 0  # of which no keypoint is labelled
        rows = torch.tensor([True, i != 1, True, True, False])
        target = dict(labels=torch.ones(5).long(), iscrowd=torch.tensor([0, 0, 1, 0, 0]), keypoints=points)
        target["area"] = torch.tensor([1.0, 900, 3, 4, 5])
        target = {key: value[rows] for key, value in target.items()}
        boxes = tv_tensors.BoundingBoxes(boxes[rows], format="XYXY", canvas_size=(140, 160))
        return target | dict(boxes=boxes, image_id=100 + i)

    def __getitem__(self, i: int):
        return self.open(i), self.target(i)


def crops(**changes) -> PoseCrops:
    return PoseCrops(Dots(), **{"training": False, "input_size": SIZE, "pairs": ((1, 2),), **changes})


def peak(heatmap: torch.Tensor) -> tuple[int, int]:
    row, column = divmod(int(heatmap.argmax()), heatmap.shape[1])
    return column, row


def test_crops__of_labelled_persons_alone_by_hand():
    data = crops()
    assert len(data) == 2 and [data.name(i) for i in range(2)] == ["0.png#1", "2.png#1"]
    pixels, target = data[1]
    assert pixels.shape == (3, *SIZE) and pixels.dtype == torch.uint8
    assert target["heatmaps"].shape == (3, 16, 12) and target["weights"].tolist() == [1, 1, 1]
    meta = target["meta"]
    expected = dict(image=2, place=1, image_id=102, label=1, area=900.0, score=1.0)
    assert {key: meta[key] for key in expected} == expected
    assert meta["box"].tolist() == [80, 50, 120, 100]
    assert sum(1 for _ in data) == 2
    # A box of 40 x 50 grows to 40 x 53.3 of aspect 4 : 3, and by 1.25 to 50 x 66.7, so by 0.96 to 48 x 64.
    _, target = crops()[0]
    assert torch.allclose(target["meta"]["matrix"], torch.tensor([[1 / 0.96, 0, 55], [0, 1 / 0.96, 75 - 32 / 0.96]]))
    x, y = (80.5 - 55) * 0.96, (60.5 - 75) * 0.96 + 32  # of the nose in the crop: 24.48, 18.08
    assert peak(target["heatmaps"][0]) == (int(x // 4), int(y // 4))
    value = np.exp(-(((6 - (x / 4 - 0.5)) ** 2 + (4 - (y / 4 - 0.5)) ** 2) / 8))
    assert abs(float(target["heatmaps"][0, 4, 6]) - value) < 1e-5


@pytest.mark.parametrize(("changes", "mirrored"), [({}, {False, True}), (dict(hflip=0.0), {False})])
def test_training__heat_is_where_the_dots_are(changes, mirrored):
    data = crops(training=True, **changes)
    seen, angles, zooms, turned = 0, [], [], set()
    for seed in range(100):
        seed_transforms(seed)
        pixels, target = data[seed % 2]
        matrix = target["meta"]["matrix"]
        flipped = bool(torch.linalg.det(matrix[:, :2]) < 0)
        turned.add(flipped)
        angles.append(np.degrees(np.arctan2(float(matrix[1, 0]), float(matrix[1, 1]))))
        zooms.append(float(matrix[:, 1].norm()) * 0.96)
        channels = (0, 2, 1) if flipped else (0, 1, 2)  # the left hand's dot is the right hand's in the mirror
        for number, channel in enumerate(channels):
            if not target["weights"][number]:
                assert target["heatmaps"][number].max() == 0
                continue
            dot = (pixels[channel] > 127).nonzero().float()
            edges = torch.tensor(SIZE) - 1
            if not len(dot) or (dot == 0).any() or (dot == edges).any():  # cut off, if only in part
                continue
            seen += 1
            y, x = (dot.mean(0) + 0.5).tolist()
            column, row = peak(target["heatmaps"][number])
            assert abs((column + 0.5) * 4 - x) <= 3 and abs((row + 0.5) * 4 - y) <= 3
            back = apply_affine(torch.tensor([[[x, y]]]), matrix[None])[0, 0]
            truth = torch.from_numpy(Dots().points(target["meta"]["image"])[channel, :2])
            assert (back - truth).abs().max() < 0.6
    assert seen > 150 and turned == mirrored
    assert 20 <= sum(abs(angle) < 1e-3 for angle in angles) <= 60 and max(map(abs, angles)) <= 80.01
    assert np.std(angles) > 15
    assert min(zooms) >= 0.699 and max(zooms) <= 1.301 and np.std(zooms) > 0.1


def test_training__is_a_function_of_the_seed(monkeypatch):
    data, results = crops(training=True), []
    for seed in (1, 1, 2):
        seed_transforms(seed)
        results.append(data[0])
    (first, one), (same, two), (other, _) = results
    assert torch.equal(first, same) and torch.equal(one["heatmaps"], two["heatmaps"]) and not torch.equal(first, other)
    monkeypatch.setattr(Dots, "__len__", lambda self: 0)
    refused("no object has a labelled keypoint", crops)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_cut_out__of_the_identity_and_beyond(mode):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (6, 5, 3), np.uint8)).convert(mode)
    pixels = torch.from_numpy(np.array(image).reshape(6, 5, -1)).permute(2, 0, 1)
    assert torch.equal(cut_out(image, torch.tensor([[1.0, 0, 0], [0, 1, 0]]), (6, 5)), pixels)
    moved = cut_out(image, torch.tensor([[1.0, 0, -2], [0, 1, 0]]), (6, 7))
    assert torch.equal(moved[:, :, 2:], pixels)
    assert moved[:, :, 0].unique(dim=1).flatten().tolist() == ([124, 116, 104] if mode == "RGB" else [114])
