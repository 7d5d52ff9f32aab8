"""Vision transformers as others write them, and more of timm's, with few and narrow blocks."""

from collections.abc import Callable
from functools import partial

import torch
from timm import create_model
from timm.layers import GluMlp, Mlp
from timm.models import TNT, VOLO, ConVit, DaVit, MlpMixer, MultiScaleVit, Nest, Twins
from timm.models.mvitv2 import MultiScaleVitCfg
from torch import Tensor, nn
from torchvision.models import SwinTransformer, VisionTransformer

from tests.analysis.measures.toy_models import Made
from tests.inspection.timm_models import TABLE

# Some entry points refuse other sizes.
CLASSES: dict[str, tuple[Callable[..., nn.Module], int]] = dict(
    convit=(partial(ConVit, 64, depth=3, local_up_to_layer=2, embed_dim=24, num_heads=4), 64),
    tnt=(partial(TNT, 64, embed_dim=48, inner_dim=8, depth=2, num_heads_inner=2, num_heads_outer=3), 64),
    nest=(partial(Nest, 64, embed_dims=(24, 24, 48), num_heads=(1, 1, 2), depths=(1, 1, 1), drop_path_rate=0.0), 64),
    davit=(partial(DaVit, depths=(1, 1), embed_dims=(24, 48), num_heads=(1, 2)), 112),
    twins=(partial(Twins, 64, embed_dims=(16, 32), num_heads=(1, 2), depths=(2, 2), sr_ratios=(4, 2), wss=(7, 7)), 64),
    gmixer=(partial(MlpMixer, img_size=64, num_blocks=2, embed_dim=48, mlp_ratio=(2.0, 4.0), mlp_layer=GluMlp), 64),
    volo=(partial(VOLO, [1, 1], 64, embed_dims=[24, 48], num_heads=[2, 3], outlook_attention=(True, False)), 64),
    mvit_class=(partial(MultiScaleVit, MultiScaleVitCfg((1, 1), 24, 1, use_cls_token=True), 64), 64),
)
# Of timm, beside those of timm_models, with the side of their images.
NAMED = TABLE["named"].items()
MORE = CLASSES | {key: (partial(create_model, name, img_size=n, **options), n) for key, (name, n, options) in NAMED}

SIDE = 32


def reduced(self: Made, x: Tensor, H: int, W: int) -> Tensor:
    """Queries from all tokens, keys and values from a smaller map, as in PVT. (B, N, C), H, W -> (B, N, C)."""
    B, N, C = x.shape
    grid = x[:, N - H * W :].mT.reshape(B, C, H, W)
    k, v = self.kv(self.norm(self.sr(grid).flatten(2).mT)).chunk(2, -1)
    return self.proj_drop(self.proj((self.q(x) @ k.mT / C**0.5).softmax(-1) @ v))


def pvt_block(dim: int, ratio: int) -> nn.Module:
    parts = dict(q=nn.Linear(dim, dim), kv=nn.Linear(dim, 2 * dim), sr=nn.Conv2d(dim, dim, ratio, ratio))
    parts |= dict(norm=nn.LayerNorm(dim), proj=nn.Linear(dim, dim), proj_drop=nn.Dropout(0.0))

    def forward(self: Made, x: Tensor, H: int, W: int) -> Tensor:
        x = x + self.attn(self.norm1(x), H, W)
        return x + self.mlp(self.norm2(x))

    norms = dict(norm1=nn.LayerNorm(dim), norm2=nn.LayerNorm(dim))
    return Made(forward, **norms, attn=Made(reduced, **parts), mlp=Mlp(dim, 2 * dim))


def pvt() -> nn.Module:
    """In the manner of PVT's first version: the class token joins in the last stage."""
    parts = dict(img_size=SIDE, patch_embed1=nn.Conv2d(3, 16, 4, 4), patch_embed2=nn.Conv2d(16, 24, 2, 2))
    parts |= dict(block1=pvt_block(16, 4), block2=pvt_block(24, 2), cls_token=nn.Parameter(torch.zeros(1, 1, 24)))

    def forward(self: Made, x: Tensor) -> Tensor:
        x = self.patch_embed1(x)
        x = self.block1(x.flatten(2).mT, x.shape[2], x.shape[3]).mT.unflatten(2, x.shape[2:])
        x = self.patch_embed2(x)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), x.flatten(2).mT], 1)
        return self.head(self.norm(self.block2(tokens, x.shape[2], x.shape[3]))[:, 0])

    return Made(forward, **parts, norm=nn.LayerNorm(24), head=nn.Linear(24, 5))


def attention(dim: int) -> nn.Module:
    def forward(self: Made, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)

    return Made(forward, qkv=nn.Linear(dim, 3 * dim), proj=nn.Linear(dim, dim))


class LocalityFeedForward(Made):
    """Known as an MLP by its name alone."""


def local_block(dim: int) -> nn.Module:
    """An attention, and convolutions with the residual inside, (B, C, H, W) -> (B, C, H, W)."""
    hidden = 2 * dim
    widen = nn.Conv2d(dim, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.Hardswish()
    mix = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.Hardswish()
    layers = nn.Sequential(*widen, *mix, nn.Conv2d(hidden, dim, 1, bias=False), nn.BatchNorm2d(dim))

    def forward(self: Made, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        first, grid = x.split([1, x.shape[1] - 1], 1)
        side = int(grid.shape[1] ** 0.5)
        return torch.cat([first, self.conv(grid.mT.unflatten(2, (side, side))).flatten(2).mT], 1)

    conv = LocalityFeedForward(lambda self, x: x + self.conv(x), conv=layers)
    return Made(forward, norm1=nn.LayerNorm(dim), attn=attention(dim), conv=conv)


class TokenModel(nn.Module):
    """Patches, an optional class token, blocks, mean, classifier."""

    img_size = SIDE

    def __init__(self, *blocks: nn.Module, dim: int = 16, class_token: bool = True):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 8, 8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if class_token else None
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).mT
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        return self.head(self.blocks(x).mean(1))


class Residual(Made):
    """x + mlp(x), with any MLP."""

    def __init__(self, mlp: nn.Module):
        super().__init__(lambda self, x: x + self.mlp(x), mlp=mlp)


def local_vit() -> nn.Module:
    return TokenModel(local_block(16), local_block(16))


def torchvision_vit() -> nn.Module:
    model = VisionTransformer(SIDE, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5)
    nn.init.normal_(model.heads.head.weight)
    return model


def torchvision_swin() -> nn.Module:
    return SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=5)


FOREIGN = dict(pvt=pvt, local_vit=local_vit, torchvision_vit=torchvision_vit, torchvision_swin=torchvision_swin)
