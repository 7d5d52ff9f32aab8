"""Cascade Mask R-CNN (Cai and Vasconcelos, CVPR 2018): box stages in a row, each trained on the boxes of the last."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import clip_boxes_to_image

from .detection_transform import DetectionTransform
from .detector import SteadyBatchNorm2d, in_float32
from .feature_pyramid import WIDTH, FeaturePyramid, StridedAnchors, octave_sizes
from .stages import Stages
from .two_stage import BOX_CELLS, HIDDEN, RegionPool, TwoStage, mask_parts

THRESHOLDS = (0.5, 0.6, 0.7)  # IoU from which a box is positive, by stage
LOSS_WEIGHTS = (1.0, 0.5, 0.25)
BOX_HEADS = ("conv", "fc")
MASKS_ON = ("each", "last")


class OneBoxPredictor(FastRCNNPredictor):
    """Scores of all classes, and deltas of one box, repeated for each class. (N, C) -> (N, K), (N, 4 K)."""

    def __init__(self, in_channels: int, num_classes: int):
        super().__init__(in_channels, num_classes)
        self.bbox_pred = nn.Linear(in_channels, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, deltas = super().forward(x)
        return scores, deltas.repeat(1, scores.shape[1])


class CascadeHeads(nn.Module):
    """Stands where torchvision's RoIHeads do, and is made of them, one for each stage.

    Args:
        steps: In order; each samples and codes boxes in its own way. Those with mask parts have a mask head.
        loss_weights: Of each step's losses.
    """

    def __init__(self, steps: Sequence[RoIHeads], loss_weights: Sequence[float]):
        super().__init__()
        self.steps: Any = nn.ModuleList(steps)
        self.loss_weights = tuple(loss_weights)

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Predictions for each image, in eval mode, and losses, in train mode."""
        if self.training:
            return [], self.losses(features, proposals, image_shapes, targets)
        return self.predictions(features, proposals, image_shapes), {}

    def losses(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None,
    ) -> dict[str, Tensor]:
        assert targets is not None
        losses = {}
        for number, (step, weight) in enumerate(zip(self.steps, self.loss_weights, strict=True), 1):
            # Ground truth boxes join the proposals here.
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

    def predictions(
        self, features: dict[str, Tensor], proposals: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
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
    def look(
        step: Any, features: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Logits (N, K) and deltas (N, 4 K) of all boxes."""
        return step.box_predictor(step.box_head(step.box_roi_pool(features, boxes, image_shapes)))

    @staticmethod
    def mask_logits(
        step: Any, features: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> Tensor:
        return step.mask_predictor(step.mask_head(step.mask_roi_pool(features, boxes, image_shapes)))


@torch.no_grad()
def refined(
    step: Any,
    boxes: list[Tensor],
    logits: Tensor,
    deltas: Tensor,
    image_shapes: list[tuple[int, int]],
    labels: Tensor | None = None,
) -> list[Tensor]:
    """The boxes as a step corrects them: for the class that a box is of, by `labels` or else the likeliest object."""
    chosen = logits[:, 1:].argmax(1) + 1
    if labels is not None:
        chosen = torch.where(labels > 0, labels, chosen)
    decoded = step.box_coder.decode(deltas, boxes)  # N K 4
    own = decoded[torch.arange(len(chosen), device=chosen.device), chosen]
    parts = own.split([len(image) for image in boxes])
    return [clip_boxes_to_image(part, shape) for part, shape in zip(parts, image_shapes, strict=True)]


class CascadeMaskRCNN(TwoStage, detection.FasterRCNN):
    """Boxes in several steps, and masks."""

    task = "instances"


def cascade_mask_rcnn(
    stages: Stages,
    num_classes: int,
    *,
    image_size: tuple[int, int] | None = None,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    anchor_scale: float = 8,
    aspect_ratios: Sequence[float] = (0.5, 1.0, 2.0),
    box_head: str = "conv",
    class_agnostic: bool = False,
    masks_on: str = "each",
    thresholds: Sequence[float] = THRESHOLDS,
    loss_weights: Sequence[float] = LOSS_WEIGHTS,
    **options: Any,
) -> nn.Module:
    """Cascade Mask R-CNN. The defaults are those of ConvNeXt's detectors: 86 M parameters on convnext_tiny, 80 classes.

    Args: as `faster_rcnn`, with options of torchvision's FasterRCNN, and
        box_head: Of each stage: "conv": four convolutions with batch norm and a fully connected layer; "fc": two of
            the latter, 4 M less in three stages.
        class_agnostic: One box for all classes rather than one for each.
        masks_on: A mask head for "each" stage, averaged in eval mode, or on the "last" alone.
        thresholds: IoU from which a box counts as positive, for each stage; boxes are coded the finer the later.
        loss_weights: Of each stage.
    """
    if box_head not in BOX_HEADS:
        raise ValueError(f"box_head={box_head!r} is not known; choose one of {', '.join(map(repr, BOX_HEADS))}")
    if masks_on not in MASKS_ON:
        raise ValueError(f"masks_on={masks_on!r} is not known; choose one of {', '.join(map(repr, MASKS_ON))}")
    if len(thresholds) != len(loss_weights):
        raise ValueError(
            f"{len(thresholds)} thresholds and {len(loss_weights)} loss_weights; expected one of each a stage"
        )
    pyramid = FeaturePyramid(stages, lowest=4, extra="pool", width=width)
    predictor = OneBoxPredictor if class_agnostic else FastRCNNPredictor

    def head() -> nn.Module:
        if box_head == "fc":
            return TwoMLPHead(width * BOX_CELLS**2, hidden)
        return FastRCNNConvFCHead((width, BOX_CELLS, BOX_CELLS), [width] * 4, [hidden], norm_layer=SteadyBatchNorm2d)

    model = CascadeMaskRCNN(
        pyramid,
        DetectionTransform(stages, image_size),
        num_classes,
        None,
        rpn_anchor_generator=StridedAnchors(
            octave_sizes(pyramid.strides, anchor_scale), aspect_ratios, pyramid.strides
        ),
        box_roi_pool=RegionPool(stages.strides, BOX_CELLS),
        box_head=head(),
        box_predictor=predictor(hidden, num_classes + 1),
        **options,
    )
    usual = model.roi_heads
    steps = []
    for number, threshold in enumerate(thresholds, 1):
        last = number == len(thresholds)
        step = RoIHeads(
            usual.box_roi_pool,
            usual.box_head if number == 1 else head(),
            usual.box_predictor if number == 1 else predictor(hidden, num_classes + 1),
            threshold,
            threshold,
            usual.fg_bg_sampler.batch_size_per_image,
            usual.fg_bg_sampler.positive_fraction,
            (10.0 * number, 10.0 * number, 5.0 * number, 5.0 * number),
            usual.score_thresh,
            usual.nms_thresh,
            usual.detections_per_img,
            **(mask_parts(pyramid, num_classes) if last or masks_on == "each" else {}),
        )
        for name, module in step.named_children():
            if name.endswith("_predictor") and (number > 1 or name != "box_predictor"):  # the first has it already
                in_float32(module)
        steps.append(step)
    model.roi_heads = CascadeHeads(steps, loss_weights)
    return model


BUILDERS = {"cascade_mask_rcnn": cascade_mask_rcnn}
