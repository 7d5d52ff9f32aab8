"""Dense models as one model of timm's, `dense_model`, which the folders of dense runs refer to."""

from collections.abc import Mapping
from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import nn

from ..models._backbone import build, cfg
from ..models.from_run import check_stored
from ..surgery.broadcasting import add_context_broadcast
from ..surgery.pooling import create_backbone
from .build import build as build_dense


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
    """A dense model from the plain values in a run folder; see `broadsight.dense.build`.

    Args:
        head_args: Options of the head; a list stands for a tuple.
        broadcast, broadcast_args: Context broadcasting in a backbone given by name; see `add_context_broadcast`.
    """
    if isinstance(backbone, str):
        backbone = create_backbone(backbone, pretrained=pretrained_backbone, **(backbone_args or {}))
        if broadcast:
            backbone = add_context_broadcast(backbone, broadcast, **(broadcast_args or {}))
    options: dict[str, Any] = dict(head_args or {})
    options |= {key: tuple(value) for key, value in options.items() if isinstance(value, list)}
    return build_dense(head, backbone, num_classes, neck=neck, neck_args=neck_args, **options)


default_cfgs = generate_default_cfgs({"dense_model": cfg(first_conv=None, classifier=None)})


@register_model
def dense_model(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Any head on any backbone; takes the arguments of `make_dense_model`. Returns losses or objects, not classes."""
    if not kwargs.get("head") or not kwargs.get("backbone"):
        raise ValueError("dense_model is no model by itself; give head=, such as 'retinanet', and backbone=")
    if kwargs.get("pretrained_cfg"):  # by a run folder
        check_stored(kwargs, "dense_model")

    def make(in_chans: int | None = None, **given: Any) -> nn.Module:
        channels = {} if in_chans is None else {"in_chans": in_chans}  # from a run folder, through timm
        given["backbone_args"] = channels | (given.get("backbone_args") or {})
        return make_dense_model(**given)

    return build(make, "dense_model", pretrained, {}, {"pretrained_filter_fn": lambda state, model: state, **kwargs})
