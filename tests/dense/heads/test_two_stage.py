"""Faster, Mask, Keypoint and Cascade R-CNN: empty predictions, labels, pooling of regions, and each stage by hand."""

import math

import pytest
import torch
from torch import nn
from torchvision.ops import roi_align

from broadsight.dense.heads.two_stage import OneBoxPredictor, RegionPool, refined

from .small import small, target


def test_predictions__labels_count_the_background_and_none_is_an_empty_one():
    model = small("mask_rcnn", box_score_thresh=0.5).eval()
    nn.init.zeros_(model.roi_heads.box_predictor.cls_score.weight)
    for sure, labels in ((9.0, {2}), (0.0, set())):
        model.roi_heads.box_predictor.cls_score.bias.data = torch.tensor([0, 0, sure, 0])
        (found,) = model([torch.rand(3, 64, 80)])
        assert set(found["labels"].tolist()) == labels
    assert found["boxes"].shape == (0, 4) and found["masks"].shape == (0, 1, 64, 80)


def test_regions__strides_of_small_padded_images_channels_last_and_one_box_for_all_classes():
    """40 pixels padded to 64: 2 positions at stride 32 look like stride 16 to whoever divides."""
    pool = RegionPool((4, 8, 16, 32), 2)
    maps = {str(i): torch.randn(1, 3, 64 // stride, 64 // stride) for i, stride in enumerate((4, 8, 16, 32))}
    boxes = torch.tensor([[3.0, 5, 35, 38], [0.0, 0, 1000, 1000]])
    pooled = pool(maps, [boxes], [(40, 40)])
    small_box = roi_align(maps["0"], [boxes[:1]], 2, 1 / 4, 2)
    large_box = roi_align(maps["3"], [boxes[1:]], 2, 1 / 32, 2)
    torch.testing.assert_close(pooled, torch.cat([small_box, large_box]))
    model = small("keypoint_rcnn").to(memory_format=torch.channels_last).train()
    losses = model([torch.rand(3, 64, 80)], [target(64, 80, [4, 6, 30, 40], labels=[1])])
    assert losses["loss_keypoint"].isfinite() and losses["loss_keypoint"] > 0
    scores, deltas = OneBoxPredictor(6, 5)(torch.randn(2, 6))
    assert scores.shape == (2, 5) and deltas.shape == (2, 20)
    parts = deltas.unflatten(1, (5, 4))
    torch.testing.assert_close(parts, parts[:, :1].expand(2, 5, 4))


def says(predictor, scores=None, deltas=None):
    """Have a box predictor say the same of every box."""
    if scores is not None:
        nn.init.zeros_(predictor.cls_score.weight)
        predictor.cls_score.bias.data = torch.tensor(scores, dtype=torch.float)
    if deltas is not None:
        nn.init.zeros_(predictor.bbox_pred.weight)
        predictor.bbox_pred.bias.data = torch.tensor(deltas, dtype=torch.float).flatten()


def test_refined__by_the_class_of_the_box():
    steps = small("cascade").roi_heads.steps
    matchers = [step.proposal_matcher for step in steps]
    assert [(one.high_threshold, one.low_threshold) for one in matchers] == [(0.5, 0.5), (0.6, 0.6), (0.7, 0.7)]
    assert [step.box_coder.weights for step in steps] == [(10, 10, 5, 5), (20, 20, 10, 10), (30, 30, 15, 15)]
    step = steps[1]  # codes with 20 and 10
    boxes = [torch.tensor([[10.0, 10, 30, 30], [10, 10, 30, 30]]), torch.tensor([[40.0, 40, 60, 60]])]
    deltas = torch.zeros(3, 4, 4)
    deltas[:, 1, 0] = 4.0  # 4 / 20 of 20 pixels: 4 to the right
    deltas[:, 2, 1] = -4.0  # 4 up
    deltas[:, 3, 2] = 10 * math.log(2)  # twice as wide
    logits = torch.tensor([[9.0, 1, 0, 0], [0.0, 0, 9, 0], [0.0, 0, 0, 9]])
    shapes = [(100, 100), (100, 65)]
    first, second = refined(step, boxes, logits, deltas.flatten(1), shapes)
    # The background is no class to refine for, and what leaves the image is cut off.
    torch.testing.assert_close(first, torch.tensor([[14.0, 10, 34, 30], [10, 6, 30, 26]]))
    torch.testing.assert_close(second, torch.tensor([[30.0, 40, 65, 60]]))
    first, second = refined(step, boxes, logits, deltas.flatten(1), shapes, labels=torch.tensor([3, 0, 1]))
    torch.testing.assert_close(first, torch.tensor([[0.0, 10, 40, 30], [10, 6, 30, 26]]))
    torch.testing.assert_close(second, torch.tensor([[44.0, 40, 64, 60]]))


def test_training__goes_on_with_refined_boxes_and_weighs_losses_by_stage():
    model = small("cascade", box_batch_size_per_image=512, box_positive_fraction=1.0).train()
    steps = model.roi_heads.steps
    says(steps[0].box_predictor, deltas=[[1.0, 0, 0, 0]] * 4)  # a tenth of its width to the right
    says(steps[1].box_predictor, deltas=[[0.0] * 4] * 4)
    seen = []
    steps[0].box_roi_pool.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1][0].clone()))
    truth = target(64, 80, [4, 6, 30, 40], labels=[2])
    model([torch.rand(3, 64, 80)], [truth])
    first, second, third = seen
    shift = (first[:, 2] - first[:, 0]) / 10
    moved = first + torch.stack([shift, shift * 0, shift, shift * 0], 1)
    moved[:, 0::2] = moved[:, 0::2].clamp(max=80)
    torch.testing.assert_close(second, torch.cat([moved, truth["boxes"]]))
    torch.testing.assert_close(third, torch.cat([second, truth["boxes"]]))
    truth = [target(64, 80, [4, 6, 30, 40], [20, 20, 50, 60], labels=[1, 3])]
    images, found = [torch.rand(3, 64, 80)], []
    for weights in ((1.0, 1.0, 1.0), (1.0, 0.5, 0.25)):
        torch.manual_seed(0)
        model = small("cascade", loss_weights=weights).train()
        torch.manual_seed(0)
        found.append(model(images, truth))
    plain, weighted = found
    for number, weight in ((1, 1.0), (2, 0.5), (3, 0.25)):
        for name in ("loss_classifier", "loss_box_reg", "loss_mask"):
            torch.testing.assert_close(weighted[f"{name}_{number}"], weight * plain[f"{name}_{number}"])
    torch.testing.assert_close(weighted["loss_objectness"], plain["loss_objectness"])


