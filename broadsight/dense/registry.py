"""Detectors, segmenters and pose models under one name that timm knows: what folders of dense runs refer to."""

from collections.abc import Mapping
from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import nn

from ..models._backbone import build, cfg
from ..models.from_run import check_stored
from ..surgery.broadcasting import add_context_broadcast
from ..surgery.pooling import create_backbone


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
    pretrained_backbone: bool = False,
) -> nn.Module:
    """A dense model from plain values, as a folder keeps them; see `broadsight.dense.build`.

    Args:
        head: One of broadsight.dense.MODELS.
        backbone: timm's name, or the model itself.
        head_args: Options of the model's own builder.
        backbone_args: For timm.create_model.
        broadcast, broadcast_args: Context broadcasting in the backbone; see `add_context_broadcast`.
    """
    from .build import build as build_dense  # much that a classifier does not need

    if isinstance(backbone, str):
        backbone = create_backbone(backbone, pretrained=pretrained_backbone, **(backbone_args or {}))
        if broadcast:
            backbone = add_context_broadcast(backbone, broadcast, **(broadcast_args or {}))
    options: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in (head_args or {}).items()
    }
    return build_dense(head, backbone, num_classes, neck=neck, neck_args=neck_args, **options)


default_cfgs = generate_default_cfgs({"dense_model": cfg(first_conv=None, classifier=None)})


@register_model
def dense_model(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Any dense model on any model; see `make_dense_model` for the arguments. Gives losses or objects, not classes."""
    if not kwargs.get("head") or not kwargs.get("backbone"):
        raise ValueError("dense_model is no model by itself; give head=, such as 'retinanet', and backbone=")
    if kwargs.get("pretrained_cfg"):  # by a run folder
        check_stored(kwargs, "dense_model")

    def make(in_chans: int | None = None, **given: Any) -> nn.Module:
        channels = {} if in_chans is None else {"in_chans": in_chans}  # as timm reads them out of a folder
        given["backbone_args"] = {**channels, **(given.get("backbone_args") or {})}
        return make_dense_model(**given)

    kwargs = {"pretrained_filter_fn": lambda state, model: state, **kwargs}
    return build(make, "dense_model", pretrained, {}, kwargs)
