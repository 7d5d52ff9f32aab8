"""Random images with objects and what was found in them, and what COCO's own tools say of that."""

import copy
import math
import random
from typing import Any

import numpy as np
import torch
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor

CATEGORY_IDS = {1: 3, 2: 7, 3: 90, 4: 91}
NAMES = ("cat", "dog", "brush", "ghost")  # there is no ghost
AP = ["ap", "ap50", "ap75"]
OBJECT_NAMES = [*AP, "ap_small", "ap_medium", "ap_large", "ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"]
POSE_NAMES = [*AP, "ap_medium", "ap_large", "ar", "ar50", "ar75", "ar_medium", "ar_large"]
EVALUATED = {"box": ("bbox", OBJECT_NAMES), "mask": ("segm", OBJECT_NAMES), "keypoint": ("keypoints", POSE_NAMES)}


def pycoco(kind: str, content: dict, results: list[dict], sigmas: list[float] | None = None) -> COCOeval:
    """COCO's own evaluation of result entries of one kind."""
    there = COCO()
    there.dataset = copy.deepcopy(content)
    there.createIndex()
    run = COCOeval(there, there.loadRes(copy.deepcopy(results)), EVALUATED[kind][0])
    if sigmas is not None:
        run.params.kpt_oks_sigmas = np.array(sigmas)
    run.evaluate()
    run.accumulate()
    run.summarize()
    return run


def by_name(kind: str, run: COCOeval) -> dict[str, float]:
    values = [100 * value if value > -1 else math.nan for value in run.stats]
    return {f"{kind}_{name}": value for name, value in zip(EVALUATED[kind][1], values, strict=True)}


def entries(kind: str, image_id: Any, found: dict[str, Tensor], category_ids=CATEGORY_IDS) -> list[dict]:
    """Result entries without any rounding, written apart from ours."""
    rows = []
    for i, label in enumerate(found["labels"].tolist()):
        row: dict[str, Any] = dict(image_id=image_id, category_id=category_ids[label], score=found["scores"][i].item())
        if kind == "box":
            x1, y1, x2, y2 = found["boxes"][i].tolist()
            row["bbox"] = [x1, y1, x2 - x1, y2 - y1]
        elif kind == "mask":
            mask = np.asfortranarray((found["masks"][i, 0] > 0.5).numpy().astype(np.uint8))
            row["segmentation"] = coco_mask.encode(mask)
        else:
            row["keypoints"] = found["keypoints"][i].flatten().tolist()
        rows.append(row)
    return rows


def rectangles(boxes: Tensor, height: int, width: int) -> Tensor:
    masks = torch.zeros(len(boxes), height, width)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes.round().int().tolist(), strict=True):
        mask[max(y1, 0) : y2, max(x1, 0) : x2] = 1
    return masks


def boxes_of_all_areas(count: int, height: int, width: int) -> Tensor:
    sides = 2 ** (torch.rand(count, 2) * 4.5 + 3)  # 8 to 181 pixels
    corner = torch.rand(count, 2) * (torch.tensor([width, height]) - sides).clamp(min=0)
    return torch.cat([corner, torch.minimum(corner + sides, torch.tensor([width, height]))], 1)


def scene(number: int, points: int) -> tuple[tuple[int, int], dict[str, Tensor], dict[str, Tensor]]:
    """Random ground truth and predictions near it. Every fifth image has no objects, every seventh no predictions."""
    height, width = random.choice([(200, 240), (240, 160)])
    count = 0 if number % 5 == 0 else random.randint(1, 7)
    boxes = boxes_of_all_areas(count, height, width)
    masks = rectangles(boxes, height, width)
    spot = torch.rand(count, points, 2) * (boxes[:, None, 2:] - boxes[:, None, :2]) + boxes[:, None, :2]
    visible = torch.randint(0, 3, (count, points, 1)) * (torch.rand(count, 1, 1) > 0.2)  # some are not labelled at all
    there = dict(
        boxes=boxes,
        labels=torch.randint(1, 4, (count,)),
        iscrowd=(torch.rand(count) < 0.25).long(),
        area=masks.flatten(1).sum(1) * (0.5 + torch.rand(count) / 2),  # not that of the box, nor of the mask
        masks=masks.to(torch.uint8),
        keypoints=torch.cat([spot.floor() * (visible > 0), visible], -1),
    )
    copies = torch.randint(0, count, (random.randint(1, 12),)) if count else torch.zeros(0, dtype=torch.int64)
    others = 150 if number == 4 else 4  # more than count, of a class too
    moved = boxes[copies] + torch.randn(len(copies), 4) * (boxes[copies, 2:] - boxes[copies, :2]).repeat(1, 2) * 0.08
    moved[:, 2:] = torch.maximum(moved[:, 2:], moved[:, :2] + 1)
    found_boxes = torch.cat([moved, boxes_of_all_areas(others, height, width)])
    found_labels = torch.cat([there["labels"][copies], torch.randint(1, 5, (others,))])
    if number == 4:
        found_labels[-140:] = 2
    near = spot[copies] + torch.randn(len(copies), points, 2) * 0.05 * (moved[:, None, 2:] - moved[:, None, :2])
    anywhere = torch.rand(others, points, 2) * torch.tensor([width, height])
    found = dict(
        boxes=found_boxes,
        labels=found_labels,
        scores=(torch.rand(len(found_boxes)) * 20).round() / 20,  # many are equal
        masks=rectangles(found_boxes, height, width)[:, None] * 0.9,
        keypoints=torch.cat([torch.cat([near, anywhere]), torch.ones(len(found_boxes), points, 1)], -1),
    )
    if number % 7 == 0:
        found = {name: values[:0] for name, values in found.items()}
    return (height, width), found, there


def as_file(scenes: list[tuple]) -> dict:
    """The ground truth as a COCO file: crowds and every second object as run lengths, others as polygons."""
    annotations = []
    for image_id, (_, _, there) in scenes:
        for i, (x1, y1, x2, y2) in enumerate(there["boxes"].tolist()):
            left, top, right, bottom = there["boxes"][i].round().tolist()
            outline = [[left, top, right, top, right, bottom, left, bottom]]
            runs = coco_mask.encode(np.asfortranarray(there["masks"][i].numpy()))
            row: dict[str, Any] = dict(id=len(annotations) + 1, image_id=image_id, bbox=[x1, y1, x2 - x1, y2 - y1])
            row |= {key: there[key][i].item() for key in ("area", "iscrowd")}
            row |= dict(category_id=CATEGORY_IDS[there["labels"][i].item()])
            row |= dict(segmentation=runs if there["iscrowd"][i] or i % 2 else outline)
            points = there["keypoints"][i]
            row |= dict(keypoints=points.flatten().tolist(), num_keypoints=int((points[:, 2] > 0).sum()))
            annotations.append(row)
    images = [dict(id=image_id, height=size[0], width=size[1]) for image_id, (size, _, _) in scenes]
    categories = [dict(id=id, name=name) for id, name in zip(CATEGORY_IDS.values(), NAMES, strict=True)]
    return dict(images=images, annotations=annotations, categories=categories)
