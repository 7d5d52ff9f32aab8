"""Timm's models with context in their blocks (Hyeon-Woo et al., ICCV 2023). Readings: docs/context-broadcasting.md."""

from dataclasses import dataclass
from typing import Any

from timm.models import generate_default_cfgs, pvt_v2, swin_transformer, vision_transformer
from torch import nn

from ..surgery.broadcasting import add_context_broadcast
from ..surgery.pooling import create_backbone
from ._backbone import build, cfg, register

ISOTROPIC = ("vit", "deit", "localvit")  # blocks of one size all through


@dataclass(frozen=True)
class Model:
    """A model of timm, by timm's name, and how context is broadcast in it."""

    base: str
    kind: str = "cb"
    branch: str = "mlp"
    position: str = "end"

    @property
    def family(self) -> str:
        """timm's or our file that has the base."""
        return next(name for name in _FILTERS if self.base.startswith(name))


_BASES = {f"vit_{size}": f"vit_{size}_patch16_224" for size in ("tiny", "small", "base")}
_BASES |= {f"deit_{size}_distilled": f"deit_{size}_distilled_patch16_224" for size in ("tiny", "small", "base")}
_BASES |= {name: name for name in ("twins_pcpvt_small", "pvt_small", "localvit_tiny", "pvt_v2_b0", "pvt_v2_b1")}
_BASES["swin_tiny"] = "swin_tiny_patch4_window7_224"
_PLACES = {"": {}, "_attn": dict(branch="attn"), "_both": dict(branch="both")}
_PLACES |= {"_front": dict(position="front"), "_mid": dict(position="mid")}
# Suffixes of the paper's rows: those of every model, and what Tables S5 and S6 do in ViT-S.
_KINDS: dict[str, dict[str, str]] = {"cb": {}, "cb_s": dict(kind="scaled")}
_ROWS = {f"cb{place}": where for place, where in _PLACES.items()}
_ROWS |= {f"cb_{kind}{place}": dict(kind=kind, **_PLACES[place]) for kind in ("gate", "hybrid") for place in _PLACES}

MODELS: dict[str, Model] = {}
ALIASES: dict[str, str] = {}  # the same under timm's full name and the suffix, where that is another
for _name, _base in _BASES.items():
    for _suffix, _how in (_KINDS | _ROWS if _name == "vit_small" else _KINDS).items():
        MODELS[f"{_name}_{_suffix}"] = Model(_base, **_how)
        if _base != _name:
            ALIASES[f"{_base}_{_suffix}"] = f"{_name}_{_suffix}"

_FILTERS: dict[str, Any] = {
    **dict.fromkeys(ISOTROPIC, vision_transformer.checkpoint_filter_fn),
    "twins": lambda state_dict, model: state_dict,
    "pvt_v2": pvt_v2.checkpoint_filter_fn,
    "pvt": lambda state_dict, model: state_dict,
    "swin": swin_transformer.checkpoint_filter_fn,
}


def _create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    model = MODELS[ALIASES.get(name, name)]

    def construct(**given: Any) -> nn.Module:
        how: dict[str, Any] = dict(kind=model.kind, branch=model.branch, position=model.position)
        how |= {key: given.pop(key) for key in ("kind", "branch", "position", "class_token") if key in given}
        return add_context_broadcast(create_backbone(model.base, **given), **how)

    maps = dict(out_indices=3 if model.family in ISOTROPIC else (0, 1, 2, 3), feature_cls="getter")
    defaults = dict(feature_cfg=maps, pretrained_filter_fn=_FILTERS[model.family])
    return build(construct, name, pretrained, {}, {**defaults, **kwargs})


def _cfg(model: Model) -> dict[str, Any]:
    plain = "head.fc" if model.family in ("swin", "pvt") else "head"
    classifier: Any = ("head", "head_dist") if "distilled" in model.base else plain
    first = {"twins": "patch_embeds.0.proj", "pvt": "stem.conv1"}.get(model.family, "patch_embed.proj")
    return cfg(first_conv=first, classifier=classifier, pool_size=None if model.family in ISOTROPIC else (7, 7))


_ALL = {**MODELS, **{alias: MODELS[name] for alias, name in ALIASES.items()}}
default_cfgs = generate_default_cfgs({name: _cfg(model) for name, model in _ALL.items()})
__getattr__ = register(__name__, _ALL, _create)
