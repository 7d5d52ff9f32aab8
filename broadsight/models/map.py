"""The models of the MAP paper (Multi-token attention pooling, WACV 2025): timm's backbones under our pooling.

Readings and settings, and where paper and release differ: docs/pooling.md.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import timm
import torch
from timm.layers import GELU, SEModule
from timm.models import generate_default_cfgs, register_model
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn

from ..surgery.pooling import PooledModel, create_backbone, swap_pool
from ..weights.reading import PLAIN_TYPES, weights_in
from ..weights.released_map import model_from_release
from ._backbone import build, cfg

RELEASE = "https://github.com/Lab-LVM/imagenet-models/releases/download/v0.0.1/"
POOL_ARGUMENTS = ("groups", "tokens", "dim", "heads", "mlp_dim", "level", "light", "attn_dim", "stem", "indices")


def _release_resnet(in_chans: int, **kwargs: Any) -> nn.Module:
    """The backbone of the released ResNet50: a narrower last stage, three 3x3 convolutions first, SE, GELU inside."""
    gate = partial(SEModule, rd_ratio=1 / 16, norm_layer=nn.BatchNorm2d, act_layer=GELU)
    model = _resnet((3, 4, 6, 3), (64, 128, 256, 256), GELU, in_chans, block_args=dict(attn_layer=gate), **kwargs)
    for module in model.modules():
        if isinstance(module, Bottleneck):
            module.act3 = nn.ReLU(inplace=True)
        elif isinstance(module, SEModule):
            module.fc1.bias = None
    return model


def _resnet_d(layers: Sequence[int], widths: Sequence[int]) -> Callable[..., nn.Module]:
    """ResNet-D: three 3x3 convolutions first, averaging in the shortcuts."""
    return lambda in_chans, **kwargs: _resnet(layers, widths, nn.ReLU, in_chans, avg_down=True, **kwargs)


def _resnet(layers: Sequence[int], widths: Sequence[int], act: type, in_chans: int, **kwargs: Any) -> nn.Module:
    block: Any = Bottleneck  # timm's annotation asks for an instance
    model = ResNet(
        block,
        tuple(layers),
        channels=tuple(widths),
        in_chans=in_chans,
        stem_type="deep",
        stem_width=widths[0] // 2,
        act_layer=act,
        **kwargs,
    )
    convolutions = [
        nn.Conv2d(in_chans, 64, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(64, 64, 3, padding=1, bias=False),
        nn.Conv2d(64, widths[0], 3, padding=1, bias=False),  # its norm and activation are the model's bn1 and act1
    ]
    for convolution in convolutions:
        nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    first, second, third = convolutions
    model.conv1 = nn.Sequential(first, nn.BatchNorm2d(64), act(), second, nn.BatchNorm2d(64), act(), third)
    return model


def _pit_without_class_token(in_chans: int, **kwargs: Any) -> nn.Module:
    """PiT-S whose blocks see the patches alone, as the released one; nothing of the class token is left."""
    model: Any = timm.create_model("pit_s_224", in_chans=in_chans, **kwargs)
    del model.cls_token
    model.register_buffer("cls_token", torch.zeros(1, 0, model.feature_info[0]["num_chs"]), persistent=False)
    for stage, info in zip(model.transformers, model.feature_info, strict=True):
        if stage.pool is not None:
            stage.pool.fc = NoTokens(info["num_chs"])
    return model


class NoTokens(nn.Module):
    """No class token before, and none after. (B, 0, C) -> (B, 0, dim)."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], 0, self.dim)


def _from_timm(name: str, **fixed: Any) -> Callable[..., nn.Module]:
    return lambda in_chans, **kwargs: create_backbone(name, in_chans=in_chans, **fixed, **kwargs)


