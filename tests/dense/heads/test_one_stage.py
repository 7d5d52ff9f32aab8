"""RetinaNet, FCOS and SSDLite: labels, raw outputs, anchors, the pyramid, and the samples of ATSS by a slow loop."""

import math

import pytest
import torch
from torch import nn
from torchvision.models.detection.image_list import ImageList

from broadsight.dense.detector import FeaturePyramid, SteadyBatchNorm2d, StridedAnchors
from broadsight.dense.heads.one_stage import assign, centerness
from broadsight.dense.stages import open_stages
from tests.refusals import refused

from .small import ONE_STAGE, small, target


@pytest.mark.parametrize("kind", ONE_STAGE)
def test_predictions__hold_under_bfloat16(kind):
    model = small(kind, score_thresh=0.0).eval()
    images = [torch.rand(3, 64, 96)]
    exact = model.raw(torch.stack(images))
    with torch.autocast("cpu", torch.bfloat16):
        rough = model.raw(torch.stack(images))
        (found,) = model(images)
    assert {x.dtype for x in rough.values()} == {torch.float32}
    for name, x in exact.items():
        torch.testing.assert_close(rough[name], x, atol=0.05, rtol=0.05)
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["retinanet", "atss", "fcos"])
def test_labels__count_from_one_outside_and_zero_inside(kind):
    model = small(kind, score_thresh=0.2)
    bias = model.head.classification_head.cls_logits.bias
    assert bias.shape == (3 * (9 if kind == "retinanet" else 1),)
    bias.data = torch.tensor([-9.0, 9.0, -9.0]).repeat(len(bias) // 3)  # sure of the second
    (found,) = model.eval()([torch.rand(3, 64, 64)])
    assert set(found["labels"].tolist()) == {2}
    model.train()
    given = [target(64, 64, [10, 10, 50, 50], labels=[label]) for label in (1, 2, 3)]
    losses = [model([torch.ones(3, 64, 64) / 2], [one])["classification"] for one in given]
    assert losses[1] < losses[0] and losses[1] < losses[2]
    assert [int(one["labels"]) for one in given] == [1, 2, 3]  # what was given is not changed


def test_raw__normalises_by_the_backbones_mean_and_std_and_counts_anchors_and_background():
    model = small("retinanet").eval()
    seen = []
    model.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    mean, std = (torch.tensor(x)[:, None, None] for x in (model.stages.mean, model.stages.std))
    raw = model.raw((mean + 2 * std).expand(2, 3, 64, 96))
    torch.testing.assert_close(seen[0], torch.full((2, 3, 64, 96), 2.0))
    positions = 8 * 12 + 4 * 6 + 2 * 3 + 1 * 2 + 1
    assert raw["cls_logits"].shape == (2, 9 * positions, 3) and raw["bbox_regression"].shape == (2, 9 * positions, 4)
    refused("an image has 1 channels; the model takes 3", model, [torch.rand(1, 64, 64)])
    deltas = small("fcos").eval().raw(torch.rand(1, 3, 64, 64))["bbox_regression"]  # begins a stride from each side
    assert deltas.min() > 0 and deltas.mean().item() == pytest.approx(1, abs=0.3)
    model = small("ssdlite", score_thresh=0.5)
    assert model.raw(torch.rand(1, 3, 64, 96))["cls_logits"].shape[-1] == 4
    for block in model.head.classification_head.module_list:
        nn.init.zeros_(block[1].weight)
        block[1].bias.data = torch.tensor([0.0, -9, -9, 9]).repeat(6)
    (found,) = model.eval()([torch.rand(3, 64, 96)])
    assert set(found["labels"].tolist()) == {3}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_STAGE)
def test_raw__exports(kind):
    model, images = small(kind).eval(), torch.rand(1, 3, 64, 96)
    others = torch.rand(1, 3, 64, 96)
    expected, model.forward = model.raw(others), model.raw
    torch.testing.assert_close(torch.export.export(model, (images,)).module()(others), expected)


def test_anchors__lie_at_true_strides():
    strides = (8, 128)
    grid = StridedAnchors(strides, 4, (0.5, 1.0, 2.0), per_octave=3)
    maps = [torch.zeros(1, 1, 100, 100), torch.zeros(1, 1, 7, 7)]  # 800 / 7 is 114
    (anchors,) = grid(ImageList(torch.zeros(1, 3, 800, 800), [(800, 800)]), maps)
    assert anchors.shape == (9 * (100**2 + 7**2), 4)
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    assert centres[9].tolist() == [8, 0] and centres[-1].tolist() == [768, 768]
    sides = (anchors[:9, 2:] - anchors[:9, :2]).prod(1).sqrt()
    wanted = torch.tensor([32, 40, 50]).repeat(3)
    torch.testing.assert_close(sides, wanted.float(), atol=1.0, rtol=0)


