"""One function for all dense models: the name of a head, any timm backbone, and the classes to find."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import check_choice
from ..layers.buffers import restore_on_load
from .heads import HEADS
from .stages import open_stages

# The head of a task unless another is chosen.
USUAL = {"detect": "retinanet", "instances": "mask_rcnn", "keypoints": "keypoint_rcnn", "segment": "semantic_fpn"}


def build(
    name: str,
    backbone: str | nn.Module,
    num_classes: int,
    *,
    neck: str = "fpn",
    pretrained_backbone: bool = False,
    in_chans: int | None = None,
    neck_args: Mapping[str, Any] | None = None,
    backbone_args: Mapping[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """A detector, segmenter or pose model on any timm model.

    In train mode `model(images, targets)` returns a dict of losses, in eval mode `model(images)` predictions. Images
    have values from 0 to 1; detectors take a list of (C, H, W) of any sizes, the others a batch (B, C, H, W).

    Args:
        name: One of HEADS.
        backbone: A timm name or a model object, which is changed; see `open_stages`.
        num_classes: Classes of objects without the background, labelled 1 to num_classes. For segmentation, the
            classes in the masks, 0 to num_classes - 1.
        neck: "fpn", or "map" for the multi-token neck before the decoder.
        pretrained_backbone: Load timm's weights of the backbone.
        in_chans: Channels of an image.
        neck_args, backbone_args: For MultiTokenNeck and timm.create_model.
        options: Of the head, such as `assigner="atss"` of retinanet.
    """
    check_choice("dense model", name, HEADS)
    if not isinstance(num_classes, int) or num_classes < 1:
        raise ValueError(f"num_classes={num_classes}; expected the number of classes, 1 or more")
    given: dict[str, Any] = dict(pretrained=pretrained_backbone, in_chans=in_chans, neck=neck, neck_args=neck_args)
    stages = open_stages(backbone, **given, **(backbone_args or {}))
    try:
        model = HEADS[name].build(stages, num_classes, **options)
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise ValueError(f"{name} cannot be built: {error}") from None
        raise
    restore_on_load(model)
    return model


def models_for(task: str) -> list[str]:
    """Names of the heads for a task, the usual one first."""
    return sorted((name for name in HEADS if HEADS[name].task == task), key=lambda name: name != USUAL[task])
