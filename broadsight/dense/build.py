"""One function for all dense models: a name, any timm backbone, and what it is to find."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..errors import unknown
from ..layers.buffers import restore_on_load
from .stages import open_stages

# Each model with its task.
MODELS: dict[str, str] = {
    "retinanet": "detect",
    "fcos": "detect",
    "ssdlite": "detect",
    "faster_rcnn": "detect",
    "rtdetr": "detect",
    "mask_rcnn": "instances",
    "cascade_mask_rcnn": "instances",
    "keypoint_rcnn": "keypoints",
    "simple_baseline": "keypoints",
    "semantic_fpn": "segment",
    "upernet": "segment",
}
# What is built for a task if nobody says.
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

    In train mode `model(images, targets)` gives a dict of losses, in eval mode `model(images)` predictions. Images have
    values from 0 to 1; detectors take a list of (C, H, W) of any sizes, the others a batch (B, C, H, W).

    Args:
        name: One of MODELS.
        backbone: A timm name or a model object, which is changed; see `open_stages`.
        num_classes: Classes of objects, the background not counted: labels are 1 to num_classes. For segmentation, the
            classes that masks hold, 0 to num_classes - 1.
        neck: "fpn", or "map" to put the multi-token neck before the decoder.
        pretrained_backbone: Begin from timm's weights of the backbone.
        in_chans: Channels of an image.
        neck_args, backbone_args: For MultiTokenNeck and timm.create_model.
        options: Of the model's own builder, such as `assigner="atss"` of retinanet.
    """
    maker = builder(name)
    if not isinstance(num_classes, int) or num_classes < 1:
        raise ValueError(f"num_classes={num_classes}; expected the number of classes, 1 or more")
    stages = open_stages(
        backbone,
        pretrained=pretrained_backbone,
        in_chans=in_chans,
        neck=neck,
        neck_args=neck_args,
        **(backbone_args or {}),
    )
    try:
        model = maker(stages, num_classes, **options)
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise ValueError(f"{name} cannot be built: {error}") from None
        raise
    restore_on_load(model)
    return model


def builder(name: str) -> Callable[..., nn.Module]:
    """The function that builds a model of this name from Stages, a number of classes and options."""
    if name not in MODELS:
        raise unknown("dense model", name, MODELS)
    from . import cascade, one_stage, pose, semantic, set_prediction, two_stage  # whoever lists names needs none of it

    files: tuple[Any, ...] = (cascade, one_stage, pose, semantic, set_prediction, two_stage)
    return next(file.BUILDERS[name] for file in files if name in file.BUILDERS)


def models_for(task: str) -> list[str]:
    """Names of the models for a task, the usual one first."""
    return sorted((name for name in MODELS if MODELS[name] == task), key=lambda name: name != USUAL[task])