def test_predictions__mean_of_scores_and_masks_on_boxes_of_the_last():
    model = small("cascade", num_classes=1, box_score_thresh=0.0, image_size=(64, 80)).eval()
    steps = model.roi_heads.steps
    for step, share in zip(steps, (0.2, 0.5, 0.8), strict=True):
        says(step.box_predictor, scores=[0.0, math.log(share / (1 - share))], deltas=[[0.0] * 4] * 2)
        nn.init.zeros_(step.mask_predictor.mask_fcn_logits.weight)
        nn.init.constant_(step.mask_predictor.mask_fcn_logits.bias, math.log((share - 0.1) / (1.1 - share)))
    (found,) = model([torch.rand(3, 128, 160)])  # halved inside
    torch.testing.assert_close(found["scores"], torch.full((5,), 0.5))
    assert found["masks"].shape == (5, 1, 128, 160)
    left, top, right, bottom = found["boxes"][0].int().tolist()
    centre = found["masks"][0, 0, (top + bottom) // 2, (left + right) // 2]
    assert centre.item() == pytest.approx(0.4, abs=1e-5)  # of .1, .4, .7
    says(steps[2].box_predictor, deltas=[[0.0, 0, -15 * math.log(2), 0]] * 2)  # the last halves the widths
    seen = []
    steps[0].box_roi_pool.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1][0].clone()))
    (halved,) = model([torch.rand(3, 128, 160)])
    allowed = 2 * (seen[-1][:, 2] - seen[-1][:, 0]) / 2  # in pixels of the image that came
    widths = halved["boxes"][:, 2] - halved["boxes"][:, 0]
    assert ((widths[:, None] - allowed).abs().amin(1) < 1e-3).all()
