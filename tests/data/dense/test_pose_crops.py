"""Crops of persons: dots that are drawn at keypoints are where heat maps have their peaks, and the way back holds."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from broadsight.data.dense.pose_crops import PoseCrops, cut_out
from broadsight.data.dense.pose_geometry import apply_affine
from broadsight.data.seeds import seed_transforms
from tests.refusals import refused

NAMES = ("nose", "left_hand", "right_hand")
SIZE = (64, 48)


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


def test_crops__of_labelled_persons_alone():
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


def test_evaluation__by_hand():
    """A box of 40 x 50 grows to 40 x 53.3 of aspect 4 : 3, and by 1.25 to 50 x 66.7, so by 0.96 to 48 x 64."""
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
