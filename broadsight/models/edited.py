"""Models that were changed after timm made them, under one name that timm knows: what run folders refer to."""

from collections.abc import Mapping
from typing import Any, cast

from timm.models import generate_default_cfgs, register_model
from torch import nn

from ..surgery.broadcasting import add_context_broadcast
from ..surgery.description import as_edited, describe_edited, refuse_undescribed
from ..surgery.pooling import create_backbone, swap_pool
from ._backbone import build, cfg
from .from_run import check_stored


def edit(
    backbone: str,
    *,
    pool: str | None = None,
    pool_args: Mapping[str, Any] | None = None,
    broadcast: str | None = None,
    broadcast_args: Mapping[str, Any] | None = None,
    pool_first: bool = False,
    pooled: bool = True,
    num_classes: int = 1000,
    undescribed: str = "",
    **create_kwargs: Any,
) -> nn.Module:
    """A timm model with another pooling, with broadcast context, with both or as it is.

    Args:
        backbone, create_kwargs: timm's name, and for `create_backbone`: any_size, and what timm.create_model takes.
        pool, pool_args: As for `swap_pool`.
        broadcast, broadcast_args: The kind and further arguments of `add_context_broadcast`.
        pool_first: Whether context is broadcast in what the pooling has made of the model, and not before.
        pooled: False leaves out the pooling, as `reset_classifier(..., global_pool="")` does.
        undescribed: Why the model that was saved cannot be made again; raised.
    """
    refuse_undescribed({"undescribed": undescribed})
    if not backbone:
        raise ValueError("edited is no model by itself; give backbone=, a timm name, and pool= or broadcast=")
    if isinstance(create_kwargs.get("img_size"), list):  # as JSON has it
        create_kwargs["img_size"] = tuple(create_kwargs["img_size"])
    model: Any = create_backbone(backbone, num_classes=num_classes, **create_kwargs)
    if broadcast and not (pool and pool_first):
        model = add_context_broadcast(model, broadcast, **(broadcast_args or {}))
    if pool:
        sized: dict[str, Any] = {"img_size": create_kwargs.get("img_size"), **(pool_args or {})}
        model = swap_pool(model, pool, num_classes=num_classes, **sized)
    if broadcast and pool and pool_first:
        model = add_context_broadcast(model, broadcast, **(broadcast_args or {}))
    if not pooled:
        cast(Any, model).reset_classifier(num_classes, global_pool="")
    return model


default_cfgs = generate_default_cfgs({"edited": cfg(first_conv=None, classifier=None)})


@register_model
def edited(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Any model of another name under another pooling or with broadcast context; see `edit` for the arguments."""
    own: dict[str, Any] = {}

    def make(backbone: str = "", **given: Any) -> nn.Module:
        model: Any = edit(backbone, **given)
        describe_edited(model, as_edited(model))  # a model without edits, too, is now one by this name
        own.update(model.pretrained_cfg)
        return model

    if described := bool(kwargs.get("pretrained_cfg")):  # by a run folder
        check_stored(kwargs, "edited")
    model: Any = build(make, "edited", pretrained, {}, {"pretrained_filter_fn": lambda state, _: state, **kwargs})
    if not described:
        model.pretrained_cfg = model.default_cfg = own
    return model
