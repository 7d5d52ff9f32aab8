"""Multi-token attention pooling (MAP, WACV 2025): timm's backbones under our pooling. Readings: docs/pooling.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timm
import torch
from timm.layers import GELU, SEModule
from timm.models import generate_default_cfgs
from timm.models.resnet import Bottleneck, ResNet
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn, init_weights_vit_timm
from torch import Tensor, nn

from ..surgery.pooling import PooledModel, create_backbone, swap_pool
from ..weights.reading import PLAIN_TYPES, weights_in
from ..weights.released_map import model_from_release
from ._backbone import build, cfg, register
from ._faster_vit import FasterViT

RELEASE = "https://github.com/Lab-LVM/imagenet-models/releases/download/v0.0.1/"
POOL_ARGUMENTS = ("groups", "tokens", "dim", "heads", "mlp_dim", "level", "light", "attn_dim", "stem", "indices")


def _release_resnet(in_chans: int, **kwargs: Any) -> nn.Module:
    """The backbone of the released ResNet50: a narrower last stage, three 3x3 convolutions first, SE, GELU inside."""
    gate = partial(SEModule, rd_ratio=1 / 16, norm_layer=nn.BatchNorm2d, act_layer=GELU)
    model = _resnet((3, 4, 6, 3), (64, 128, 256, 256), in_chans, GELU, block_args=dict(attn_layer=gate), **kwargs)
    for module in model.modules():
        if isinstance(module, Bottleneck):
            module.act3 = nn.ReLU(inplace=True)
        elif isinstance(module, SEModule):
            module.fc1.bias = None
    return model


def _resnet(layers: Sequence[int], widths: Sequence[int], in_chans: int, act=nn.ReLU, **kwargs: Any) -> nn.Module:
    """ResNet with three 3x3 convolutions first."""
    block: Any = Bottleneck  # timm's annotation asks for an instance
    stem: dict[str, Any] = dict(stem_type="deep", stem_width=widths[0] // 2, in_chans=in_chans)
    model = ResNet(block, tuple(layers), channels=tuple(widths), act_layer=act, **stem, **kwargs)
    first = nn.Conv2d(in_chans, 64, 3, stride=2, padding=1, bias=False)
    # The norm and the activation of the third are the model's bn1 and act1.
    second, third = (nn.Conv2d(64, width, 3, padding=1, bias=False) for width in (64, widths[0]))
    for convolution in (first, second, third):
        nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
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


class ManyTokens(VisionTransformer):
    """A ViT with several class tokens from its first block on, classified side by side: the paper's ViT-style MAP.

    Args:
        tokens: How many; the first is timm's class token, the others are its registers.
        common: As timm's VisionTransformer has them. With another global_pool than "token" patches are classified.
    """

    def __init__(self, tokens: int = 16, num_classes: int = 1000, **common: Any):
        super().__init__(reg_tokens=tokens - 1, num_classes=num_classes, **common)
        self.reset_classifier(num_classes)

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        chosen = self.global_pool if pool_type is None else pool_type
        return x[:, : self.num_prefix_tokens].flatten(1) if chosen == "token" else super().pool(x, pool_type)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        super().reset_classifier(num_classes, global_pool)
        self.head_hidden_size = self.embed_dim * (self.num_prefix_tokens if self.global_pool == "token" else 1)
        if num_classes > 0:
            like = next(self.parameters())
            self.head = nn.Linear(self.head_hidden_size, num_classes, device=like.device, dtype=like.dtype)
            init_weights_vit_timm(self.head)
            self.head.train(self.training)


def _timm(name: str, **fixed: Any) -> Callable[..., nn.Module]:
    return lambda in_chans, **kwargs: create_backbone(name, in_chans=in_chans, **fixed, **kwargs)


@dataclass(frozen=True)
class Published:
    """A registered model: a backbone, made from in_chans and what timm is given, under a pool."""

    backbone: Callable[..., nn.Module]
    first_conv: str
    maps: int | tuple[int, ...]  # positions of the feature maps that features_only gives, or how many of them
    pool: str = "map"
    settings: dict[str, Any] = field(default_factory=dict)  # arguments of `swap_pool`
    options: dict[str, Any] = field(default_factory=dict)  # and further ones of the pool's class
    weights: str = ""  # name of the released file, if there is one
    crop: float = 0.95
    fixed: bool = False  # whether the image size is
    grid: int = 14  # side of the last map

    def cfg(self) -> dict[str, Any]:
        """timm's description."""
        averages = self.options.get("mean_token", self.pool == "map")
        classifier = ("head.classifier.fc", "head.average_classifier.fc") if averages else "head.classifier.fc"
        url = f"{RELEASE}{self.weights}.pth.tar" if self.weights else ""
        layers = dict(first_conv=f"backbone.{self.first_conv}", classifier=classifier)
        fixed = dict(fixed_input_size=True) if self.fixed else {}
        return cfg(url=url, crop_pct=self.crop, pool_size=(self.grid, self.grid), **layers, **fixed)


