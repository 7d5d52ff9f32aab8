"""Adaptive training sample selection (Zhang et al., CVPR 2020): each object sets its own threshold for positives."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.fcos import FCOSClassificationHead, FCOSRegressionHead
from torchvision.ops import box_iou, generalized_box_iou_loss, sigmoid_focal_loss

ANCHOR_SCALE = 8  # side of the one square anchor of a position, in strides
BOX_WEIGHTS = (10.0, 10.0, 5.0, 5.0)  # of the deltas
BOX_LOSS_WEIGHT = 2.0


def assign(anchors_per_level: list[Tensor], gt_boxes: Tensor, k: int = 9) -> Tensor:
    """The object that each anchor of all levels, (A_i, 4) each, is trained for: indices into gt_boxes (G, 4), or -1.

    An object's candidates are the k anchors of each level with the nearest centres. Positive are those with a centre
    inside the object and an IoU of at least mean + standard deviation over all its candidates. An anchor that is
    positive for several objects goes to the one with the highest IoU.
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
    positive = torch.zeros_like(overlaps, dtype=torch.bool)
    positive.scatter_(0, candidates, found >= found.mean(0) + spread)
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
        outputs: dict[str, list[Tensor]] = {"bbox_regression": []}
        for features, scale in zip(x, self.scales, strict=True):
            features = self.conv(features)
            outputs["bbox_regression"].append((self.bbox_reg(features) * scale).flatten(2).mT)  # B HW 4
            if hasattr(self, "bbox_ctrness"):
                outputs.setdefault("bbox_ctrness", []).append(self.bbox_ctrness(features).flatten(2).mT)  # B HW 1
        return {name: torch.cat(levels, 1) for name, levels in outputs.items()}


class AdaptiveHead(nn.Module):
    """Maps -> cls_logits (B, A, num_classes), bbox_regression (B, A, 4) and, if wanted, bbox_ctrness (B, A, 1)."""

    def __init__(self, in_channels: int, levels: int, num_classes: int, centerness: bool = True):
        super().__init__()
        self.classification_head = FCOSClassificationHead(in_channels, 1, num_classes)
        self.regression_head = AdaptiveRegressionHead(in_channels, levels, centerness)

    def forward(self, x: list[Tensor]) -> dict[str, Tensor]:
        return {"cls_logits": self.classification_head(x), **self.regression_head(x)}


class AdaptiveRetinaNet(detection.RetinaNet):
    """RetinaNet with one square anchor a position and these samples: focal, GIoU and centerness losses.

    Labels count from 0, as in torchvision's class.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.box_coder.weights = BOX_WEIGHTS

    def compute_loss(
        self, targets: list[dict[str, Tensor]], head_outputs: dict[str, Tensor], anchors: list[Tensor]
    ) -> dict[str, Tensor]:
        # With one anchor a position, a level is a run of anchors of one size
        runs = torch.unique_consecutive(anchors[0][:, 2] - anchors[0][:, 0], return_counts=True)[1].tolist()
        logits = head_outputs["cls_logits"]
        wanted = torch.zeros_like(logits)
        own_boxes, own_anchors, places = [], [], []
        for number, (target, image_anchors) in enumerate(zip(targets, anchors, strict=True)):
            matched = assign(list(image_anchors.split(runs)), target["boxes"])
            place = torch.where(matched >= 0)[0]
            wanted[number, place, target["labels"][matched[place]]] = 1.0
            own_boxes.append(target["boxes"][matched[place]].to(image_anchors.dtype))
            own_anchors.append(image_anchors[place])
            places.append(place + number * logits.shape[1])
        boxes, samples, place = torch.cat(own_boxes), torch.cat(own_anchors), torch.cat(places)
        count = max(1, len(place))
        deltas = head_outputs["bbox_regression"].flatten(0, 1)[place]
        box_losses = generalized_box_iou_loss(self.box_coder.decode_single(deltas, samples), boxes)
        losses = {"classification": sigmoid_focal_loss(logits, wanted, reduction="sum") / count}
        if "bbox_ctrness" in head_outputs:
            central = centerness(samples, boxes)
            said = head_outputs["bbox_ctrness"].flatten()[place]
            box_loss = (box_losses * central).sum() / central.sum().clamp(min=1e-6)
            losses["bbox_ctrness"] = F.binary_cross_entropy_with_logits(said, central, reduction="sum") / count
        else:
            box_loss = box_losses.sum() / count
        return {**losses, "bbox_regression": BOX_LOSS_WEIGHT * box_loss}

    def postprocess_detections(self, head_outputs: Any, anchors: Any, image_shapes: Any) -> list[dict[str, Tensor]]:
        """Scores are the geometric mean of the class's probability and centerness."""
        if "bbox_ctrness" in head_outputs:
            pairs = zip(head_outputs["cls_logits"], head_outputs["bbox_ctrness"], strict=True)
            scores = [(logits.sigmoid() * said.sigmoid()).sqrt().logit(1e-6) for logits, said in pairs]
            head_outputs = {**head_outputs, "cls_logits": scores}
        return super().postprocess_detections(head_outputs, anchors, image_shapes)
