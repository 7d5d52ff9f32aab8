"""Timm's models with context in their blocks (Hyeon-Woo et al., ICCV 2023). Readings: docs/context-broadcasting.md."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from timm.models import generate_default_cfgs, pvt_v2, swin_transformer, vision_transformer
from torch import nn

from ..surgery.broadcasting import add_context_broadcast
from ..surgery.pooling import create_backbone
from ._backbone import build, cfg, register

ISOTROPIC = ("vit", "deit")  # blocks of one size all through
BROADCAST_ARGUMENTS = ("kind", "branch", "position", "class_token")


@dataclass(frozen=True)
class Model:
    """A model of timm and how context is broadcast in it.

    Args:
        base: timm's name.
        suffix: What the paper's rows add to it.
    """

    base: str
    kind: str = "cb"
    branch: str = "mlp"
    position: str = "end"
    suffix: str = "cb"


SIZES = ("tiny", "small", "base")
_PLAIN = {
    **{f"vit_{size}": Model(f"vit_{size}_patch16_224") for size in SIZES},
    **{f"deit_{size}_distilled": Model(f"deit_{size}_distilled_patch16_224") for size in SIZES},
    "twins_pcpvt_small": Model("twins_pcpvt_small"),
    "pvt_v2_b0": Model("pvt_v2_b0"),
    "pvt_v2_b1": Model("pvt_v2_b1"),
    "swin_tiny": Model("swin_tiny_patch4_window7_224"),
}
# What the rows of Tables S5 and S6 do in ViT-S.
_PLACES = {
    "": {},
    "_attn": dict(branch="attn"),
    "_both": dict(branch="both"),
    "_front": dict(position="front"),
    "_mid": dict(position="mid"),
}


MODELS: dict[str, Model] = {}
for _name, _plain in _PLAIN.items():
    MODELS[f"{_name}_cb"] = _plain
    MODELS[f"{_name}_cb_s"] = replace(_plain, kind="scaled", suffix="cb_s")
for _kind, _infix in (("cb", ""), ("gate", "_gate"), ("hybrid", "_hybrid")):
    for _place, _where in _PLACES.items():
        _suffix = f"cb{_infix}{_place}"
        MODELS[f"vit_small_{_suffix}"] = replace(_PLAIN["vit_small"], kind=_kind, suffix=_suffix, **_where)
# The same under timm's full name and the suffix, where that is another.
ALIASES = {f"{n.base}_{n.suffix}": name for name, n in MODELS.items() if f"{n.base}_{n.suffix}" != name}

_FILTERS: dict[str, Callable[..., Any]] = {
    "vit": vision_transformer.checkpoint_filter_fn,
    "deit": vision_transformer.checkpoint_filter_fn,
    "twins": lambda state_dict, model: state_dict,
    "pvt": pvt_v2.checkpoint_filter_fn,
    "swin": swin_transformer.checkpoint_filter_fn,
}


def model_of(name: str) -> Model:
    """What a registered name stands for, short or long."""
    return MODELS[ALIASES.get(name, name)]


def _create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    model = model_of(name)
    family = model.base.split("_")[0]

    def construct(**given: Any) -> nn.Module:
        how: dict[str, Any] = dict(kind=model.kind, branch=model.branch, position=model.position)
        how |= {key: given.pop(key) for key in BROADCAST_ARGUMENTS if key in given}
        return add_context_broadcast(create_backbone(model.base, **given), **how)

    maps = 3 if family in ISOTROPIC else (0, 1, 2, 3)
    defaults = dict(feature_cfg=dict(out_indices=maps, feature_cls="getter"), pretrained_filter_fn=_FILTERS[family])
    return build(construct, name, pretrained, {}, {**defaults, **kwargs})


def _cfg(name: str) -> dict[str, Any]:
    base = model_of(name).base
    family = base.split("_")[0]
    classifier: Any = ("head", "head_dist") if "distilled" in base else "head.fc" if family == "swin" else "head"
    first = "patch_embeds.0.proj" if family == "twins" else "patch_embed.proj"
    return cfg(first_conv=first, classifier=classifier, pool_size=None if family in ISOTROPIC else (7, 7))


default_cfgs = generate_default_cfgs({name: _cfg(name) for name in (*MODELS, *ALIASES)})
__getattr__ = register(__name__, (*MODELS, *ALIASES), _create)
