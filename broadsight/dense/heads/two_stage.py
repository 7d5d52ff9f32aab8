"""Detectors that propose regions and then look into each: Faster, Mask and Keypoint R-CNN, and Cascade Mask R-CNN."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image
from torchvision.ops.poolers import LevelMapper

from ...errors import check_choice
from ..detector import WIDTH, Detector, FeaturePyramid, SteadyBatchNorm2d, StridedAnchors, in_float32
from ..stages import Stages
from . import register

BOX_CELLS, MASK_CELLS = 7, 14  # sides of the grid that a region is pooled to

Maps = dict[str, Tensor]
Boxes = list[Tensor]  # (N_i, 4) of each image
Sizes = list[tuple[int, int]]  # (H_i, W_i) of each image
Objects = list[dict[str, Tensor]]  # predictions or targets of each image


class FasterRCNN(Detector, detection.FasterRCNN):
    """Boxes (Ren et al., NeurIPS 2015; with a feature pyramid, Lin et al., CVPR 2017)."""


class MaskRCNN(Detector, detection.MaskRCNN):  # He et al., ICCV 2017, as the next
    task = "instances"


class KeypointRCNN(Detector, detection.KeypointRCNN):
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
    kind: type[Detector],
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
) -> Any:
    """An R-CNN: proposals from maps at strides 4 to 64, and for each two fully connected layers.

    Args:
        image_size: (shorter side, longest side) that images are resized to in eval mode.
        width, hidden: Channels of the pyramid, and features of the fully connected layers.
        box_head, box_predictor: To replace the two layers and what reads them.
        options: Of torchvision's class: rpn_post_nms_top_n_train, box_batch_size_per_image, box_score_thresh, ...
    """
    pyramid = FeaturePyramid(stages, lowest=4, extra="pool", width=width)
    parts: dict[str, Any] = dict(
        rpn_anchor_generator=StridedAnchors(pyramid.strides, anchor_scale, aspect_ratios),
        box_roi_pool=RegionPool(stages.strides, BOX_CELLS),
        box_head=box_head or TwoMLPHead(width * BOX_CELLS**2, hidden),
        box_predictor=box_predictor or FastRCNNPredictor(hidden, num_classes + 1),
    )
    return kind(pyramid, num_classes, None, image_size, **parts | options)


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
    """Keypoint R-CNN: Faster R-CNN, and a heat map of 56 x 56 for each keypoint of a box, after convolutions of
    `keypoint_layers` channels; options as of `rcnn`."""
    parts: dict[str, Any] = dict(
        keypoint_roi_pool=RegionPool(stages.strides, MASK_CELLS),
        keypoint_head=KeypointRCNNHeads(width, keypoint_layers),
        keypoint_predictor=KeypointRCNNPredictor(keypoint_layers[-1], num_keypoints),
    )
    return rcnn(KeypointRCNN, stages, num_classes, width=width, **parts | options)


class OneBoxPredictor(FastRCNNPredictor):
    """Scores of all classes, and deltas of one box, repeated for each class. (N, C) -> (N, K), (N, 4 K)."""

    def __init__(self, in_channels: int, num_classes: int):
        super().__init__(in_channels, num_classes)
        self.bbox_pred = nn.Linear(in_channels, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, deltas = super().forward(x)
        return scores, deltas.repeat(1, scores.shape[1])


class CascadeHeads(nn.Module):
    """Replaces torchvision's RoIHeads by one for each stage, trained on the boxes of the last, with samples and a
    coding of boxes of its own (Cai and Vasconcelos, CVPR 2018)."""

    def __init__(self, steps: Sequence[RoIHeads], loss_weights: Sequence[float]):
        super().__init__()
        self.steps: Any = nn.ModuleList(steps)
        self.loss_weights = tuple(loss_weights)

    def forward(
        self, features: Maps, proposals: Boxes, image_shapes: Sizes, targets: Objects | None = None
    ) -> tuple[Objects, dict[str, Tensor]]:
        if self.training:
            return [], self.losses(features, proposals, image_shapes, targets)
        return self.predictions(features, proposals, image_shapes), {}

    def losses(self, features: Maps, proposals: Boxes, image_shapes: Sizes, targets: Any) -> dict[str, Tensor]:
        losses = {}
        for number, (step, weight) in enumerate(zip(self.steps, self.loss_weights, strict=True), 1):
            # True boxes join the proposals here
            samples, matched, labels, wanted = step.select_training_samples(proposals, targets)
            logits, deltas = self.look(step, features, samples, image_shapes)
            class_loss, box_loss = fastrcnn_loss(logits, deltas, labels, wanted)
            own = {"loss_classifier": class_loss, "loss_box_reg": box_loss}
            if step.has_mask():
                positive = [torch.where(image > 0)[0] for image in labels]
                boxes = [image[chosen] for image, chosen in zip(samples, positive, strict=True)]
                owners = [image[chosen] for image, chosen in zip(matched, positive, strict=True)]
                masks, classes = [target["masks"] for target in targets], [target["labels"] for target in targets]
                mask_logits = self.mask_logits(step, features, boxes, image_shapes)
                own["loss_mask"] = maskrcnn_loss(mask_logits, boxes, masks, classes, owners)
            losses |= {f"{name}_{number}": weight * loss for name, loss in own.items()}
            proposals = refined(step, samples, logits, deltas, image_shapes, torch.cat(labels))
        return losses

    def predictions(self, features: Maps, proposals: Boxes, image_shapes: Sizes) -> Objects:
        """Boxes of the last step; scores and masks are means over the steps."""
        shares = []
        for step in self.steps:
            logits, deltas = self.look(step, features, proposals, image_shapes)
            shares.append(logits.softmax(1))
            if step is not self.steps[-1]:
                proposals = refined(step, proposals, logits, deltas, image_shapes)
        mean = torch.stack(shares).mean(0).log()  # a softmax follows, which gives the mean again
        boxes, scores, labels = self.steps[-1].postprocess_detections(mean, deltas, proposals, image_shapes)
        looks = [self.mask_logits(step, features, boxes, image_shapes) for step in self.steps if step.has_mask()]
        masks = torch.stack([logits.sigmoid() for logits in looks]).mean(0).logit(1e-6)
        columns = zip(boxes, labels, scores, maskrcnn_inference(masks, labels), strict=True)
        return [dict(zip(("boxes", "labels", "scores", "masks"), image, strict=True)) for image in columns]

    @staticmethod
    def look(step: Any, features: Maps, boxes: Boxes, image_shapes: Sizes) -> tuple[Tensor, Tensor]:
        """Logits (N, K) and deltas (N, 4 K) of all boxes."""
        return step.box_predictor(step.box_head(step.box_roi_pool(features, boxes, image_shapes)))

    @staticmethod
    def mask_logits(step: Any, features: Maps, boxes: Boxes, image_shapes: Sizes) -> Tensor:
        return step.mask_predictor(step.mask_head(step.mask_roi_pool(features, boxes, image_shapes)))


@torch.no_grad()
def refined(
    step: Any, boxes: Boxes, logits: Tensor, deltas: Tensor, image_shapes: Sizes, labels: Tensor | None = None
) -> Boxes:
    """Boxes as a step corrects them, each for its class: of `labels`, or the likeliest class that is an object."""
    chosen = logits[:, 1:].argmax(1) + 1
    if labels is not None:
        chosen = torch.where(labels > 0, labels, chosen)
    decoded = step.box_coder.decode(deltas, boxes)  # N K 4
    own = decoded[torch.arange(len(chosen), device=chosen.device), chosen]
    parts = own.split([len(image) for image in boxes])
    return [clip_boxes_to_image(part, shape) for part, shape in zip(parts, image_shapes, strict=True)]


class CascadeMaskRCNN(Detector, detection.FasterRCNN):
    task = "instances"


@register("cascade_mask_rcnn", "instances")
def cascade_mask_rcnn(
    stages: Stages,
    num_classes: int,
    *,
    width: int = WIDTH,
    hidden: int = 1024,
    box_head: str = "conv",
    class_agnostic: bool = False,
    masks_on: str = "each",
    thresholds: Sequence[float] = (0.5, 0.6, 0.7),
    loss_weights: Sequence[float] = (1.0, 0.5, 0.25),
    **options: Any,
) -> nn.Module:
    """Cascade Mask R-CNN. The defaults are those of ConvNeXt's detectors: 86 M parameters on convnext_tiny, 80 classes.

    Args: as of `rcnn`, and
        box_head: Of each stage: "conv": four convolutions and a fully connected layer; "fc": two of the latter.
        class_agnostic: One box for all classes rather than one for each.
        masks_on: A mask head for "each" stage, averaged in eval mode, or on the "last" alone.
        thresholds, loss_weights: IoU from which a box is positive, for each stage, and what its loss counts.
    """
    check_choice("box_head", box_head, ("conv", "fc"))
    check_choice("masks_on", masks_on, ("each", "last"))
    if len(thresholds) != len(loss_weights):
        count = len(loss_weights)
        raise ValueError(f"{len(thresholds)} thresholds and {count} loss_weights; expected one of each a stage")

    def box_parts() -> tuple[nn.Module, nn.Module]:
        predictor = (OneBoxPredictor if class_agnostic else FastRCNNPredictor)(hidden, num_classes + 1)
        if box_head == "fc":
            return TwoMLPHead(width * BOX_CELLS**2, hidden), predictor
        size = width, BOX_CELLS, BOX_CELLS
        return FastRCNNConvFCHead(size, [width] * 4, [hidden], norm_layer=SteadyBatchNorm2d), predictor

    head, predictor = box_parts()
    options |= dict(width=width, hidden=hidden, box_head=head, box_predictor=predictor)
    model = rcnn(CascadeMaskRCNN, stages, num_classes, **options)
    usual, steps = model.roi_heads, []
    sampling = usual.fg_bg_sampler.batch_size_per_image, usual.fg_bg_sampler.positive_fraction
    after = usual.score_thresh, usual.nms_thresh, usual.detections_per_img
    for number, threshold in enumerate(thresholds, 1):
        if number > 1:
            head, predictor = box_parts()
        box = usual.box_roi_pool, head, predictor
        weights = (10.0 * number, 10.0 * number, 5.0 * number, 5.0 * number)  # later stages code boxes more finely
        mask = mask_parts(stages, width, num_classes) if number == len(thresholds) or masks_on == "each" else {}
        step = RoIHeads(*box, threshold, threshold, *sampling, weights, *after, **mask)
        for name, module in step.named_children():
            if name.endswith("_predictor") and module is not usual.box_predictor:  # which has it already
                in_float32(module)
        steps.append(step)
    model.roi_heads = CascadeHeads(steps, loss_weights)
    return model
