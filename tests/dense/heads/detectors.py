"""Small detectors of every kind, and what they are trained on."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from broadsight.dense import build

FEW = dict(
    rpn_pre_nms_top_n_train=50,
    rpn_post_nms_top_n_train=40,
    rpn_pre_nms_top_n_test=40,
    rpn_post_nms_top_n_test=30,
    box_batch_size_per_image=16,
    box_detections_per_img=5,
    width=32,
    hidden=32,
)


class Kind(NamedTuple):
    head: str
    task: str
    options: dict[str, Any]


ONE_STAGE = {
    "retinanet": Kind("retinanet", "detect", dict(width=32)),
    "atss": Kind("retinanet", "detect", dict(width=64, assigner="atss")),
    "fcos": Kind("fcos", "detect", dict(width=64)),
    "ssdlite": Kind("ssdlite", "detect", dict(image_size=(64, 96))),
}
TWO_STAGE = {
    "faster_rcnn": Kind("faster_rcnn", "detect", FEW),
    "mask_rcnn": Kind("mask_rcnn", "instances", FEW),
    "keypoint_rcnn": Kind("keypoint_rcnn", "keypoints", {**FEW, "num_keypoints": 4, "keypoint_layers": (32, 32)}),
    "cascade": Kind("cascade_mask_rcnn", "instances", {**FEW, "box_head": "fc"}),
}
KINDS = ONE_STAGE | TWO_STAGE


def small(kind: str, num_classes: int = 3, **options) -> nn.Module:
    return build(KINDS[kind].head, "test_resnet", num_classes, **{**KINDS[kind].options, **options})


def target(height: int, width: int, *boxes, labels: list[int]) -> dict[str, Tensor]:
    """Boxes, masks that fill them, and four keypoints in the middle of each."""
    masks = torch.zeros(len(boxes), height, width, dtype=torch.uint8)
    points = torch.zeros(len(boxes), 4, 3)
    for number, (left, top, right, bottom) in enumerate(boxes):
        masks[number, top:bottom, left:right] = 1
        points[number] = torch.tensor([(left + right) / 2, (top + bottom) / 2, 2])
    corners = torch.tensor(boxes, dtype=torch.float).reshape(-1, 4)
    return {"boxes": corners, "labels": torch.tensor(labels).long(), "masks": masks, "keypoints": points}