def _create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    if name == VIT_STYLE:
        maps = dict(feature_cfg=dict(out_indices=3, feature_cls="getter"), pretrained_filter_fn=checkpoint_filter_fn)
        arch = dict(embed_dim=384, num_heads=6, dynamic_img_size=True, dynamic_img_pad=True)
        return build(ManyTokens, name, pretrained, arch, {**maps, **kwargs})
    model = MODELS[name]

    def construct(
        num_classes=1000, in_chans=3, global_pool: str | None = None, drop_rate=0.0, pool_options: Any = None, **given
    ) -> PooledModel:
        settings = {**model.settings, **{key: given.pop(key) for key in POOL_ARGUMENTS if key in given}}
        options = {**model.options, **(pool_options or {}), **({"fc_drop": drop_rate} if drop_rate else {})}
        sized: dict[str, Any] = dict(num_classes=num_classes, img_size=given.get("img_size"), pool_options=options)
        pooled = swap_pool(model.backbone(in_chans, **given), model.pool, **sized, **settings)
        pooled.pooled = global_pool != ""
        return pooled

    maps = dict(out_indices=model.maps, feature_cls="getter")
    defaults = dict(feature_cfg=maps, pretrained_filter_fn=partial(_adapt, name))
    # The published files hold the authors' command line beside the weights; timm would refuse to read that.
    with torch.serialization.safe_globals(PLAIN_TYPES):
        return build(construct, name, pretrained, {}, {**defaults, **kwargs})


def _adapt(name: str, state: dict[str, Any], model: PooledModel) -> dict[str, Tensor]:
    """A checkpoint of ours as it is; a released one by our names."""
    state, own = weights_in(state), model.state_dict()
    if any(key in own for key in state):
        return state
    # Translated for the model as published: other classes or image channels are timm's to deal with, afterwards.
    return model_from_release(name, timm.create_model(name, device="meta"), state)


_FIVE, _FOUR, _THREE = (0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 1, 2)
_GROUPS: dict[str, Any] = dict(groups=4, attn_dim=384)
_PAIRS: dict[str, Any] = dict(settings=dict(tokens=2, **_GROUPS), options=dict(gram_groups=24))
_TRIPLES: dict[str, Any] = dict(settings=dict(tokens=3, **_GROUPS), options=dict(gram_groups=16))
_NARROW = dict(groups=1, dim=192, attn_dim=192, heads=6, mlp_dim=192, level=-1)
_LINEAR = dict(mean_token=False, mlp_groups=1, classifier="linear", head_mixing=True)
_resnet_d = partial(_resnet, avg_down=True)  # averaging in the shortcuts
_RESNET_D: dict[str, Any] = dict(first_conv="conv1.0", maps=_FIVE, settings=_GROUPS)
_CONVNEXT: dict[str, Any] = dict(first_conv="stem.0", maps=_FOUR, crop=0.875)
_GELU = dict(conv_act_layer="gelu", transformer_act_layer="gelu")  # computed as the release does
_MAXVIT: dict[str, Any] = dict(first_conv="stem.conv1", maps=_FIVE, fixed=True)
_PIT: dict[str, Any] = dict(first_conv="patch_embed.conv", maps=_THREE, fixed=True)
_MOBILENET: dict[str, Any] = dict(first_conv="conv_stem", maps=_FIVE, settings=_NARROW, options=_LINEAR, grid=7)
_MOBILENET["weights"] = "map_mobilenet_v1"
_FASTER_VIT: dict[str, Any] = dict(
    settings=dict(groups=5, tokens=3, heads=32, attn_dim=384, level=3), fixed=True, grid=7
)
_FASTER_VIT["options"] = dict(head_mixing=True, classifier="linear")
_DEIT_SMALL = _timm("deit_small_patch16_224", class_token=False, global_pool="avg")

