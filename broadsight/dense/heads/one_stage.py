"""Detectors that score anchors or points of the maps directly: RetinaNet, also with ATSS, FCOS and SSDLite."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.ssd import SSD
from torchvision.models.detection.ssdlite import SSDLiteHead
from torchvision.ops import Conv2dNormActivation

from ...errors import check_choice
from ..detector import DetectionTransform, Detector, SteadyBatchNorm2d, in_float32
from ..feature_pyramid import WIDTH, FeaturePyramid, StridedAnchors, freeze_unused
from ..stages import Stages
from . import register
from .atss import ANCHOR_SCALE, AdaptiveHead, AdaptiveRetinaNet


class OneStage(Detector):
    """A detector with one output per anchor."""

    head: nn.Module

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        in_float32(self.head)

    def raw(self, images: Tensor) -> dict[str, Tensor]:
        """Output of the head for images (B, C, H, W) with values from 0 to 1, before decoding and suppression.

        cls_logits (B, A, classes), bbox_regression (B, A, 4), of some heads bbox_ctrness (B, A, 1). For torch.export.
        """
        return self.head(list(self.backbone(self.transform.normalize(images)).values()))


class RetinaNet(OneStage, detection.RetinaNet):
    """Focal loss over anchors (Lin et al., ICCV 2017)."""

    from_zero = True


class RetinaNetATSS(OneStage, AdaptiveRetinaNet):
    """RetinaNet with adaptive selection of samples."""

    from_zero = True


class FCOS(OneStage, detection.FCOS):
    """Fully convolutional, without anchors (Tian et al., ICCV 2019)."""

    from_zero = True


class SSDLite(OneStage, SSD):
    """SSD with depth-wise convolutions (Sandler et al., CVPR 2018). Class 0 is the background."""


@register("retinanet", "detect")
def retinanet(
    stages: Stages,
    num_classes: int,
    *,
    assigner: str = "iou",
    centerness: bool = True,
    image_size: tuple[int, int] | None = None,
    width: int = WIDTH,
    anchor_scale: float | None = None,
    aspect_ratios: Sequence[float] = (0.5, 1.0, 2.0),
    **options: Any,
) -> nn.Module:
    """RetinaNet: maps at strides 8 to 128, nine anchors a position, heads of four convolutions.

    Args:
        assigner: "iou": positive anchors by IoU; "atss": adaptive selection, with the head of its paper: one square
            anchor a position, group norm, GIoU loss.
        centerness: With "atss", a branch that predicts how central a position is in its object.
        image_size: (shorter side, longest side) that images are resized to in eval mode.
        width: Channels of the pyramid and the heads.
        anchor_scale: Side of the smallest anchor in strides; 4, with "atss" 8.
        aspect_ratios: Of the anchors; with "atss" they are square.
        options: Of torchvision's RetinaNet, such as score_thresh, nms_thresh, detections_per_img.
    """
    check_choice("assigner", assigner, ("iou", "atss"))
    pyramid = FeaturePyramid(stages, lowest=8, extra="c5" if assigner == "iou" else "p5", width=width)
    options = {"detections_per_img": 100, **options}
    if assigner == "atss":
        kind: type[OneStage] = RetinaNetATSS
        anchors = StridedAnchors(pyramid.strides, anchor_scale or ANCHOR_SCALE, offset=0.5)
        head: nn.Module = AdaptiveHead(width, len(pyramid.strides), num_classes, centerness)
        options = {"nms_thresh": 0.6, **options}
    else:
        kind = RetinaNet
        anchors = StridedAnchors(pyramid.strides, anchor_scale or 4, aspect_ratios, per_octave=3)
        head = RetinaNetHead(width, anchors.num_anchors_per_location()[0], num_classes)
    transform = DetectionTransform(stages, image_size)
    return kind(pyramid, transform, num_classes, num_classes, anchor_generator=anchors, head=head, **options)


@register("fcos", "detect")
def fcos(
    stages: Stages, num_classes: int, *, image_size: tuple[int, int] | None = None, width: int = WIDTH, **options: Any
) -> nn.Module:
    """FCOS: maps at strides 8 to 128; each position predicts the distances to its object's sides, and centerness.

    Args:
        image_size: (shorter side, longest side) that images are resized to in eval mode.
        width: Channels of the pyramid and the heads, a multiple of 32 from 64: they are normalised in 32 groups.
        options: Of torchvision's FCOS, such as score_thresh, nms_thresh, center_sampling_radius.
    """
    pyramid = FeaturePyramid(stages, lowest=8, extra="p5", width=width)
    options = {"score_thresh": 0.05, "anchor_generator": StridedAnchors(pyramid.strides, 1, offset=0.5), **options}
    model: Any = FCOS(pyramid, DetectionTransform(stages, image_size), num_classes, num_classes, **options)
    # torchvision cuts distances off at zero where the paper has an exponential. Begin as that does, a stride from each
    # side: a model that begins below zero everywhere never gets a gradient.
    nn.init.ones_(model.head.regression_head.bbox_reg.bias)
    return model


class ExtraLevels(nn.Module):
    """(B, C, H, W), normalised, -> maps by name: those at strides 16 and 32, then 64, 128, ... of these widths."""

    def __init__(self, stages: Stages, widths: Sequence[int], norm_layer: Callable[..., nn.Module]):
        super().__init__()
        self.stages, self.out_channels = stages, [*stages.channels[-2:], *widths]
        layer = partial(Conv2dNormActivation, norm_layer=norm_layer, activation_layer=nn.ReLU6)
        self.extra = nn.ModuleList(
            nn.Sequential(
                layer(before, after // 2, kernel_size=1),
                layer(after // 2, after // 2, kernel_size=3, stride=2, groups=after // 2),
                layer(after // 2, after, kernel_size=1),
            )
            for before, after in zip(self.out_channels[1:-1], widths, strict=True)
        )
        for module in self.extra.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.03)
        freeze_unused(stages, len(stages.channels) - 2)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.stages(images)[-2:]
        for block in self.extra:
            maps.append(block(maps[-1]))
        return {str(number): x.float() for number, x in enumerate(maps)}


@register("ssdlite", "detect", square=True)
def ssdlite(
    stages: Stages,
    num_classes: int,
    *,
    image_size: tuple[int, int] = (320, 320),
    extra_widths: Sequence[int] = (512, 256, 256, 256),
    **options: Any,
) -> nn.Module:
    """SSDLite: maps at strides 16 and 32 and four more, six default boxes a position, depth-wise heads.

    The papers that report it do not define their head. The usual one, with extra maps of 512, 256, 256 and 128
    channels, comes 0.07 to 0.16 M short of all five printed totals; 256 channels in the last, the default here, give
    all five. That is a fit to figures of one decimal, no proof.

    Args:
        image_size: (H, W) that images are resized to in eval mode, whatever their aspect; train on this size.
        extra_widths: Channels of the maps at strides 64, 128, 256 and 512.
        options: Of torchvision's SSD, such as score_thresh, nms_thresh, detections_per_img, iou_thresh.
    """
    norm_layer = partial(SteadyBatchNorm2d, eps=0.001, momentum=0.03)
    backbone = ExtraLevels(stages, extra_widths, norm_layer)
    boxes = DefaultBoxGenerator([[2, 3] for _ in backbone.out_channels], min_ratio=0.2, max_ratio=0.95)
    head = SSDLiteHead(backbone.out_channels, boxes.num_anchors_per_location(), num_classes + 1, norm_layer)
    transform = DetectionTransform(stages, image_size, exact=True, size_divisible=1)
    usual = dict(score_thresh=0.001, nms_thresh=0.55, detections_per_img=300, topk_candidates=300)
    fixed = dict(anchor_generator=boxes, size=tuple(image_size), head=head)
    return SSDLite(backbone, transform, num_classes, num_classes + 1, **{**fixed, **usual, **options})
