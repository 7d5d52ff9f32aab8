"""Faster, Mask and Keypoint R-CNN: empty predictions, labels, pooling of regions."""

import torch
from torch import nn
from torchvision.ops import roi_align

from broadsight.dense.heads.two_stage import RegionPool

from .small import small, target


def test_predictions__labels_count_the_background_and_none_is_an_empty_one():
    model = small("mask_rcnn", box_score_thresh=0.5).eval()
    nn.init.zeros_(model.roi_heads.box_predictor.cls_score.weight)
    for sure, labels in ((9.0, {2}), (0.0, set())):
        model.roi_heads.box_predictor.cls_score.bias.data = torch.tensor([0, 0, sure, 0])
        with torch.no_grad():
            (found,) = model([torch.rand(3, 64, 80)])
        assert set(found["labels"].tolist()) == labels
    assert found["boxes"].shape == (0, 4) and found["masks"].shape == (0, 1, 64, 80)


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
