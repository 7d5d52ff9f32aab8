"""Detectors that score anchors or points of the maps directly: RetinaNet, also with ATSS's samples, FCOS, SSDLite."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.fcos import FCOSClassificationHead, FCOSRegressionHead
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.ssd import SSD
from torchvision.models.detection.ssdlite import SSDLiteHead
from torchvision.ops import Conv2dNormActivation, box_iou, generalized_box_iou_loss, sigmoid_focal_loss

from ...errors import check_choice
from ..detector import WIDTH, Detector, FeaturePyramid, SteadyBatchNorm2d, StridedAnchors, freeze_unused
from ..stages import Stages
from . import register


class OneStage(Detector):
    """A detector with one output per anchor."""

    head: nn.Module

    def raw(self, images: Tensor) -> dict[str, Tensor]:
        """What the head says of images (B, C, H, W) with values from 0 to 1, before decoding; for torch.export."""
        return self.head(list(self.backbone(self.transform.normalize(images)).values()))


class RetinaNet(OneStage, detection.RetinaNet):
    """Focal loss over anchors (Lin et al., ICCV 2017)."""


def assign(anchors_per_level: list[Tensor], gt_boxes: Tensor, k: int = 9) -> Tensor:
    """The object that each anchor of all levels, (A_i, 4) each, is trained for: indices into gt_boxes (G, 4), or -1.

    Of the k anchors of each level with the nearest centres, positive are those with a centre inside the object and an
    IoU of at least mean + standard deviation over all k; of several objects, the one with most IoU gets an anchor.
    """
    anchors = torch.cat(anchors_per_level)
    if not len(gt_boxes):
        return anchors.new_full((len(anchors),), -1, dtype=torch.int64)
    gt_boxes = gt_boxes.to(anchors.dtype)
    overlaps = box_iou(anchors, gt_boxes)  # A G
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    gt_centres = (gt_boxes[:, :2] + gt_boxes[:, 2:]) / 2
    distances = (centres[:, None] - gt_centres).square().sum(2)  # A G
    nearest, start = [], 0
    for level in distances.split([len(level) for level in anchors_per_level]):
        nearest.append(level.topk(min(k, len(level)), dim=0, largest=False).indices + start)
        start += len(level)
    candidates = torch.cat(nearest)  # N G
    found = overlaps.gather(0, candidates)  # N G
    spread = found.std(0) if len(found) > 1 else torch.zeros_like(found[0])
    positive = torch.zeros_like(overlaps, dtype=torch.bool).scatter(0, candidates, found >= found.mean(0) + spread)
    sides = torch.cat([centres[:, None] - gt_boxes[:, :2], gt_boxes[:, 2:] - centres[:, None]], 2)  # A G 4
    positive &= sides.amin(2) > 0
    best, matched = overlaps.masked_fill(~positive, -1).max(1)
    return matched.masked_fill(best < 0, -1)


def centerness(anchors: Tensor, boxes: Tensor) -> Tensor:
    """How central the centres of anchors (N, 4) are in boxes (N, 4): (N,), from 0 at the border to 1."""
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    near, far = centres - boxes[:, :2], boxes[:, 2:] - centres  # N 2: from left and top, to right and bottom
    return (torch.minimum(near, far) / torch.maximum(near, far)).prod(1).clamp(min=0).sqrt()


class AdaptiveRegressionHead(FCOSRegressionHead):
    """Deltas of one anchor a position, times a learned factor for each level, and centerness. Layers as in FCOS."""

    def __init__(self, in_channels: int, levels: int, centerness: bool):
        super().__init__(in_channels, 1)
        self.scales = nn.Parameter(torch.ones(levels))
        if not centerness:
            del self.bbox_ctrness

    def forward(self, x: list[Tensor]) -> dict[str, Tensor]:  # ty: ignore[incompatible-method-override]
        features = [self.conv(level) for level in x]
        pairs = zip(features, self.scales, strict=True)
        outputs = {"bbox_regression": [self.bbox_reg(x) * scale for x, scale in pairs]}
        if hasattr(self, "bbox_ctrness"):
            outputs["bbox_ctrness"] = [self.bbox_ctrness(x) for x in features]
        return {name: torch.cat([x.flatten(2).mT for x in levels], 1) for name, levels in outputs.items()}


class AdaptiveHead(nn.Module):
    """Maps -> cls_logits (B, A, num_classes), bbox_regression (B, A, 4) and, if wanted, bbox_ctrness (B, A, 1)."""

    def __init__(self, in_channels: int, levels: int, num_classes: int, centerness: bool = True):
        super().__init__()
        self.classification_head = FCOSClassificationHead(in_channels, 1, num_classes)
        self.regression_head = AdaptiveRegressionHead(in_channels, levels, centerness)

    def forward(self, x: list[Tensor]) -> dict[str, Tensor]:
        return {"cls_logits": self.classification_head(x), **self.regression_head(x)}


class RetinaNetATSS(OneStage, detection.RetinaNet):
    """RetinaNet with one square anchor a position and ATSS (Zhang et al., CVPR 2020), by which each object sets the
    threshold for the anchors that are trained for it. Focal, GIoU and centerness losses."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.box_coder.weights = (10.0, 10.0, 5.0, 5.0)  # of the deltas

    def compute_loss(
        self, targets: list[dict[str, Tensor]], head_outputs: dict[str, Tensor], anchors: list[Tensor]
    ) -> dict[str, Tensor]:
        # With one anchor a position, a level is a run of anchors of one size
        runs = torch.unique_consecutive(anchors[0][:, 2] - anchors[0][:, 0], return_counts=True)[1].tolist()
        logits = head_outputs["cls_logits"]
        wanted, found = torch.zeros_like(logits), []
        for number, (target, image_anchors) in enumerate(zip(targets, anchors, strict=True)):
            matched = assign(list(image_anchors.split(runs)), target["boxes"])
            place = torch.where(matched >= 0)[0]
            wanted[number, place, target["labels"][matched[place]]] = 1.0
            own = target["boxes"][matched[place]].to(image_anchors.dtype)
            found.append((own, image_anchors[place], place + number * logits.shape[1]))
        boxes, samples, place = map(torch.cat, zip(*found, strict=True))
        count = max(1, len(place))
        deltas = head_outputs["bbox_regression"].flatten(0, 1)[place]
        box_losses = generalized_box_iou_loss(self.box_coder.decode_single(deltas, samples), boxes)
        losses = {"classification": sigmoid_focal_loss(logits, wanted, reduction="sum") / count}
        if "bbox_ctrness" not in head_outputs:
            return {**losses, "bbox_regression": 2.0 * (box_losses.sum() / count)}
        central, said = centerness(samples, boxes), head_outputs["bbox_ctrness"].flatten()[place]
        box_loss = (box_losses * central).sum() / central.sum().clamp(min=1e-6)
        losses["bbox_ctrness"] = F.binary_cross_entropy_with_logits(said, central, reduction="sum") / count
        return {**losses, "bbox_regression": 2.0 * box_loss}

    def postprocess_detections(self, head_outputs: Any, anchors: Any, image_shapes: Any) -> list[dict[str, Tensor]]:
        """Scores are the geometric mean of the class's probability and centerness."""
        if "bbox_ctrness" in head_outputs:
            pairs = zip(head_outputs["cls_logits"], head_outputs["bbox_ctrness"], strict=True)
            scores = [(logits.sigmoid() * said.sigmoid()).sqrt().logit(1e-6) for logits, said in pairs]
            head_outputs = {**head_outputs, "cls_logits": scores}
        return super().postprocess_detections(head_outputs, anchors, image_shapes)


