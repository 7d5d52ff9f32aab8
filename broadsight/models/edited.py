"""Networks that were changed after timm made them, under one name that timm knows: what run folders refer to."""

from collections.abc import Mapping
from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import nn

from ..broadcasting import add_context_broadcast
from ..pooling import create_backbone, swap_pool
from ._backbone import build, cfg


def edit(
    backbone: str,
    *,
    pool: str | None = None,
    pool_args: Mapping[str, Any] | None = None,
    broadcast: str | None = None,
    broadcast_args: Mapping[str, Any] | None = None,
    num_classes: int = 1000,
    **create_kwargs: Any,
) -> nn.Module:
    """A timm network with another pooling, with broadcast context, with both or as it is.

    Args:
        backbone: timm's name.
        pool, pool_args: As for `swap_pool`.
        broadcast, broadcast_args: The kind and further arguments of `add_context_broadcast`.
        create_kwargs: For timm.create_model.
    """
    if not backbone:
        raise ValueError("edited is no network by itself; give backbone=, a timm name, and pool= or broadcast=")
    model = create_backbone(backbone, num_classes=num_classes, **create_kwargs)
    if broadcast:
        model = add_context_broadcast(model, broadcast, **(broadcast_args or {}))
    if pool:
        model = swap_pool(
            model, pool, num_classes=num_classes, img_size=create_kwargs.get("img_size"), **(pool_args or {})
        )
    return model


default_cfgs = generate_default_cfgs({"edited": cfg(first_conv=None, classifier=None)})


@register_model
def edited(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Any network of another name under another pooling or with broadcast context; see `edit` for the arguments."""
    of_backbone: dict[str, Any] = {}

    def make(backbone: str = "", **given: Any) -> nn.Module:
        model: Any = edit(backbone, **given)
        of_backbone.update(model.pretrained_cfg)
        return model

    described = bool(kwargs.get("pretrained_cfg"))  # by a run folder
    kwargs = {"pretrained_filter_fn": lambda state, model: state, **kwargs}
    model: Any = build(make, "edited", pretrained, {}, kwargs)
    if not described:
        model.pretrained_cfg = model.default_cfg = of_backbone
    return model