def _entry(
    name: str,
    pretrained: bool,
    kwargs: dict[str, Any],
    backbone: Callable[..., nn.Module],
    pool: str,
    *,
    maps: int | tuple[int, ...],
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> PooledModel:
    """A registered model: `backbone` makes it, `settings` and `options` are the pool's, the rest is timm's."""

    def construct(
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str | None = None,
        drop_rate: float = 0.0,
        pool_options: dict[str, Any] | None = None,
        **given: Any,
    ) -> PooledModel:
        of_pool = {key: given.pop(key) for key in POOL_ARGUMENTS if key in given}
        chosen = {**(options or {}), **(pool_options or {})}
        if drop_rate:
            chosen["fc_drop"] = drop_rate
        inner = backbone(in_chans, **given)
        model = swap_pool(
            inner,
            pool,
            num_classes=num_classes,
            img_size=given.get("img_size"),
            pool_options=chosen,
            **{**settings, **of_pool},
        )
        model.pooled = global_pool != ""
        return model

    defaults = {
        "feature_cfg": dict(out_indices=maps, feature_cls="getter"),
        "pretrained_filter_fn": lambda state, model: _adapt(name, state, model),
    }
    # The published files hold the authors' command line beside the weights; timm would refuse to read that.
    with torch.serialization.safe_globals(PLAIN_TYPES):
        return build(construct, name, pretrained, {}, {**defaults, **kwargs})


def _adapt(name: str, state: dict[str, Any], model: PooledModel) -> dict[str, Tensor]:
    """A checkpoint of ours as it is; a released one by our names."""
    state = weights_in(state)
    own = model.state_dict()
    if any(key in own for key in state):
        return state
    # Translated for the model as published: other classes or image channels are timm's to deal with, afterwards.
    published = timm.create_model(name, device="meta")
    return model_from_release(name, published, state)


def _cfg(file: str = "", crop: float = 0.95, first_conv: str = "backbone.conv1", grid: int = 14, **other: Any):
    classifiers = other.pop("classifier", ("head.classifier.fc", "head.average_classifier.fc"))
    return cfg(
        url=f"{RELEASE}{file}.pth.tar" if file else "",
        crop_pct=crop,
        first_conv=first_conv,
        pool_size=(grid, grid),
        classifier=classifiers,
        **other,
    )


_ONE_CLASSIFIER: dict[str, Any] = dict(classifier="head.classifier.fc")
_FIXED: dict[str, Any] = dict(fixed_input_size=True)

default_cfgs = generate_default_cfgs(
    {
        "map_resnet50.release_in1k": _cfg("map_resnet50", first_conv="backbone.conv1.0"),
        "map_resnet50d": _cfg(first_conv="backbone.conv1.0"),
        "map_resnet75d": _cfg(first_conv="backbone.conv1.0"),
        "map_resnet101d": _cfg(first_conv="backbone.conv1.0"),
        "map_convnext_tiny.release_in1k": _cfg("map_convnext_tiny", 0.875, "backbone.stem.0"),
        "map_convnext_small.release_in1k": _cfg("map_convnext_small", 0.875, "backbone.stem.0"),
        "map_maxvit_tiny.release_in1k": _cfg("map_maxvit_tiny_tf_224", 0.95, "backbone.stem.conv1", **_FIXED),
        "map_maxvit_small": _cfg("", 0.95, "backbone.stem.conv1", **_FIXED),
        "map_pit_s.release_in1k": _cfg("map_pit_s", 0.95, "backbone.patch_embed.conv", **_FIXED),
        "map_deit_small": _cfg("", 0.95, "backbone.patch_embed.proj"),
        "map_resmlp_24": _cfg("", 0.95, "backbone.stem.proj", **_FIXED),
        "map_mobilenetv1.release_in1k": _cfg("map_mobilenet_v1", 0.95, "backbone.conv_stem", grid=7, **_ONE_CLASSIFIER),
        "cap_resnet50": _cfg(grid=7, **_ONE_CLASSIFIER),
        "cap_pit_s": _cfg(first_conv="backbone.patch_embed.conv", grid=7, **_FIXED, **_ONE_CLASSIFIER),
        "cap_deit_small": _cfg(first_conv="backbone.patch_embed.proj", **_ONE_CLASSIFIER),
        "cap_resmlp_24": _cfg(first_conv="backbone.stem.proj", **_FIXED, **_ONE_CLASSIFIER),
    }
)

_FIVE, _FOUR, _THREE = (0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 1, 2)
_WIDE: dict[str, Any] = dict(attn_dim=384)
_MIXED = dict(head_mixing=True)


def _four_groups(tokens: int, gram_groups: int) -> dict[str, Any]:
    """The pool of the released hierarchical models."""
    return dict(groups=4, tokens=tokens, options=dict(gram_groups=gram_groups), **_WIDE)


@register_model
def map_resnet50(pretrained: bool = False, **kwargs) -> PooledModel:
    """The released model. The paper's rows have another: swap_pool("resnet50", "map")."""
    return _entry(
        "map_resnet50", pretrained, kwargs, _release_resnet, "map", maps=_FIVE, groups=4, options=_MIXED, **_WIDE
    )


@register_model
def map_resnet50d(pretrained: bool = False, **kwargs) -> PooledModel:
    backbone = _resnet_d((3, 4, 6, 3), (64, 128, 256, 512))
    return _entry("map_resnet50d", pretrained, kwargs, backbone, "map", maps=_FIVE, groups=4, **_WIDE)


@register_model
def map_resnet75d(pretrained: bool = False, **kwargs) -> PooledModel:
    backbone = _resnet_d((4, 5, 13, 3), (64, 128, 320, 640))
    return _entry("map_resnet75d", pretrained, kwargs, backbone, "map", maps=_FIVE, groups=4, **_WIDE)


@register_model
def map_resnet101d(pretrained: bool = False, **kwargs) -> PooledModel:
    backbone = _resnet_d((4, 5, 21, 3), (84, 168, 336, 672))
    return _entry("map_resnet101d", pretrained, kwargs, backbone, "map", maps=_FIVE, groups=4, **_WIDE)


@register_model
def map_convnext_tiny(pretrained: bool = False, **kwargs) -> PooledModel:
    backbone = _from_timm("convnext_tiny")
    return _entry("map_convnext_tiny", pretrained, kwargs, backbone, "map", maps=_FOUR, **_four_groups(2, 24))


@register_model
def map_convnext_small(pretrained: bool = False, **kwargs) -> PooledModel:
    backbone = _from_timm("convnext_small")
    return _entry("map_convnext_small", pretrained, kwargs, backbone, "map", maps=_FOUR, **_four_groups(3, 16))


# The release computes MaxViT's GELU by the error function.
_ERF: dict[str, Any] = dict(conv_act_layer="gelu", transformer_act_layer="gelu")


@register_model
def map_maxvit_tiny(pretrained: bool = False, **kwargs) -> PooledModel:
    backbone = _from_timm("maxvit_tiny_tf_224", **_ERF)
    return _entry("map_maxvit_tiny", pretrained, kwargs, backbone, "map", maps=_FIVE, **_four_groups(2, 24))


@register_model
def map_maxvit_small(pretrained: bool = False, **kwargs) -> PooledModel:
    backbone = _from_timm("maxvit_small_tf_224", **_ERF)
    return _entry("map_maxvit_small", pretrained, kwargs, backbone, "map", maps=_FIVE, **_four_groups(3, 16))


@register_model
def map_pit_s(pretrained: bool = False, **kwargs) -> PooledModel:
    # The lowest map is the patch embedding with positions.
    return _entry("map_pit_s", pretrained, kwargs, _pit_without_class_token, "map", maps=_THREE, stem="pos_drop")


@register_model
def map_deit_small(pretrained: bool = False, **kwargs) -> PooledModel:
    backbone = _from_timm("deit_small_patch16_224", class_token=False, global_pool="avg")
    return _entry("map_deit_small", pretrained, kwargs, backbone, "map", maps=3)


@register_model
def map_resmlp_24(pretrained: bool = False, **kwargs) -> PooledModel:
    return _entry("map_resmlp_24", pretrained, kwargs, _from_timm("resmlp_24_224"), "map", maps=3)


@register_model
def map_mobilenetv1(pretrained: bool = False, **kwargs) -> PooledModel:
    options = dict(mean_token=False, mlp_groups=1, classifier="linear", head_mixing=True)
    narrow: dict[str, Any] = dict(groups=1, dim=192, attn_dim=192, heads=6, mlp_dim=192, level=-1)
    backbone = _from_timm("mobilenetv1_100", act_layer=nn.ReLU)
    return _entry("map_mobilenetv1", pretrained, kwargs, backbone, "map", maps=_FIVE, options=options, **narrow)


@register_model
def cap_resnet50(pretrained: bool = False, **kwargs) -> PooledModel:
    return _entry("cap_resnet50", pretrained, kwargs, _from_timm("resnet50"), "cap", maps=_FIVE)


@register_model
def cap_pit_s(pretrained: bool = False, **kwargs) -> PooledModel:
    return _entry("cap_pit_s", pretrained, kwargs, _from_timm("pit_s_224"), "cap", maps=_THREE)


@register_model
def cap_deit_small(pretrained: bool = False, **kwargs) -> PooledModel:
    backbone = _from_timm("deit_small_patch16_224", class_token=False, global_pool="avg")
    return _entry("cap_deit_small", pretrained, kwargs, backbone, "cap", maps=3)


@register_model
def cap_resmlp_24(pretrained: bool = False, **kwargs) -> PooledModel:
    return _entry("cap_resmlp_24", pretrained, kwargs, _from_timm("resmlp_24_224"), "cap", maps=3)
