"""MAT Transformer: mixing abstract tokens (thesis on efficient vision backbones, chapter 4). See docs/models.md."""

from functools import partial
from typing import Any

from timm.layers import DropPath
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from ..errors import check_choice
from ..layers import AbstractTokenAttention, BilinearPatchEmbed, ChannelMlp, DepthwiseConv
from ..layers.checks import check_reading
from ._backbone import ConvNorm, ConvStem, ProjectedHead, Sizes, StagedBackbone, cfg, drops, make_stages, register_class


class MAT(StagedBackbone):
    """MLP blocks in early stages, window attention with abstract tokens in late ones; strides 4, 8, 16, 32.

    Args:
        dim: Channels of the first stage; they double from stage to stage.
        depths: Blocks of each stage.
        heads: Attention heads of each stage, or of stages 3 and 4 alone (earlier ones then get a half and a quarter).
        mixer_stages: Stages, counted from 1, whose blocks have a token mixer.
        mixer: "mat", "window" attention without abstract tokens, or "none" anywhere.
        embed: Down-sampling between stages: "bilinear" samples, a 3x3 "conv", or "merge" of 2x2 patches.
        mlp_conv: A depth-wise convolution in every MLP; by default wherever there is a mixer at all.
        reading, token_is_key, token_projected, window: See AbstractTokenAttention.
        mlp_ratio: Hidden over outer channels of the MLPs.
        hidden: Width of the classifier's hidden layer.
        drop_path_rate: Stochastic depth of the last block; it grows linearly from 0 at the first.
        common: num_classes, in_chans, global_pool, drop_rate; anything else is refused.
    """

    def __init__(
        self,
        dim: int,
        depths: Sizes,
        heads: Sizes,
        mixer_stages: Sizes = (3, 4),
        mixer: str = "mat",
        embed: str = "bilinear",
        mlp_conv: bool | None = None,
        reading: str = "fitted",
        token_is_key: bool | None = None,
        token_projected: bool | None = None,
        mlp_ratio: float = 4.0,
        window: int = 7,
        hidden: int = 1280,
        drop_path_rate: float = 0.0,
        in_chans: int = 3,
        **common,
    ):
        check_choice("mixer", mixer, ("mat", "window", "none"))
        check_choice("embed", embed, ("bilinear", "conv", "merge"))
        if len(heads) == 2:
            heads = (max(1, heads[0] // 4), max(1, heads[0] // 2), *heads)
        if not set(mixer_stages) <= {1, 2, 3, 4}:
            raise ValueError(f"mixer_stages={tuple(mixer_stages)} are not stages; choose among 1, 2, 3 and 4")
        if dim % 2:
            raise ValueError(f"dim={dim} is odd; the stem starts with half of it")
        mlp_conv = mixer != "none" if mlp_conv is None else mlp_conv
        dims = [dim * 2**i for i in range(4)]
        check_reading(reading)
        switches: dict[str, Any] = dict(mixing=mixer == "mat", reading=reading)
        switches |= dict(token_is_key=token_is_key, token_projected=token_projected)

        def block(i: int, drop_path: float) -> Block:
            mixes = mixer != "none" and i + 1 in mixer_stages
            attention = AbstractTokenAttention(dims[i], heads[i], window, **switches) if mixes else None
            return Block(dims[i], attention, int(dims[i] * mlp_ratio), mlp_conv, drop_path)

        def downsample(i: int) -> nn.Module:
            if embed == "conv":
                return ConvNorm(dims[i - 1], dims[i], nn.BatchNorm2d(dims[i]))
            return (BilinearPatchEmbed if embed == "bilinear" else PatchMerging)(dims[i - 1], dims[i])

        def norm(i: int) -> nn.Module | None:
            # Patch merging normalises what it merges, so the stage before it does not.
            return None if embed == "merge" and i < 3 else nn.LayerNorm(dims[i], eps=1e-6)

        stages = make_stages(depths, drop_path_rate, block=block, downsample=downsample, norm=norm, heads=heads)
        half = dim // 2
        stem = ConvStem(
            (nn.Conv2d(in_chans, half, 3, stride=2, padding=1), nn.BatchNorm2d(half)),
            (nn.Conv2d(half, half, 3, padding=1, groups=half), nn.BatchNorm2d(half)),
            (nn.Conv2d(half, dim, 3, stride=2, padding=1), nn.BatchNorm2d(dim)),
        )
        head = partial(ProjectedHead, dims[-1], hidden=hidden)
        super().__init__(stem, stages, dims, head=head, in_chans=in_chans, **common)

    def init_module(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Conv2d):
            fan_out = module.weight[0, 0].numel() * module.out_channels / module.groups
            nn.init.normal_(module.weight, std=(2 / fan_out) ** 0.5)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def init_weights(self) -> None:
        super().init_weights()
        for module in self.modules():
            if isinstance(module, BilinearPatchEmbed):  # sampling starts at the patch centres
                nn.init.zeros_(module.offset_proj.weight)


class Block(nn.Module):
    """Token mixer with position convolution, or neither; then an MLP, all residual. (B, H, W, C) -> (B, H, W, C)."""

    def __init__(self, dim: int, attention: nn.Module | None, hidden: int, mlp_conv: bool, drop_path: float):
        super().__init__()
        self.mixes = attention is not None
        self.cpe = DepthwiseConv(dim, residual=True) if self.mixes else nn.Identity()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6) if self.mixes else nn.Identity()
        self.attn = nn.Identity() if attention is None else attention
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = ChannelMlp(dim, hidden, depthwise="before" if mlp_conv else "none")
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.mixes:
            x = self.cpe(x)
            x = x + self.drop_path(self.attn(self.norm1(x)))
        normed = self.norm2(x)
        return x + self.drop_path(self.mlp(normed)) if drops(self.drop_path) else self.mlp(normed, x)


class PatchMerging(nn.Module):
    """2x2 pixels side by side, LayerNorm, linear. (B, C, H, W) -> (B, C', H/2, W/2), sizes rounded up."""

    def __init__(self, dim: int, out_dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, eps=1e-6)
        self.proj = nn.Linear(4 * dim, out_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        h, w = (H + 1) // 2, (W + 1) // 2
        x = nn.functional.pad(x, [0, 2 * w - W, 0, 2 * h - H]).permute(0, 2, 3, 1)
        x = x.reshape(B, h, 2, w, 2, C).transpose(2, 3).reshape(B, h, w, 4 * C)
        return self.proj(self.norm(x)).permute(0, 3, 1, 2)


_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mat_1": dict(dim=24, depths=(2, 2, 6, 6), heads=(12, 24)),
    "mat_2": dict(dim=32, depths=(2, 2, 6, 6), heads=(8, 16)),
    "mat_3": dict(dim=36, depths=(2, 2, 8, 8), heads=(8, 16)),
    "mat_4": dict(dim=48, depths=(3, 3, 8, 8), heads=(12, 24)),
    "mat_5": dict(dim=64, depths=(2, 2, 8, 8), heads=(16, 32)),
}
default_cfgs = generate_default_cfgs(dict.fromkeys(_ARCHITECTURES, cfg()))
__getattr__ = register_class(__name__, MAT, _ARCHITECTURES)
