"""Detectors that propose regions and then look into each: Faster, Mask and Keypoint R-CNN."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torchvision.models import detection
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from ..detector import WIDTH, DetectionTransform, Detector, FeaturePyramid, StridedAnchors, in_float32
from ..stages import Stages
from . import register

BOX_CELLS, MASK_CELLS = 7, 14  # sides of the grid that a region is pooled to


class TwoStage(Detector):
    """A detector with proposals and heads on regions."""

    rpn: Any
    roi_heads: Any

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        in_float32(self.rpn.head)
        for name, module in self.roi_heads.named_children():
            if name.endswith("_predictor"):
                in_float32(module)


class FasterRCNN(TwoStage, detection.FasterRCNN):
    """Boxes (Ren et al., NeurIPS 2015; with a feature pyramid, Lin et al., CVPR 2017)."""


class MaskRCNN(TwoStage, detection.MaskRCNN):
    """Boxes and masks (He et al., ICCV 2017)."""

    task = "instances"


class KeypointRCNN(TwoStage, detection.KeypointRCNN):
    """Boxes and keypoints (He et al., ICCV 2017)."""

    task = "keypoints"


class RegionPool(MultiScaleRoIAlign):
    """Regions of the maps at strides 4 to 32, each from the map that suits its size, (N, C, cells, cells); torchvision
    guesses the strides from the first images that it sees, wrongly if they are small and padded."""

    def __init__(self, strides: Sequence[int], cells: int):
        super().__init__([str(number) for number, _ in enumerate(strides)], cells, sampling_ratio=2)
        self.scales = [1 / stride for stride in strides]
        levels = [stride.bit_length() - 1 for stride in strides]
        self.map_levels = LevelMapper(levels[0], levels[-1], self.canonical_scale, self.canonical_level)


def rcnn(
    kind: type[TwoStage],
    stages: Stages,
    num_classes: int,
    *,
    image_size: tuple[int, int] | None = None,
    width: int = WIDTH,
    hidden: int = 1024,
    anchor_scale: float = 8,
    aspect_ratios: Sequence[float] = (0.5, 1.0, 2.0),
    box_head: nn.Module | None = None,
    box_predictor: nn.Module | None = None,
    **options: Any,
) -> TwoStage:
    """An R-CNN: proposals from maps at strides 4 to 64, and for each two fully connected layers.

    Args:
        image_size: (shorter side, longest side) that images are resized to in eval mode.
        width, hidden: Channels of the pyramid, and features of the fully connected layers.
        anchor_scale, aspect_ratios: Side of the anchors in strides, and their height / width.
        box_head, box_predictor: To replace the two layers and what reads them.
        options: Of torchvision's class: rpn_post_nms_top_n_train, box_batch_size_per_image, box_score_thresh, ...
    """
    pyramid = FeaturePyramid(stages, lowest=4, extra="pool", width=width)
    parts = dict(
        rpn_anchor_generator=StridedAnchors(pyramid.strides, anchor_scale, aspect_ratios),
        box_roi_pool=RegionPool(stages.strides, BOX_CELLS),
        box_head=box_head or TwoMLPHead(width * BOX_CELLS**2, hidden),
        box_predictor=box_predictor or FastRCNNPredictor(hidden, num_classes + 1),
    )
    return kind(pyramid, DetectionTransform(stages, image_size), num_classes, None, **parts | options)


@register("faster_rcnn", "detect")
def faster_rcnn(stages: Stages, num_classes: int, **options: Any) -> nn.Module:
    """Faster R-CNN; options as of `rcnn`."""
    return rcnn(FasterRCNN, stages, num_classes, **options)


@register("mask_rcnn", "instances")
def mask_rcnn(stages: Stages, num_classes: int, *, width: int = WIDTH, **options: Any) -> nn.Module:
    """Mask R-CNN: Faster R-CNN, and a mask of 28 x 28 for each box from four convolutions; options as of `rcnn`."""
    return rcnn(MaskRCNN, stages, num_classes, width=width, **mask_parts(stages, width, num_classes) | options)


def mask_parts(stages: Stages, width: int, num_classes: int) -> dict[str, Any]:
    """Pooling, head and predictor of masks."""
    return dict(
        mask_roi_pool=RegionPool(stages.strides, MASK_CELLS),
        mask_head=MaskRCNNHeads(width, [width] * 4, 1),
        mask_predictor=MaskRCNNPredictor(width, width, num_classes + 1),
    )


@register("keypoint_rcnn", "keypoints")
def keypoint_rcnn(
    stages: Stages,
    num_classes: int,
    *,
    num_keypoints: int = 17,
    width: int = WIDTH,
    keypoint_layers: Sequence[int] = (512,) * 8,
    **options: Any,
) -> nn.Module:
    """Keypoint R-CNN: Faster R-CNN, and a heat map of 56 x 56 for each keypoint of a box; options as of `rcnn`.

    Args:
        keypoint_layers: Channels of the convolutions before the heat maps.
    """
    parts: dict[str, Any] = dict(
        keypoint_roi_pool=RegionPool(stages.strides, MASK_CELLS),
        keypoint_head=KeypointRCNNHeads(width, keypoint_layers),
        keypoint_predictor=KeypointRCNNPredictor(keypoint_layers[-1], num_keypoints),
    )
    return rcnn(KeypointRCNN, stages, num_classes, width=width, **parts | options)
