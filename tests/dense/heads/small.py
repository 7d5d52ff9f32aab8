"""A small model of every head, and images and targets to train it on."""

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from broadsight.data.dense.pose_geometry import encode
from broadsight.dense import build

FEW = dict(rpn_pre_nms_top_n_train=50, rpn_post_nms_top_n_train=40, box_batch_size_per_image=16, width=32, hidden=32)
FEW |= dict(rpn_pre_nms_top_n_test=40, rpn_post_nms_top_n_test=30, box_detections_per_img=5)


class Kind(NamedTuple):
    head: str
    options: dict[str, Any]


ONE_STAGE = {
    "retinanet": Kind("retinanet", dict(width=32)),
    "atss": Kind("retinanet", dict(width=64, assigner="atss")),
    "fcos": Kind("fcos", dict(width=64)),
    "ssdlite": Kind("ssdlite", dict(image_size=(64, 96))),
}
TWO_STAGE = {
    "faster_rcnn": Kind("faster_rcnn", FEW),
    "mask_rcnn": Kind("mask_rcnn", FEW),
    "keypoint_rcnn": Kind("keypoint_rcnn", {**FEW, "num_keypoints": 4, "keypoint_layers": (32, 32)}),
    "cascade": Kind("cascade_mask_rcnn", {**FEW, "box_head": "fc"}),
}
RTDETR = dict(queries=10, image_size=(64, 96), channels=16, heads=2, feed_forward=32, decoder_layers=2)
DETECTORS = ONE_STAGE | TWO_STAGE
if find_spec("transformers") and find_spec("scipy"):
    DETECTORS |= {"rtdetr": Kind("rtdetr", {**RTDETR, "denoising": 8})}
KINDS = DETECTORS | {
    "semantic_fpn": Kind("semantic_fpn", dict(pyramid_channels=16, channels=8)),
    "upernet": Kind("upernet", dict(channels=16, aux_channels=8)),
    "simple_baseline": Kind("simple_baseline", dict(channels=8, num_keypoints=4)),
}


def small(kind: str, num_classes: int = 3, backbone: str | nn.Module = "test_resnet", **options) -> Any:
    return build(KINDS[kind].head, backbone, num_classes, **{**KINDS[kind].options, **options})


def target(height: int, width: int, *boxes, labels: list[int]) -> dict[str, Tensor]:
    """Boxes, masks that fill them, and four keypoints in the middle of each."""
    masks = torch.zeros(len(boxes), height, width, dtype=torch.uint8)
    points = torch.zeros(len(boxes), 4, 3)
    for number, (left, top, right, bottom) in enumerate(boxes):
        masks[number, top:bottom, left:right] = 1
        points[number] = torch.tensor([(left + right) / 2, (top + bottom) / 2, 2])
    corners = torch.tensor(boxes, dtype=torch.float).reshape(-1, 4)
    return {"boxes": corners, "labels": torch.tensor(labels).long(), "masks": masks, "keypoints": points}


def two_images(model: Any) -> tuple[Any, Any]:
    """Images and targets for a model; the second image of a detector has no objects."""
    channels, classes = model.stages.in_chans, model.num_classes
    if model.task == "segment":
        return torch.rand(2, channels, 50, 70), torch.randint(classes, (2, 50, 70))
    if hasattr(model, "num_keypoints"):
        return torch.rand(2, channels, 64, 32), encode(torch.rand(2, model.num_keypoints, 3) * 30 + 1, (64, 32))
    first = target(64, 80, [4, 6, 30, 40], [20, 20, 50, 60], labels=[1, classes])
    return [torch.rand(channels, 64, 80), torch.rand(channels, 70, 50)], [first, target(70, 50, labels=[])]
