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

from .atss import ANCHOR_SCALE, AdaptiveHead, AdaptiveRetinaNet
from .detection_transform import DetectionTransform
from .detector import Detector, SteadyBatchNorm2d, in_float32
from .feature_pyramid import WIDTH, FeaturePyramid, StridedAnchors, freeze_unused, octave_sizes
from .stages import Stages


class OneStage(Detector):
    """A detector whose head gives something for every anchor."""

    head: nn.Module

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        in_float32(self.head)

    def raw(self, images: Tensor) -> dict[str, Tensor]:
        """What the head says of images (B, C, H, W) with values from 0 to 1, nothing decoded or suppressed.

        cls_logits (B, A, classes), bbox_regression (B, A, 4), of some bbox_ctrness (B, A, 1). torch.export takes it.
        """
        return self.head(list(self.backbone(self.transform.normalize(images)).values()))


class FromZero(OneStage):
    """Labels from 1 outside, from 0 inside, where no class is the background."""

    def compute_loss(self, *arguments: Any, **named: Any) -> dict[str, Tensor]:
        theirs: Any = super()
        targets, *others = arguments
        shifted = [{**target, "labels": target["labels"] - 1} for target in targets]
        return theirs.compute_loss(shifted, *others, **named)

    def postprocess_detections(self, *arguments: Any, **named: Any) -> list[dict[str, Tensor]]:
        theirs: Any = super()
        found = theirs.postprocess_detections(*arguments, **named)
        return [{**image, "labels": image["labels"] + 1} for image in found]


class RetinaNet(FromZero, detection.RetinaNet):
    """Focal loss over anchors (Lin et al., ICCV 2017)."""


class RetinaNetATSS(FromZero, AdaptiveRetinaNet):
    """RetinaNet whose samples are selected adaptively."""


class FCOS(FromZero, detection.FCOS):
    """Fully convolutional, without anchors (Tian et al., ICCV 2019)."""


class SSDLite(OneStage, SSD):
    """SSD of depth-wise convolutions (Sandler et al., CVPR 2018). Class 0 is the background inside as outside."""


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
        centerness: With "atss", the branch that says how central a position is in its object.
        image_size: (shorter side, longest side) that images are resized to in eval mode.
        width: Channels of the pyramid and the heads.
        anchor_scale: Side of the smallest anchor in strides; 4, with "atss" 8.
        aspect_ratios: Of the anchors; with "atss" they are square.
        options: Of torchvision's RetinaNet, such as score_thresh, nms_thresh, detections_per_img.
    """
    if assigner not in ("iou", "atss"):
        raise ValueError(f"assigner={assigner!r} is not known; choose 'iou' or 'atss'")
    pyramid = FeaturePyramid(stages, lowest=8, extra="c5" if assigner == "iou" else "p5", width=width)
    transform = DetectionTransform(stages, image_size)
    options = {"detections_per_img": 100, **options}
    if assigner == "atss":
        sizes = octave_sizes(pyramid.strides, anchor_scale or ANCHOR_SCALE)
        anchors = StridedAnchors(sizes, (1.0,), pyramid.strides, offset=0.5)
        head: nn.Module = AdaptiveHead(width, len(sizes), num_classes, centerness)
        options = {"nms_thresh": 0.6, **options}
        kind: type[OneStage] = RetinaNetATSS
    else:
        sizes = octave_sizes(pyramid.strides, anchor_scale or 4, per_octave=3)
        anchors = StridedAnchors(sizes, aspect_ratios, pyramid.strides)
        head = RetinaNetHead(width, len(sizes[0]) * len(aspect_ratios), num_classes)
        kind = RetinaNet
    return kind(pyramid, transform, num_classes, num_classes, anchor_generator=anchors, head=head, **options)


def fcos(
    stages: Stages,
    num_classes: int,
    *,
    image_size: tuple[int, int] | None = None,
    width: int = WIDTH,
    **options: Any,
) -> nn.Module:
    """FCOS: maps at strides 8 to 128, each position the distances to its object's four sides, and centerness.

    Args:
        image_size: (shorter side, longest side) that images are resized to in eval mode.
        width: Channels of the pyramid and the heads, 64 or another multiple of 32: they are normalised in 32 groups.
        options: Of torchvision's FCOS, such as score_thresh, nms_thresh, center_sampling_radius.
    """
    pyramid = FeaturePyramid(stages, lowest=8, extra="p5", width=width)
    points = StridedAnchors(octave_sizes(pyramid.strides, 1), (1.0,), pyramid.strides, offset=0.5)
    options = {"score_thresh": 0.05, **options}
    transform = DetectionTransform(stages, image_size)
    model: Any = FCOS(pyramid, transform, num_classes, num_classes, anchor_generator=points, **options)
    # torchvision cuts distances off at zero where the paper has an exponential. Begin as that does, a stride from each
    # side: one that begins below zero everywhere never gets a gradient.
    nn.init.ones_(model.head.regression_head.bbox_reg.bias)
    return model


class ExtraLevels(nn.Module):
    """(B, C, H, W), normalised, -> maps by name at strides 16 and 32 as they are, then 64, 128, ... of these widths."""

    def __init__(self, stages: Stages, widths: Sequence[int], norm_layer: Callable[..., nn.Module]):
        super().__init__()
        self.stages, self.out_channels = stages, [*stages.channels[-2:], *widths]
        blocks = []
        for before, after in zip(self.out_channels[1:-1], widths, strict=True):
            layer = partial(Conv2dNormActivation, norm_layer=norm_layer, activation_layer=nn.ReLU6)
            middle = after // 2
            blocks.append(
                nn.Sequential(
                    layer(before, middle, kernel_size=1),
                    layer(middle, middle, kernel_size=3, stride=2, groups=middle),
                    layer(middle, after, kernel_size=1),
                )
            )
        self.extra = nn.ModuleList(blocks)
        for module in self.extra.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.03)
        freeze_unused(stages, len(stages.channels) - 2)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.stages(images)[-2:]
        for block in self.extra:
            maps.append(block(maps[-1]))
        return {str(number): x.float() for number, x in enumerate(maps)}


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
    channels, comes 0.07 to 0.16 M short of all five printed totals; 256 channels in the last, taken here, give all
    five. That is a fit to figures of one decimal, no proof.

    Args:
        image_size: (H, W) that images are resized to in eval mode, whatever their aspect; train on this size.
        extra_widths: Channels of the maps at strides 64, 128, 256 and 512.
        options: Of torchvision's SSD, such as score_thresh, nms_thresh, detections_per_img, iou_thresh.
    """
    norm_layer = partial(SteadyBatchNorm2d, eps=0.001, momentum=0.03)
    backbone = ExtraLevels(stages, extra_widths, norm_layer)
    boxes = DefaultBoxGenerator([[2, 3] for _ in backbone.out_channels], min_ratio=0.2, max_ratio=0.95)
    head = SSDLiteHead(backbone.out_channels, boxes.num_anchors_per_location(), num_classes + 1, norm_layer)
    usual = dict(score_thresh=0.001, nms_thresh=0.55, detections_per_img=300, topk_candidates=300)
    return SSDLite(
        backbone,
        DetectionTransform(stages, image_size, exact=True, size_divisible=1),
        num_classes,
        num_classes + 1,
        anchor_generator=boxes,
        size=tuple(image_size),
        head=head,
        **{**usual, **options},
    )


BUILDERS = {"retinanet": retinanet, "fcos": fcos, "ssdlite": ssdlite}
