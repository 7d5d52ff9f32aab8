"""Scenes as dense data: targets that agree with what is drawn."""

import numpy as np
import pytest
import torch
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes

from broadsight.data import scenes as scenes_module
from broadsight.data.scenes import Scenes
from broadsight.data.scenes.objects import CLASSES, KEYPOINTS
from broadsight.data.scenes.targets import SKELETON, SceneMasks, SceneObjects


@pytest.fixture
def scenes():
    return Scenes(12, size=(48, 64), seed=3)


def test_targets__are_those_of_the_masks_whose_numbers_are_those_of_objects(scenes):
    data = SceneObjects(scenes, keypoints=True)
    assert (len(data), data.name(3), data.classes) == (12, "scenes/train/000003", CLASSES)
    assert data.category_ids == {label: label for label in range(1, len(CLASSES) + 1)}
    assert data.keypoint_names == KEYPOINTS and set(sum(SKELETON, ())) == set(range(len(KEYPOINTS)))
    seen = 0
    for i in range(len(data)):
        image, target = data[i]
        assert (image.mode, image.size) == ("RGB", (64, 48))
        boxes, masks = target["boxes"], target["masks"]
        assert boxes.canvas_size == (48, 64) and boxes.format is tv_tensors.BoundingBoxFormat.XYXY
        assert isinstance(masks, tv_tensors.Mask) and masks.dtype == torch.uint8
        inner = masks_to_boxes(masks.as_subclass(torch.Tensor))
        assert torch.equal(boxes.as_subclass(torch.Tensor), inner + torch.tensor([0.0, 0, 1, 1]))
        assert target["area"].tolist() == masks.sum((1, 2)).tolist()
        assert target["iscrowd"].tolist() == [0] * len(boxes) and target["image_id"] == i
        assert target["labels"][0] == scenes.label(i) + 1  # the main object comes first
        assert target["keypoints"].shape == (len(boxes), len(KEYPOINTS), 3)
        for mask, points in zip(masks, target["keypoints"], strict=True):
            for x, y, visible in points.tolist():
                near = mask[max(0, int(y) - 1) : int(y) + 2, max(0, int(x) - 1) : int(x) + 2]
                assert near.any() or visible < 2
                seen += visible == 2
    assert seen > 60
    pixels, objects = SceneMasks(scenes), SceneObjects(scenes)
    assert pixels.classes == ("background", *CLASSES)
    for i in range(len(pixels)):
        mask, target = pixels.target(i), objects.target(i)
        assert isinstance(mask, tv_tensors.Mask) and mask.dtype == torch.int64
        assert torch.equal(mask, (target["masks"] * target["labels"][:, None, None]).sum(0))  # none overlap


def test_objects__without_a_visible_pixel_are_dropped(scenes, monkeypatch):
    scene = scenes.scene(0)
    masks = scene.masks.copy()
    masks[0] = False  # as when an occluder covers all of the main object
    hidden = scenes_module.Scene(**{**scene.__dict__, "masks": masks})
    monkeypatch.setattr(Scenes, "scene", lambda self, i: hidden)
    target = SceneObjects(scenes, keypoints=True)[0][1]
    count = len(scene.labels) - 1
    assert target["labels"].tolist() == (scene.labels[1:] + 1).tolist()
    assert {len(target[key]) for key in ("boxes", "area", "iscrowd", "masks", "keypoints")} == {count}
    nothing = scenes_module.Scene(**{**scene.__dict__, "masks": np.zeros_like(masks)})
    monkeypatch.setattr(Scenes, "scene", lambda self, i: nothing)
    assert SceneObjects(scenes)[0][1]["boxes"].shape == (0, 4)


@pytest.mark.parametrize("without", [None, "salient"])
def test_target__is_that_of_the_scene_though_nothing_is_coloured(without):
    scenes = Scenes(8, size=40, without=without)
    objects, pixels = SceneObjects(scenes, keypoints=True), SceneMasks(scenes)
    for i in range(8):
        torch.testing.assert_close(objects[i][1], objects.target(i), rtol=0, atol=0)
        assert torch.equal(pixels[i][1], pixels.target(i))


@pytest.mark.parametrize("kind", [SceneObjects, SceneMasks])
def test_items__end_may_be_grey_and_are_drawn_once(scenes, kind, monkeypatch):
    data = kind(scenes, channels=1)
    assert data.open(0).mode == "L" and [image.mode for image, _ in data] == ["L"] * 12
    data = kind(scenes)
    photo, target = np.array(data.open(5)), data.target(5)
    drawn, draw = [], Scenes.scene
    monkeypatch.setattr(Scenes, "scene", lambda self, i: drawn.append(i) or draw(self, i))
    monkeypatch.setattr(Scenes, "open", None)
    image, again = data[5]
    assert drawn == [5] and np.array_equal(image, photo)
    torch.testing.assert_close(again, target, rtol=0, atol=0)