class FCOS(OneStage, detection.FCOS):
    """Fully convolutional, without anchors (Tian et al., ICCV 2019)."""


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
        assigner: "iou": positive anchors by IoU; "atss": adaptive selection, one square anchor a position, GIoU loss.
        centerness: With "atss", a branch that predicts how central a position is in its object.
        image_size, width, options: As of `fcos`, and detections_per_img, ... of torchvision's RetinaNet.
        anchor_scale, aspect_ratios: Of the smallest anchor, its side in strides; 4, with "atss" 8 and square.
    """
    check_choice("assigner", assigner, ("iou", "atss"))
    pyramid = FeaturePyramid(stages, lowest=8, extra="c5" if assigner == "iou" else "p5", width=width)
    given = pyramid, num_classes, num_classes, image_size
    options = {"detections_per_img": 100, **options}
    if assigner == "atss":
        anchors = StridedAnchors(pyramid.strides, anchor_scale or 8, offset=0.5)
        adaptive = AdaptiveHead(width, len(pyramid.strides), num_classes, centerness)
        return RetinaNetATSS(*given, anchor_generator=anchors, head=adaptive, **{"nms_thresh": 0.6, **options})
    anchors = StridedAnchors(pyramid.strides, anchor_scale or 4, aspect_ratios, per_octave=3)
    head = RetinaNetHead(width, anchors.num_anchors_per_location()[0], num_classes)
    return RetinaNet(*given, anchor_generator=anchors, head=head, **options)


@register("fcos", "detect")
def fcos(
    stages: Stages, num_classes: int, *, image_size: tuple[int, int] | None = None, width: int = WIDTH, **options: Any
) -> nn.Module:
    """FCOS: maps at strides 8 to 128; each position predicts the distances to its object's sides, and centerness.

    Args:
        image_size, options: (shorter side, longest side) in eval mode; score_thresh, nms_thresh, ... of torchvision's.
        width: Channels of the pyramid and the heads, a multiple of 32 from 64: they are normalised in 32 groups.
    """
    pyramid = FeaturePyramid(stages, lowest=8, extra="p5", width=width)
    options = {"score_thresh": 0.05, "anchor_generator": StridedAnchors(pyramid.strides, 1, offset=0.5), **options}
    model: Any = FCOS(pyramid, num_classes, num_classes, image_size, **options)
    # torchvision cuts distances off at zero, and below it there is no gradient: begin as the paper's exponential, at 1
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

    The papers that report it do not define their head. The usual one, with 128 channels in the last extra map, comes
    0.07 to 0.16 M short of all five printed totals; 256, the default here, give all five: a fit, no proof.

    Args:
        image_size: (H, W) that images are resized to in eval mode, whatever their aspect; train on this size.
        extra_widths, options: Channels of maps at strides 64 to 512; score_thresh, iou_thresh, ... of torchvision's.
    """
    norm_layer = partial(SteadyBatchNorm2d, eps=0.001, momentum=0.03)
    backbone = ExtraLevels(stages, extra_widths, norm_layer)
    boxes = DefaultBoxGenerator([[2, 3] for _ in backbone.out_channels], min_ratio=0.2, max_ratio=0.95)
    head = SSDLiteHead(backbone.out_channels, boxes.num_anchors_per_location(), num_classes + 1, norm_layer)
    usual: dict[str, Any] = dict(score_thresh=0.001, nms_thresh=0.55, detections_per_img=300, topk_candidates=300)
    parts = dict(anchor_generator=boxes, size=tuple(image_size), head=head)
    return SSDLite(backbone, num_classes, num_classes + 1, image_size, square=True, **usual | parts | options)