@pytest.mark.parametrize("extra, seen", [("c5", True), ("p5", False)])
def test_pyramid__sixth_map_is_made_of_what_was_asked_for(extra, seen):
    """Also if the last map has just as many channels as the pyramid."""
    stages = open_stages("test_resnet")
    pyramid = FeaturePyramid(stages, 8, extra, width=stages.channels[-1]).eval()
    for layer in (pyramid.fpn.inner_blocks[-1], pyramid.fpn.layer_blocks[-1]):
        nn.init.zeros_(layer[0].weight)  # the fifth map of the pyramid is zero
    maps = pyramid(torch.randn(1, 3, 64, 64))
    assert list(maps) == ["0", "1", "2", "p6", "p7"] and pyramid.strides == (8, 16, 32, 64, 128)
    assert not maps["2"].any() and bool(maps["p6"].any()) == seen
    # What only lower maps need is frozen
    pyramid = FeaturePyramid(open_stages("test_resnet", neck="tokens"), 8, "p5", width=32)
    frozen = {name for name, p in pyramid.named_parameters() if not p.requires_grad}
    assert frozen and all(".0." in name and name.startswith("stages.neck.") for name in frozen)


def test_batch_norm__single_value_by_running_statistics():
    norm = SteadyBatchNorm2d(2)
    norm.running_mean.fill_(1), norm.running_var.fill_(4)
    out = norm(torch.full((1, 2, 1, 1), 5.0))
    torch.testing.assert_close(out, torch.full((1, 2, 1, 1), 2.0), atol=1e-4, rtol=0)
    assert norm.running_mean.tolist() == [1, 1]
    x = torch.randn(3, 2, 2, 2)
    torch.testing.assert_close(norm(x), nn.BatchNorm2d(2)(x))


def square(x, y, side):
    """Around a centre."""
    return [x - side / 2, y - side / 2, x + side / 2, y + side / 2]


def test_assign__k_nearest_inside_with_iou_above_mean_and_deviation_and_the_highest_of_two_objects():
    # Object 0..10. Anchors of side 10 shifted by 0, 2, 5 and 8: IoU 1, 80/120, 50/150, 20/180; mean .528, deviation
    # .390 (n - 1): only the first exceeds .918.
    object_ = torch.tensor([[0.0, 0, 10, 10]])
    level = torch.tensor([square(5 + shift, 5, 10) for shift in (0, 2, 5, 8)])
    assert assign([level], object_).tolist() == [0, -1, -1, -1]
    # With k=2 the candidates are shifts 2 and 3 of the first level: IoU 80/120 and 70/130; mean .603, deviation .091:
    # .693 is more than either, nothing is positive.
    first = torch.tensor([square(7, 5, 10), square(8, 5, 10), square(14, 5, 10)])
    assert assign([first], object_, k=2).tolist() == [-1, -1, -1]
    # All three: the third, IoU 10/190, widens the deviation too: .419 + .324 = .743.
    assert assign([first], object_, k=3).tolist() == [-1, -1, -1]
    # Four candidates, one exact: IoU 1, .667, .538, .053; mean .564, deviation .393: the exact one alone.
    exact = torch.tensor([square(5, 5, 10)])
    assert assign([first, exact], object_, k=3).tolist() == [-1, -1, -1, 0]
    # Twice the same anchor: deviation zero, both are at the threshold.
    assert assign([exact, exact], object_, k=1).tolist() == [0, 0]
    # One candidate each: IoU is its own threshold. The second's centre (10, 5) is on the border.
    assert assign([torch.tensor([square(9, 5, 10)])], object_).tolist() == [0]
    assert assign([torch.tensor([square(10, 5, 10)])], object_).tolist() == [-1]
    anchors = torch.tensor([square(5, 5, 10)])
    objects = torch.tensor([[0.0, 0, 10, 5.5], [0.0, 0, 10, 9]])  # IoU .55 and .9
    assert assign([anchors], objects).tolist() == [1]
    assert assign([anchors], objects.flip(0)).tolist() == [0]
    assert assign([torch.rand(3, 4), torch.rand(2, 4)], torch.zeros(0, 4)).tolist() == [-1] * 5


def slow_assign(levels, objects, k):
    """As the paper's algorithm is written."""

    def iou(a, b):
        overlap = max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))
        return overlap / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - overlap)

    def centre(a):
        return (a[0] + a[2]) / 2, (a[1] + a[3]) / 2

    flat = [anchor for level in levels for anchor in level]
    best = [(-1.0, -1)] * len(flat)
    for number, object_ in enumerate(objects):
        candidates, start = [], 0
        for level in levels:
            order = sorted(range(len(level)), key=lambda i, level=level: math.dist(centre(level[i]), centre(object_)))
            candidates += [start + i for i in order[:k]]
            start += len(level)
        found = [iou(flat[i], object_) for i in candidates]
        mean = sum(found) / len(found)
        threshold = mean + math.sqrt(sum((x - mean) ** 2 for x in found) / (len(found) - 1))
        for i, overlap in zip(candidates, found, strict=True):
            x, y = centre(flat[i])
            inside = object_[0] < x < object_[2] and object_[1] < y < object_[3]
            if overlap >= threshold and inside and overlap > best[i][0]:
                best[i] = (overlap, number)
    return [number for _, number in best]