VIT_STYLE = "map_vit_style_small"
# map_resnet50 is the released one; the paper's rows have another. The lowest map of PiT is the patch embedding with
# positions.
MODELS: dict[str, Published] = {
    "map_resnet50": Published(_release_resnet, **_RESNET_D, options=dict(head_mixing=True), weights="map_resnet50"),
    "map_resnet50_paper": Published(_timm("resnet50"), "conv1", _FIVE),
    "map_resnet50d": Published(partial(_resnet_d, (3, 4, 6, 3), (64, 128, 256, 512)), **_RESNET_D),
    "map_resnet75d": Published(partial(_resnet_d, (4, 5, 13, 3), (64, 128, 320, 640)), **_RESNET_D),
    "map_resnet101d": Published(partial(_resnet_d, (4, 5, 21, 3), (84, 168, 336, 672)), **_RESNET_D),
    "map_convnext_tiny": Published(_timm("convnext_tiny"), **_CONVNEXT, **_PAIRS, weights="map_convnext_tiny"),
    "map_convnext_small": Published(_timm("convnext_small"), **_CONVNEXT, **_TRIPLES, weights="map_convnext_small"),
    "map_maxvit_tiny": Published(
        _timm("maxvit_tiny_tf_224", **_GELU), **_MAXVIT, **_PAIRS, weights="map_maxvit_tiny_tf_224"
    ),
    "map_maxvit_small": Published(_timm("maxvit_small_tf_224", **_GELU), **_MAXVIT, **_TRIPLES),
    "map_pit_s": Published(_pit_without_class_token, **_PIT, settings=dict(stem="pos_drop"), weights="map_pit_s"),
    "map_deit_small": Published(_DEIT_SMALL, "patch_embed.proj", 3),
    "map_pvt_small": Published(_timm("pvt_small", class_token=False), "stem.conv1", _FOUR),
    "map_resmlp_24": Published(_timm("resmlp_24_224"), "stem.proj", 3, fixed=True),
    "map_mobilenetv1": Published(_timm("mobilenetv1_100", act_layer=nn.ReLU), **_MOBILENET),
    "map_faster_vit_3": Published(
        FasterViT, "patch_embed.conv_down.0", _FIVE, **_FASTER_VIT, weights="map_faster_vit_3_224"
    ),
    "cap_resnet50": Published(_timm("resnet50"), "conv1", _FIVE, "cap", grid=7),
    "cap_pit_s": Published(_timm("pit_s_224"), **_PIT, pool="cap", grid=7),
    "cap_deit_small": Published(_DEIT_SMALL, "patch_embed.proj", 3, "cap"),
    "cap_resmlp_24": Published(_timm("resmlp_24_224"), "stem.proj", 3, "cap", fixed=True),
}
default_cfgs = generate_default_cfgs(
    {f"{name}.release_in1k" if model.weights else name: model.cfg() for name, model in MODELS.items()}
    | {VIT_STYLE: cfg(crop_pct=0.95, first_conv="patch_embed.proj", classifier="head", pool_size=None)}
)
__getattr__ = register(__name__, (*MODELS, VIT_STYLE), _create)
