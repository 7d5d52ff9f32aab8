"""timm's models with few and narrow blocks: every code path of a family, in a fraction of a second."""

from copy import deepcopy
from functools import cache

import timm
import torch
from torch import Tensor, nn

from tests.compare import randomize

FOUR, HEADS = (1, 1, 1, 1), (1, 2, 4, 8)

# What makes a model small. Some names are small enough.
SMALL = """resnet10t test_resnet regnetx_002 dla46_c test_nfnet tinynet_e mobilenetv3_small_050
mobilenetv4_conv_small_035 test_convnext poolformer_s12 efficientvit_b0 mobilevit_xxs starnet_s050 test_vit mvitv2_tiny
mixer_s32_224 resmlp_12_224"""
SHRUNK: dict[str, dict] = {name: {} for name in SMALL.split()} | dict(
    densenet121=dict(block_config=(2, 2, 2, 2), growth_rate=8),
    convnext_atto=dict(depths=(1, 1, 2, 1)),
    edgenext_xx_small=dict(depths=(2, 2, 2, 2)),
    fastvit_t8=dict(layers=FOUR),
    vit_tiny_patch16_224=dict(embed_dim=48, img_size=96),
    deit_tiny_distilled_patch16_224=dict(embed_dim=48, depth=4, img_size=96),
    cait_xxs24_224=dict(embed_dim=48, depth=4, img_size=64),
    xcit_nano_12_p16_224=dict(depth=4),
    swin_tiny_patch4_window7_224=dict(embed_dim=24, depths=(1, 1, 2, 1), num_heads=HEADS),
    pvt_v2_b0=dict(depths=FOUR),
    hiera_tiny_224=dict(embed_dim=24, stages=FOUR),
    coatnet_pico_rw_224=dict(embed_dim=(32, 32, 64, 64), depths=(1, 1, 2, 1), stem_width=16),
    maxvit_tiny_tf_224=dict(embed_dim=(32, 32, 64, 64), depths=FOUR, stem_width=16),
    levit_128s=dict(embed_dim=(32, 48, 64), depth=(1, 1, 1)),
    tiny_vit_5m_224=dict(depths=(1, 1, 2, 1)),
    efficientformerv2_s0=dict(depths=(1, 1, 3, 3)),
    pit_ti_224=dict(base_dims=(8, 8, 8), depth=FOUR[:3], img_size=96),
)
# Models that take images of one size alone.
FIXED = dict.fromkeys(("hiera_tiny_224", "coatnet_pico_rw_224", "maxvit_tiny_tf_224", "levit_128s"), (224, 224))
FIXED |= dict(efficientformerv2_s0=(224, 224), cait_xxs24_224=(64, 64), resmlp_12_224=(224, 224))
FIXED |= dict(pit_ti_224=(96, 96), mixer_s32_224=(224, 224))

# What makes them take any size. `swap_pool` knows this by itself.
VITS = ("test_vit", "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224")
ANY_SIZE = {name: dict(dynamic_img_size=True) for name in VITS}
ANY_SIZE["swin_tiny_patch4_window7_224"] = dict(strict_img_size=False)


@cache
def _template(name: str, in_chans: int) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, in_chans=in_chans, **SHRUNK[name], **ANY_SIZE.get(name, {}))
    return randomize(model).eval()


def created(name: str, in_chans: int = 3) -> nn.Module:
    """Always the same weights, none of them at its initial value."""
    return deepcopy(_template(name, in_chans))


def images(name: str, batch: int = 2, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, *FIXED.get(name, (64, 96)))


def without_intermediates(model: nn.Module) -> nn.Module:
    """The same model as if it offered no intermediate features, as some of timm's did not before 1.0.31."""

    def missing(self: nn.Module) -> None:
        raise AttributeError("forward_intermediates")

    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"forward_intermediates": property(missing)})
    return model
