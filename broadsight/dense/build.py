"""One function for all dense models, and one model of timm's, `dense_model`, which folders of dense runs refer to."""

from collections.abc import Mapping
from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import nn

from ..errors import check_choice
from ..layers.buffers import restore_on_load
from ..models._backbone import build as build_timm
from ..models._backbone import cfg
from ..models.from_run import check_stored
from ..surgery.broadcasting import add_context_broadcast
from ..surgery.pooling import create_backbone, swap_pool
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
        name, options: One of HEADS, and options of the head, such as `assigner="atss"` of retinanet.
        backbone, pretrained_backbone: A timm name, with timm's weights if wanted, or a model object, which is changed.
        num_classes: Of objects without the background, labelled from 1; for segmentation of the masks, from 0.
        neck: "fpn"; "map" to feed the tokens of the backbone's multi-token pool back to its stages, or "tokens" for
            learned ones, before the decoder; see `open_stages`.
        neck_args, backbone_args: For MultiTokenNeck and timm.create_model.
    """
    check_choice("dense model", name, HEADS)
    if not isinstance(num_classes, int) or num_classes < 1:
        raise ValueError(f"num_classes={num_classes}; expected the number of classes, 1 or more")
    given: Any = dict(pretrained=pretrained_backbone, in_chans=in_chans, neck=neck, neck_args=neck_args)
    stages = open_stages(backbone, **given, **(backbone_args or {}))
    try:
        model = HEADS[name].build(stages, num_classes, **options)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise ValueError(f"{name} cannot be built: {error}") from None
    restore_on_load(model)
    return model


def models_for(task: str) -> list[str]:
    """Names of the heads for a task, the usual one first."""
    return sorted((name for name in HEADS if HEADS[name].task == task), key=lambda name: name != USUAL[task])


def make_dense_model(
    head: str,
    backbone: str | nn.Module,
    num_classes: int,
    *,
    neck: str = "fpn",
    neck_args: Mapping[str, Any] | None = None,
    head_args: Mapping[str, Any] | None = None,
    backbone_args: Mapping[str, Any] | None = None,
    broadcast: str | None = None,
    broadcast_args: Mapping[str, Any] | None = None,
    pool: str | None = None,
    pool_args: Mapping[str, Any] | None = None,
    pretrained_backbone: bool = False,
) -> nn.Module:
    """A dense model from the plain values in a run folder, see `broadsight.dense.build`.

    In head_args a list stands for a tuple. In a backbone given by name, `broadcast` is context broadcasting, see
    `add_context_broadcast`; `pool` is the one that neck "map" takes its tokens from, see `swap_pool`.
    """
    if pool and neck != "map":
        raise ValueError(f"pool={pool!r} given with neck={neck!r}; it is for neck='map'")
    if isinstance(backbone, str):
        backbone = create_backbone(backbone, pretrained=pretrained_backbone, **(backbone_args or {}))
        if broadcast:
            backbone = add_context_broadcast(backbone, broadcast, **(broadcast_args or {}))
        if pool:
            backbone = swap_pool(backbone, pool, num_classes=1, **(pool_args or {}))
    given = (head_args or {}).items()
    options: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in given}
    return build(head, backbone, num_classes, neck=neck, neck_args=neck_args, **options)


def neck_of(stored: Mapping[str, Any]) -> str:
    """The neck that a run folder's arguments of `make_dense_model` mean: the first version called "tokens" "map"."""
    neck = stored.get("neck") or "fpn"
    return "tokens" if neck == "map" and "pool_args" not in stored else neck


default_cfgs = generate_default_cfgs({"dense_model": cfg(first_conv=None, classifier=None)})


@register_model
def dense_model(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Any head on any backbone; takes the arguments of `make_dense_model`. Returns losses or objects, not classes."""
    if not kwargs.get("head") or not kwargs.get("backbone"):
        raise ValueError("dense_model is no model by itself; give head=, such as 'retinanet', and backbone=")
    if kwargs.get("pretrained_cfg"):  # by a run folder
        check_stored(kwargs, "dense_model")
        kwargs = {**kwargs, "neck": neck_of(kwargs)}

    def make(in_chans: int | None = None, backbone_args: Mapping[str, Any] | None = None, **given: Any) -> nn.Module:
        channels = {} if in_chans is None else {"in_chans": in_chans}  # from a run folder, through timm
        return make_dense_model(backbone_args={**channels, **(backbone_args or {})}, **given)

    kwargs = {"pretrained_filter_fn": lambda state, model: state, **kwargs}
    return build_timm(make, "dense_model", pretrained, {}, kwargs)
