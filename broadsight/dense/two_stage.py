"""Detectors that propose regions first and look into each: Faster, Mask and Keypoint R-CNN."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torchvision.models import detection
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from .detection_transform import DetectionTransform
from .detector import Detector, in_float32
from .feature_pyramid import WIDTH, FeaturePyramid, StridedAnchors, octave_sizes
from .stages import Stages

HIDDEN = 1024
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
    """Regions of the maps at strides 4 to 32, each from the map that suits its size, (N, C, cells, cells).

    torchvision guesses the strides from the first images that it sees, wrongly if they are small and padded.
    """

    def __init__(self, strides: Sequence[int], cells: int):
        super().__init__([str(number) for number, _ in enumerate(strides)], cells, sampling_ratio=2)
        self.scales = [1 / stride for stride in strides]
        levels = [stride.bit_length() - 1 for stride in strides]
        self.map_levels = LevelMapper(levels[0], levels[-1], self.canonical_scale, self.canonical_level)


def proposals_of(
    pyramid: FeaturePyramid, anchor_scale: float, aspect_ratios: Sequence[float], hidden: int, num_classes: int
) -> dict[str, Any]:
    """Arguments of torchvision's classes that all R-CNNs share."""
    anchors = StridedAnchors(octave_sizes(pyramid.strides, anchor_scale), aspect_ratios, pyramid.strides)
    return dict(
        rpn_anchor_generator=anchors,
        box_roi_pool=RegionPool(pyramid.stages.strides, BOX_CELLS),
        box_head=TwoMLPHead(pyramid.out_channels * BOX_CELLS**2, hidden),
        box_predictor=FastRCNNPredictor(hidden, num_classes + 1),
    )


def faster_rcnn(
    stages: Stages,
    num_classes: int,
    *,
    image_size: tuple[int, int] | None = None,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    anchor_scale: float = 8,
    aspect_ratios: Sequence[float] = (0.5, 1.0, 2.0),
    **options: Any,
) -> nn.Module:
    """Faster R-CNN: proposals from maps at strides 4 to 64, two fully connected layers for each.

    Args:
        image_size: (shorter side, longest side) that images are resized to in eval mode.
        width: Channels of the pyramid.
        hidden: Features of the fully connected layers.
        anchor_scale: Side of the anchors in strides.
        aspect_ratios: Height / width of the anchors.
        options: Of torchvision's FasterRCNN: rpn_post_nms_top_n_train, box_batch_size_per_image, box_score_thresh, ...
    """
    pyramid = FeaturePyramid(stages, lowest=4, extra="pool", width=width)
    parts = proposals_of(pyramid, anchor_scale, aspect_ratios, hidden, num_classes)
    return FasterRCNN(pyramid, DetectionTransform(stages, image_size), num_classes, None, **{**parts, **options})


def mask_rcnn(
    stages: Stages,
    num_classes: int,
    *,
    image_size: tuple[int, int] | None = None,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    anchor_scale: float = 8,
    aspect_ratios: Sequence[float] = (0.5, 1.0, 2.0),
    **options: Any,
) -> nn.Module:
    """Mask R-CNN: Faster R-CNN, and a mask of 28 x 28 for each box from four convolutions.

    Args: as `faster_rcnn`, with options of torchvision's MaskRCNN.
    """
    pyramid = FeaturePyramid(stages, lowest=4, extra="pool", width=width)
    parts = proposals_of(pyramid, anchor_scale, aspect_ratios, hidden, num_classes)
    parts |= mask_parts(pyramid, num_classes)
    return MaskRCNN(pyramid, DetectionTransform(stages, image_size), num_classes, None, **{**parts, **options})


def mask_parts(pyramid: FeaturePyramid, num_classes: int) -> dict[str, nn.Module]:
    """Pooling, head and predictor of masks."""
    width = pyramid.out_channels
    return dict(
        mask_roi_pool=RegionPool(pyramid.stages.strides, MASK_CELLS),
        mask_head=MaskRCNNHeads(width, [width] * 4, 1),
        mask_predictor=MaskRCNNPredictor(width, width, num_classes + 1),
    )


def keypoint_rcnn(
    stages: Stages,
    num_classes: int,
    *,
    num_keypoints: int = 17,
    image_size: tuple[int, int] | None = None,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    anchor_scale: float = 8,
    aspect_ratios: Sequence[float] = (0.5, 1.0, 2.0),
    keypoint_layers: Sequence[int] = (512,) * 8,
    **options: Any,
) -> nn.Module:
    """Keypoint R-CNN: Faster R-CNN, and a heat map of 56 x 56 for each keypoint of a box.

    Args: as `faster_rcnn`, with options of torchvision's KeypointRCNN, and
        num_keypoints: Of an object.
        keypoint_layers: Channels of the convolutions before the heat maps.
    """
    pyramid = FeaturePyramid(stages, lowest=4, extra="pool", width=width)
    parts = proposals_of(pyramid, anchor_scale, aspect_ratios, hidden, num_classes)
    parts |= dict(
        keypoint_roi_pool=RegionPool(stages.strides, MASK_CELLS),
        keypoint_head=KeypointRCNNHeads(width, keypoint_layers),
        keypoint_predictor=KeypointRCNNPredictor(keypoint_layers[-1], num_keypoints),
    )
    return KeypointRCNN(pyramid, DetectionTransform(stages, image_size), num_classes, None, **{**parts, **options})


BUILDERS = {"faster_rcnn": faster_rcnn, "mask_rcnn": mask_rcnn, "keypoint_rcnn": keypoint_rcnn}
