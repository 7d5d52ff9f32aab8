"""Faster, Mask and Keypoint R-CNN: everything in pixels of the image that came."""

import pytest
import torch
from torch import nn
from torchvision.ops import roi_align

from broadsight.dense import build
from broadsight.dense.heads.two_stage import RegionPool
from tests.refusals import refused

from .detectors import small, target

EXTRA = dict(faster_rcnn=set(), mask_rcnn={"masks"}, keypoint_rcnn={"keypoints", "keypoints_scores"})


@pytest.mark.parametrize("name", EXTRA)
def test_predictions__in_pixels_of_the_image_that_came(name):
    model = small(name, image_size=(48, 64), box_score_thresh=0.0).eval()
    seen = []
    model.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape[-2:])))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first, second = model([torch.rand(3, 100, 200), torch.rand(3, 60, 60)], [{"boxes": None}] * 2)
    assert seen == [(64, 64)]  # 32 x 64 and 48 x 48, padded
    assert set(first) == {"boxes", "labels", "scores"} | EXTRA[name]
    boxes = first["boxes"]
    assert len(boxes) == 5 and boxes.dtype == first["scores"].dtype == torch.float32
    assert boxes.min() >= 0 and boxes[:, 2].max() <= 200.001 and boxes[:, 3].max() <= 100.001
    assert boxes[:, 2].max() > 64  # not in pixels of the resized one
    if name == "mask_rcnn":
        assert first["masks"].shape == (5, 1, 100, 200) and second["masks"].shape == (5, 1, 60, 60)
        assert first["masks"].min() >= 0 and first["masks"].max() <= 1
    if name == "keypoint_rcnn":
        points = first["keypoints"]
        assert points.shape == (5, 4, 3) and first["keypoints_scores"].shape == (5, 4)
        low, high = boxes[:, None, :2] - 4, boxes[:, None, 2:] + 4  # a pixel of the resized image is three here
        assert ((points[..., :2] >= low) & (points[..., :2] <= high)).all()
    model.train()
    model([torch.rand(3, 96, 128)], [target(96, 128, [5, 5, 60, 60], labels=[1])])
    assert seen[1:] == [(96, 128)]


def test_predictions__none_is_an_empty_one():
    model = small("mask_rcnn", box_score_thresh=1.0).eval()
    with torch.no_grad():
        (found,) = model([torch.rand(3, 64, 80)])
    assert found["boxes"].shape == (0, 4) and found["masks"].shape == (0, 1, 64, 80)


def test_labels__background_is_zero():
    model = small("faster_rcnn", box_score_thresh=0.5).eval()
    nn.init.zeros_(model.roi_heads.box_predictor.cls_score.weight)
    model.roi_heads.box_predictor.cls_score.bias.data = torch.tensor([0.0, 0, 9, 0])
    with torch.no_grad():
        (found,) = model([torch.rand(3, 64, 80)])
    assert set(found["labels"].tolist()) == {2}


def test_region_pool__knows_strides_of_small_padded_images():
    """40 pixels padded to 64: 2 positions at stride 32 look like stride 16 to whoever divides."""
    pool = RegionPool((4, 8, 16, 32), 2)
    maps = {str(i): torch.randn(1, 3, 64 // stride, 64 // stride) for i, stride in enumerate((4, 8, 16, 32))}
    boxes = torch.tensor([[3.0, 5, 35, 38], [0.0, 0, 1000, 1000]])
    pooled = pool(maps, [boxes], [(40, 40)])
    small_box = roi_align(maps["0"], [boxes[:1]], 2, 1 / 4, 2)
    large_box = roi_align(maps["3"], [boxes[1:]], 2, 1 / 32, 2)
    torch.testing.assert_close(pooled, torch.cat([small_box, large_box]))


def test_keypoints__train_in_channels_last():
    model = small("keypoint_rcnn").to(memory_format=torch.channels_last).train()
    losses = model([torch.rand(3, 64, 80)], [target(64, 80, [4, 6, 30, 40], labels=[1])])
    assert losses["loss_keypoint"].isfinite() and losses["loss_keypoint"] > 0


def test_mistakes__are_said():
    refused("box_detections_per_image", build, "faster_rcnn", "test_resnet", 3, box_detections_per_image=5)
