"""Samples by hand and by a slow loop; losses and scores of the head by hand."""

import math

import pytest
import torch
from torchvision.models.detection.image_list import ImageList

from broadsight.dense import build
from broadsight.dense.detector import StridedAnchors
from broadsight.dense.heads.one_stage import assign, centerness


def square(x, y, side):
    """Around a centre."""
    return [x - side / 2, y - side / 2, x + side / 2, y + side / 2]


def test_assign__takes_what_exceeds_mean_and_deviation():
    # Object 0..10. Anchors of side 10 shifted by 0, 2, 5 and 8: IoU 1, 80/120, 50/150, 20/180; mean .528, deviation
    # .390 (n - 1): only the first exceeds .918.
    level = torch.tensor([square(5 + shift, 5, 10) for shift in (0, 2, 5, 8)])
    assert assign([level], torch.tensor([[0.0, 0, 10, 10]])).tolist() == [0, -1, -1, -1]


def test_assign__k_nearest_of_each_level_set_the_threshold():
    # With k=2 the candidates are shifts 2 and 3 of the first level: IoU 80/120 and 70/130; mean .603, deviation .091:
    # .693 is more than either, nothing is positive.
    object_ = torch.tensor([[0.0, 0, 10, 10]])
    first = torch.tensor([square(7, 5, 10), square(8, 5, 10), square(14, 5, 10)])
    assert assign([first], object_, k=2).tolist() == [-1, -1, -1]
    # All three: the third, IoU 10/190, widens the deviation too: .419 + .324 = .743.
    assert assign([first], object_, k=3).tolist() == [-1, -1, -1]
    # Four candidates, one exact: IoU 1, .667, .538, .053; mean .564, deviation .393: the exact one alone.
    exact = torch.tensor([square(5, 5, 10)])
    assert assign([first, exact], object_, k=3).tolist() == [-1, -1, -1, 0]
    # Twice the same anchor: deviation zero, both are at the threshold.
    assert assign([exact, exact], object_, k=1).tolist() == [0, 0]


def test_assign__centre_has_to_be_inside():
    # One candidate each: IoU is its own threshold. The second's centre (10, 5) is on the border.
    object_ = torch.tensor([[0.0, 0, 10, 10]])
    assert assign([torch.tensor([square(9, 5, 10)])], object_).tolist() == [0]
    assert assign([torch.tensor([square(10, 5, 10)])], object_).tolist() == [-1]


def test_assign__anchor_of_two_objects_goes_to_the_higher_iou():
    anchors = torch.tensor([square(5, 5, 10)])
    objects = torch.tensor([[0.0, 0, 10, 5.5], [0.0, 0, 10, 9]])  # IoU .55 and .9
    assert assign([anchors], objects).tolist() == [1]
    assert assign([anchors], objects.flip(0)).tolist() == [0]


def test_assign__no_objects():
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


def test_centerness__by_hand():
    anchors = torch.tensor([square(5, 5, 2), square(2, 5, 2), square(2, 1, 20)])
    boxes = torch.tensor([[0.0, 0, 10, 10]] * 3)
    # sqrt(2/8 * 1) and sqrt(2/8 * 1/9)
    torch.testing.assert_close(centerness(anchors, boxes), torch.tensor([1.0, 0.5, 1 / 6]))


def test_losses__of_a_head_that_says_nothing():
    """All logits zero and deltas zero: focal loss of p = .5, boxes are the anchors, centerness says .5."""
    model = build("retinanet", "test_resnet", 2, assigner="atss", width=64).train()
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
    assert losses["bbox_regression"].item() == pytest.approx(
        float(2 * ((1 - giou) * weights).sum() / weights.sum()), rel=1e-4
    )


def test_scores__are_geometric_means_with_centerness():
    model = build("retinanet", "test_resnet", 2, assigner="atss", width=64, score_thresh=0.3).eval()
    head = model.head
    for layer in (head.classification_head.cls_logits, head.regression_head.bbox_ctrness):
        torch.nn.init.zeros_(layer.weight)
    head.classification_head.cls_logits.bias.data = torch.tensor([-9.0, math.log(0.8 / 0.2)])
    torch.nn.init.constant_(head.regression_head.bbox_ctrness.bias, math.log(0.2 / 0.8))
    with torch.no_grad():
        (found,) = model([torch.rand(3, 64, 64)])
    assert set(found["labels"].tolist()) == {2}
    torch.testing.assert_close(found["scores"], torch.full_like(found["scores"], 0.4))


def test_centerness_branch__is_optional():
    model = build("retinanet", "test_resnet", 2, assigner="atss", width=64, centerness=False).train()
    target = {"boxes": torch.tensor([[4.0, 4, 40, 40]]), "labels": torch.tensor([1])}
    assert set(model([torch.rand(3, 64, 64)], [target])) == {"classification", "bbox_regression"}
    assert set(model.raw(torch.rand(1, 3, 64, 64))) == {"cls_logits", "bbox_regression"}
