"""A dense run as a model that runtimes take, and in words what stands before and behind it."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...runs.dense_model import DenseModel
from ...training.dense import crop_size
from .models import AsTuple, RawDetector, RawQueries, RawSegmenter

CELL = 32  # pixels of the coarsest map of all backbones
BOXES = ("cls_logits", "bbox_regression")
PADDING = 1.25  # of a crop around a box; as pose models are trained
WANTS_REGIONS = ("faster_rcnn", "mask_rcnn", "cascade_mask_rcnn", "keypoint_rcnn")
WITHOUT_REGIONS = {
    "instances": "no head for masks does without; train semantic_fpn or upernet for classes of pixels",
    "keypoints": "train simple_baseline, which finds keypoints in boxes",
}
Said = dict[str, Any]  # as JSON can hold it


class NotExportable(ValueError):
    """A model that no runtime takes; the message says which one to train instead."""


@dataclass(frozen=True)
class RawModel:
    """A dense model up to its heads."""

    model: nn.Module  # (B, C, H, W), normalised -> a tuple of tensors; a copy, in eval mode on the CPU
    outputs: tuple[str, ...]  # their names
    size: tuple[int, int]  # (height, width) of the images that it is exported for if these are fixed
    any_size: bool  # whether height and width can be left open
    preprocessing: Said  # how an image becomes the model's input; see `session`
    decoding: Said  # how outputs become findings; see `decoding`


def check_exportable(head: str, task: str) -> None:
    """Refuse heads that no runtime takes, before anything is opened: those that look into regions of their choice."""
    known = f"heads that export are {', '.join(HEADS)}"
    if head in WANTS_REGIONS:
        why = "looks into regions of its own choice, as many as it finds, which exported graphs cannot"
        instead = WITHOUT_REGIONS.get(task, "train retinanet, fcos, ssdlite or rtdetr")
        raise NotExportable(f"{head} {why}; {instead}; {known}")
    if head not in HEADS:
        raise NotExportable(f"{head} has no export; {known}")


def raw_model(run: DenseModel, *, canvas: tuple[int, int] | None = None) -> RawModel:
    """The part of a dense model that runtimes execute: without decoding and suppression of boxes, whose shapes depend
    on what was found. canvas: (height, width) that images are fitted into if sizes are not left open."""
    check_exportable(run.head, run.task)
    model = deepcopy(run.model).cpu().float().eval().requires_grad_(False)
    found = HEADS[run.head](run, model)
    if canvas is not None:
        shown = f"canvas={canvas[0]}x{canvas[1]}"
        if found.preprocessing["way"] != "fit" and canvas != found.size:
            raise ValueError(f"{shown}; {run.head} takes {found.size[0]}x{found.size[1]} alone")
        near = [max(CELL, CELL * round(side / CELL)) for side in canvas]
        if found.preprocessing["way"] == "fit" and near != [*canvas]:
            raise ValueError(f"{shown}; expected multiples of {CELL}, for instance {near[0]}x{near[1]}")
        found = replace(found, size=canvas)
    said = {"mean": [float(x) for x in model.stages.mean], "std": [float(x) for x in model.stages.std]}
    ids = [run.category_ids[label] for label in sorted(run.category_ids)]  # of COCO, in the order of the labels
    decoding = {"head": run.head, **found.decoding, **({"category_ids": ids} if ids else {})}
    return replace(found, model=found.model.eval(), preprocessing=found.preprocessing | said, decoding=decoding)


def _dense_anchors(run: DenseModel, model: Any) -> RawModel:
    """RetinaNet and FCOS: images keep their aspect and are padded; anchors are of known strides."""
    generator = model.anchor_generator
    generator.set_cell_anchors(torch.float32, torch.device("cpu"))
    each = zip(generator.strides, generator.cell_anchors, strict=True)
    levels = [{"stride": stride, "step": [stride, stride], "boxes": boxes.tolist()} for stride, boxes in each]
    centered = hasattr(model.head.regression_head, "bbox_ctrness")
    outputs = (*BOXES, *(["bbox_ctrness"] if centered else []))
    decoding = _of_anchors(model, "sigmoid", levels, generator.offset, None if run.head == "fcos" else model.box_coder)
    short, long = model.transform.image_size or (None, None)
    said = dict(short_side=short, long_side=long, rounding="down", antialias=False)
    said["multiple"] = model.transform.size_divisible
    return _fitting(model, RawDetector(model, outputs), outputs, said, decoding, long)


def _default_boxes(run: DenseModel, model: Any) -> RawModel:
    """SSDLite: every image is resized to one size, and boxes are shares of it."""
    height, width = model.transform.image_size
    levels = []
    for level, pairs in enumerate(model.anchor_generator._wh_pairs):
        stride = model.stages.strides[-2] * 2**level
        grid = -(-height // stride), -(-width // stride)
        sides = pairs.clamp(0, 1).double() * torch.tensor([width, height])
        boxes = torch.cat([-sides / 2, sides / 2], 1).tolist()
        levels.append({"stride": stride, "step": [height / grid[0], width / grid[1]], "boxes": boxes})
    decoding = _of_anchors(model, "softmax", levels, 0.5, model.box_coder)
    preprocessing = {"way": "exact", "antialias": False}
    return RawModel(RawDetector(model, BOXES), BOXES, (height, width), False, preprocessing, decoding)


def _of_anchors(model: Any, scores: str, levels: list[Said], offset: float, coder: Any) -> Said:
    """How boxes come from anchors and are suppressed. coder: of boxes as deltas; None where they are distances."""
    boxes: Said = {"coder": "distances", "weights": None, "largest_growth": None}
    if coder is not None:
        boxes = {"coder": "deltas", "weights": list(coder.weights), "largest_growth": coder.bbox_xform_clip}
    limits = dict(score_threshold=model.score_thresh, candidates=model.topk_candidates, overlap=model.nms_thresh)
    said = dict(kind="anchors", scores=scores, offset=offset, levels=levels, classes=model.num_classes)
    return boxes | said | limits | {"detections": model.detections_per_img}


def _queries(run: DenseModel, model: Any) -> RawModel:
    """RT-DETR, which suppresses nothing."""
    decoding = {"kind": "queries", "classes": model.num_classes, "detections": model.detections_per_img}
    decoding["score_threshold"] = model.score_thresh
    outputs, preprocessing = ("logits", "boxes", "chosen"), {"way": "exact", "antialias": True}
    return RawModel(RawQueries(model), outputs, model.image_size, False, preprocessing, decoding)


def _pixels(run: DenseModel, model: Any) -> RawModel:
    """Segmenters: images keep their aspect."""
    views = run.views()
    decoding = {"kind": "pixels", "classes": model.num_classes, "stride": model.stages.strides[0]}
    said = dict(short_side=views.short_side, long_side=views.long_side, rounding="nearest", antialias=True, multiple=1)
    return _fitting(model, RawSegmenter(model), ("logits",), said, decoding, views.short_side)


def _fitting(
    model: Any, inner: nn.Module, outputs: tuple[str, ...], said: Said, decoding: Said, canvas: int | None
) -> RawModel:
    """For images that keep their aspect: the shorter side gets "short_side" pixels unless the longer would exceed
    "long_side"; on a square of at least `canvas`, or padded to a "multiple" where sizes are open."""
    side = -(-(canvas or 640) // CELL) * CELL
    # A backbone of one size alone has every image resized inside, which is no graph for all sizes
    return RawModel(inner, outputs, (side, side), model.stages.fixed_size is None, {"way": "fit", **said}, decoding)


def _heat_maps(run: DenseModel, model: Any) -> RawModel:
    """Pose models: crops around boxes that something else has found."""
    model.normalise = nn.Identity()
    decoding = dict(kind="heatmaps", stride=model.stride, names=list(run.keypoint_names))
    decoding["skeleton"] = [list(pair) for pair in run.skeleton]
    decoding["keypoint_offset"] = run.keypoint_offset  # what COCO's result files have less of x and y
    preprocessing = {"way": "crops", "padding": PADDING}
    return RawModel(AsTuple(model), ("heatmaps",), crop_size(run.recipe), False, preprocessing, decoding)


HEADS: dict[str, Callable[[DenseModel, Any], RawModel]] = {
    "retinanet": _dense_anchors,
    "fcos": _dense_anchors,
    "ssdlite": _default_boxes,
    "rtdetr": _queries,
    "semantic_fpn": _pixels,
    "upernet": _pixels,
    "simple_baseline": _heat_maps,
}