@pytest.mark.parametrize("k", [1, 4, 9])
def test_assign__agrees_with_a_slow_loop(k):
    generator = torch.Generator().manual_seed(k)
    strides = (8, 16, 32)
    grid = StridedAnchors(strides, 4, offset=0.5)
    maps = [torch.zeros(1, 1, 96 // stride, 128 // stride) for stride in strides]
    anchors = grid(ImageList(torch.zeros(1, 3, 96, 128), [(96, 128)]), maps)[0].double()
    anchors = anchors + torch.rand(anchors.shape, generator=generator, dtype=torch.float64)  # no ties of distances
    corners = torch.rand(12, 2, generator=generator, dtype=torch.float64) * torch.tensor([80, 50])
    objects = torch.cat([corners, corners + 5 + 60 * torch.rand(12, 2, generator=generator, dtype=torch.float64)], 1)
    levels = list(anchors.split([x.shape[-2] * x.shape[-1] for x in maps]))
    wanted = slow_assign([level.tolist() for level in levels], objects.tolist(), k)
    assert len(set(wanted)) > 6  # some are found at all
    assert assign(levels, objects, k).tolist() == wanted


def test_losses__of_a_head_that_says_nothing():
    """All logits zero and deltas zero: focal loss of p = .5, boxes are the anchors, centerness says .5."""
    anchors = torch.tensor([square(5, 5, 2), square(2, 5, 2), square(2, 1, 20)])
    central = centerness(anchors, torch.tensor([[0.0, 0, 10, 10]] * 3))
    torch.testing.assert_close(central, torch.tensor([1.0, 0.5, 1 / 6]))  # sqrt(2/8 * 1) and sqrt(2/8 * 1/9)
    model = small("atss", 2).train()
    for layer in (model.head.classification_head.cls_logits, model.head.regression_head.bbox_ctrness):
        torch.nn.init.zeros_(layer.weight), torch.nn.init.zeros_(layer.bias)
    torch.nn.init.zeros_(model.head.regression_head.bbox_reg.weight)
    box = torch.tensor([[20.0, 20, 84, 84]])
    losses = model([torch.rand(3, 96, 128)], [{"boxes": box, "labels": torch.tensor([2])}])
    strides = (8, 16, 32, 64, 128)
    sizes = [(12, 16), (6, 8), (3, 4), (2, 2), (1, 1)]
    levels = []
    for stride, (rows, columns) in zip(strides, sizes, strict=True):
        places = [((x + 0.5) * stride, (y + 0.5) * stride) for y in range(rows) for x in range(columns)]
        levels.append(torch.tensor([square(x, y, 8 * stride) for x, y in places]))
    anchors = torch.cat(levels)
    positive = assign(levels, box) == 0
    count = int(positive.sum())
    assert count > 1
    logarithm = math.log(2)
    focal = 0.25 * logarithm * (0.25 * count + 0.75 * (2 * len(anchors) - count)) / count
    assert losses["classification"].item() == pytest.approx(focal, rel=1e-5)
    assert losses["bbox_ctrness"].item() == pytest.approx(logarithm, rel=1e-5)
    own = anchors[positive]
    overlap = (torch.minimum(own[:, 2:], box[:, 2:]) - torch.maximum(own[:, :2], box[:, :2])).clamp(min=0).prod(1)
    hull = (torch.maximum(own[:, 2:], box[:, 2:]) - torch.minimum(own[:, :2], box[:, :2])).prod(1)
    union = (own[:, 2:] - own[:, :2]).prod(1) + 64**2 - overlap
    giou = overlap / union - (hull - union) / hull
    weights = centerness(own, box.expand(count, 4))
    expected = float(2 * ((1 - giou) * weights).sum() / weights.sum())
    assert losses["bbox_regression"].item() == pytest.approx(expected, rel=1e-4)


def test_scores__are_geometric_means_with_centerness():
    model = small("atss", 2, score_thresh=0.3).eval()
    head = model.head
    for layer in (head.classification_head.cls_logits, head.regression_head.bbox_ctrness):
        torch.nn.init.zeros_(layer.weight)
    head.classification_head.cls_logits.bias.data = torch.tensor([-9.0, math.log(0.8 / 0.2)])
    torch.nn.init.constant_(head.regression_head.bbox_ctrness.bias, math.log(0.2 / 0.8))
    (found,) = model([torch.rand(3, 64, 64)])
    assert set(found["labels"].tolist()) == {2}
    torch.testing.assert_close(found["scores"], torch.full_like(found["scores"], 0.4))
    model = small("atss", 2, centerness=False).train()  # without its branch
    truth = [target(64, 64, [4, 4, 40, 40], labels=[1])]
    assert set(model([torch.rand(3, 64, 64)], truth)) == {"classification", "bbox_regression"}
    assert set(model.raw(torch.rand(1, 3, 64, 64))) == {"cls_logits", "bbox_regression"}
