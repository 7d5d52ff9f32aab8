"""STViT: Vision Transformer with Super Token Sampling (CVPR 2023, arXiv:2211.11167). Readings: docs/models.md."""

import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import DropPath, LayerNorm2d, LayerScale, PatchEmbed, to_2tuple
from timm.models import generate_default_cfgs, swin_transformer
from torch import Tensor, nn

from ..errors import check_choice
from ..layers import ChannelMlp, DepthwiseConv, SuperTokenAttention
from ..layers.folding import fold_norm, fold_scale_after
from ._backbone import ConvNorm, ProjectedHead, Sizes, StagedBackbone, build, cfg, drops, make_stages, register


class STViT(StagedBackbone):
    """Four stages of super-token attention; features at strides 4, 8, 16, 32.

    Args:
        dims, depths, heads: Channels, blocks and attention heads of each stage.
        cells: Side, or (height, width), of a super token's cell in each stage; 1 is plain attention.
        iterations, qkv_bias: Refinements of the association in each stage; see SuperTokenAttention.
        mlp_ratio: Hidden over outer channels of the channel MLPs.
        projection: Width of the hidden layer before the pool; 0 leaves it out.
        layer_scale: Initial layer scale of each stage, or None for none.
        drop_path_rate: Stochastic depth of the last block; it grows linearly from 0 at the first.
        stem: "conv", four 3x3 convolutions; "patch", one 4x4 convolution and a LayerNorm.
        position: "conv", a depth-wise convolution in every block; "relative", a bias learned for 224-pixel images and
            resized for others; or "none".
        ffn: "conv", a channel MLP with a depth-wise convolution; "plain" without.
        reading: See SuperTokenAttention.
        common: num_classes, in_chans, global_pool, drop_rate; anything else is refused.
    """

    def __init__(
        self,
        dims: Sizes,
        depths: Sizes,
        heads: Sizes,
        cells: Sequence[int | tuple[int, int]] = (8, 4, 1, 1),
        iterations: Sizes = (1, 1, 1, 1),
        mlp_ratio: float = 4.0,
        projection: int = 1024,
        qkv_bias: bool = True,
        layer_scale: Sequence[float | None] = (None, None, None, None),
        drop_path_rate: float = 0.0,
        stem: str = "conv",
        position: str = "conv",
        ffn: str = "conv",
        reading: str = "fitted",
        in_chans: int = 3,
        **common,
    ):
        check_choice("stem", stem, ("conv", "patch"))
        check_choice("position", position, ("conv", "relative", "none"))
        check_choice("ffn", ffn, ("conv", "plain"))

        def block(i: int, drop_path: float) -> Block:
            cell, side = cells[i], 56 // 2**i  # of the map of a 224-pixel image
            h, w = (cell, cell) if isinstance(cell, int) else cell
            grid = (-(-side // h), -(-side // w)) if position == "relative" else None
            attn = SuperTokenAttention(dims[i], cell, heads[i], iterations[i], qkv_bias, grid, reading)
            mlp = ChannelMlp(dims[i], int(dims[i] * mlp_ratio), depthwise="after" if ffn == "conv" else "none")
            return Block(attn, mlp, dims[i], layer_scale[i], drop_path, cpe=position == "conv")

        def downsample(i: int) -> ConvNorm:
            return ConvNorm(dims[i - 1], dims[i], nn.BatchNorm2d(dims[i]))

        per_stage: dict[str, Any] = dict(dims=dims, heads=heads, cells=cells, iterations=iterations)
        per_stage["layer_scale"] = layer_scale
        stages = make_stages(depths, drop_path_rate, block=block, downsample=downsample, **per_stage)
        first = (conv_stem if stem == "conv" else PatchStem)(in_chans, dims[0])
        head = (lambda **kw: ProjectedHead(dims[-1], hidden=projection, act=nn.SiLU, **kw)) if projection else None
        super().__init__(first, stages, dims, head=head, in_chans=in_chans, **common)

    def adapt_checkpoint(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Checkpoints under the authors' key names load through timm too; `broadsight.load_release` is stricter."""
        if "patch_embed.proj.0.weight" not in state_dict:
            return super().adapt_checkpoint(state_dict)
        own = {key: (self.released_name(key), value.shape) for key, value in self.state_dict().items()}
        return {key: state_dict[name].reshape(shape) for key, (name, shape) in own.items() if name in state_dict}

    @staticmethod
    def released_name(key: str) -> str:
        """The key of the authors' checkpoint that holds one of our tensors."""
        renamed = (re.subn(pattern, replacement, key) for pattern, replacement in _RELEASED_NAMES)
        return next((name for name, count in renamed if count), key)


# Ours -> released. The release numbers the stem's layers conv, GELU, norm and puts down-sampling at the end of a stage.
_RELEASED_NAMES: list[tuple[str, Any]] = [
    (r"^stem\.conv(\d)", lambda m: f"patch_embed.proj.{3 * int(m[1]) - 3}"),
    (r"^stem\.norm(\d)", lambda m: f"patch_embed.proj.{3 * int(m[1]) - 1}"),
    (r"^stages\.(\d)\.downsample\.conv", lambda m: f"layers.{int(m[1]) - 1}.downsample.proj.0"),
    (r"^stages\.(\d)\.downsample\.norm", lambda m: f"layers.{int(m[1]) - 1}.downsample.proj.1"),
    (r"^stages\.(\d\.blocks\.\d+)\.cpe", r"layers.\1.pos_embed.conv"),
    (r"^stages\.(\d\.blocks\.\d+)\.norm1", r"layers.\1.norm1.norm"),
    (r"^stages\.(\d\.blocks\.\d+)\.attn", r"layers.\1.attn.stoken_refine"),
    (r"^stages\.(\d\.blocks\.\d+)\.norm2", r"layers.\1.norm2"),
    (r"^stages\.(\d\.blocks\.\d+)\.mlp\.dw", r"layers.\1.mlp2.conv.conv"),
    (r"^stages\.(\d\.blocks\.\d+)\.mlp", r"layers.\1.mlp2"),
    (r"^stages\.(\d\.blocks\.\d+)\.ls(\d)\.gamma", r"layers.\1.gamma_\2"),
    (r"^head\.fc", "head"),
    (r"^head\.(proj|norm)", r"\1"),
]


class Block(nn.Module):
    """Position, super-token attention, convolutional MLP, each residual. (B, H, W, C) -> (B, H, W, C)."""

    def __init__(
        self,
        attn: SuperTokenAttention,
        mlp: ChannelMlp,
        dim: int,
        layer_scale: float | None,
        drop_path: float,
        cpe=True,
    ):
        super().__init__()
        self.cpe = DepthwiseConv(dim, residual=True) if cpe else nn.Identity()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), attn
        self.norm2, self.mlp = nn.BatchNorm2d(dim), mlp
        self.separate = layer_scale is not None
        self.ls1, self.ls2 = (LayerScale(dim, layer_scale or 0) if self.separate else nn.Identity() for _ in range(2))
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.cpe(x)
        normed = self.norm1(x).permute(0, 3, 1, 2)
        if self.separate or drops(self.drop_path):
            x = x + self.drop_path(self.ls1(self.attn(normed).permute(0, 2, 3, 1)))
            normed = self.norm2(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            return x + self.drop_path(self.ls2(self.mlp(normed)))
        x = self.attn(normed, x.permute(0, 3, 1, 2))
        normed = self.norm2(x).permute(0, 2, 3, 1)
        return self.mlp(normed, x.permute(0, 2, 3, 1))

    def reparameterize(self) -> None:
        """For inference: the second norm into the MLP, layer scales into the projections that precede them."""
        fold_norm(self, "norm2", "mlp.fc1")
        # The scale of the attention branch commutes with the way back to the pixels, which mixes no channels.
        folded = [fold_scale_after(self, "attn", "proj", "ls1"), fold_scale_after(self, "mlp", "fc2", "ls2")]
        self.separate = self.separate and not all(folded)

    def keep_branches_separate(self) -> None:
        """Let the branches give what they add from now on, where they would add it to the residual themselves."""
        self.separate = True


def conv_stem(in_chans: int, dim: int) -> nn.Sequential:
    """Four 3x3 convolutions, each followed by GELU and then BatchNorm. (B, 3, H, W) -> (B, C, H/4, W/4)."""
    # A norm after the activation cannot be folded into its convolution, nor into the next one, which pads after it.
    layers, widths = OrderedDict(), (in_chans, dim // 2, dim // 2, dim, dim)
    for i in range(4):
        layers[f"conv{i + 1}"] = nn.Conv2d(widths[i], widths[i + 1], 3, stride=2 - i % 2, padding=1)
        layers[f"act{i + 1}"], layers[f"norm{i + 1}"] = nn.GELU(), nn.BatchNorm2d(widths[i + 1])
    return nn.Sequential(layers)


class PatchStem(nn.Module):
    """Non-overlapping 4x4 patches and a LayerNorm. (B, 3, H, W) -> (B, C, H/4, W/4), sizes rounded up."""

    def __init__(self, in_chans: int, dim: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, dim, 4, stride=4)
        self.norm1 = LayerNorm2d(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        H, W = x.shape[-2], x.shape[-1]
        return self.norm1(self.conv1(nn.functional.pad(x, [0, -W % 4, 0, -H % 4])))


class IsotropicSwin(swin_transformer.SwinTransformer):
    """timm's Swin with any four widths, for images of any size: what the paper compares isotropic STViTs with.

    Args:
        dims: Channels of each stage.
        position: "relative", Swin's learned bias; or "none".
        common: As timm's SwinTransformer has them; `window_size` may have an entry for each stage.
    """

    def __init__(self, dims: Sizes, position: str = "relative", **common: Any):
        check_choice("position", position, ("relative", "none"))
        if len(dims) != 4:
            raise ValueError(f"dims={tuple(dims)} has {len(dims)} entries; expected 4, one for each stage")
        widths: Any = Widths(dims)
        any_size: Any = dict(dynamic_img_size=True, embed_layer=partial(PatchEmbed, dynamic_img_pad=True))
        super().__init__(embed_dim=widths, **{**any_size, **common})
        self.embed_dim = dims[0]
        blocks = [module for module in self.modules() if isinstance(module, swin_transformer.SwinTransformerBlock)]
        for block in blocks if position == "none" else ():
            block.attn = PositionFreeAttention(block.attn)


class Widths:
    """Widths of stages in place of the first one, which timm's Swin multiplies by 1, 2, 4 and 8."""

    def __init__(self, dims: Sizes):
        self.dims = dims

    def __mul__(self, growth: int) -> int:
        return self.dims[growth.bit_length() - 1]


class PositionFreeAttention(swin_transformer.WindowAttention):
    """Attention within windows by content alone, in place of another. (B*windows, N, C) -> (B*windows, N, C)."""

    def __init__(self, other: swin_transformer.WindowAttention):
        shape: dict[str, Any] = dict(num_heads=other.num_heads, window_size=other.window_size)
        drops: dict[str, Any] = dict(attn_drop=other.attn_drop.p, proj_drop=other.proj_drop.p)
        super().__init__(other.dim, qkv_bias=other.qkv.bias is not None, **shape, **drops)
        self.qkv, self.proj = other.qkv, other.proj
        del self.relative_position_bias_table, self.relative_position_index

    def reset_parameters(self) -> None:
        """Nothing: the layers draw their own."""

    def _init_buffers(self) -> None:
        """Nothing: there are none."""

    def set_window_size(self, window_size: Any) -> None:
        self.window_size = to_2tuple(window_size)
        self.window_area = self.window_size[0] * self.window_size[1]

    def _get_rel_pos_bias(self) -> Tensor:
        return torch.zeros(1, 1, 1, 1, dtype=self.qkv.weight.dtype, device=self.qkv.weight.device)


_SCALED: dict[str, Any] = dict(layer_scale=(None, None, 1e-6, 1e-6))
_STVITS: dict[str, dict[str, Any]] = {
    "stvit_small": dict(dims=(64, 128, 320, 512), depths=(3, 5, 9, 3), heads=(1, 2, 5, 8)),
    "stvit_base": dict(dims=(96, 192, 384, 512), depths=(4, 6, 14, 6), heads=(2, 3, 6, 8), **_SCALED),
    "stvit_large": dict(dims=(96, 192, 448, 640), depths=(4, 7, 19, 8), heads=(2, 3, 7, 10), **_SCALED),
}
_SWINS: dict[str, dict[str, Any]] = {
    "swin_isotropic": {},
    "swin_isotropic_norpe": dict(position="none"),
    "swin_isotropic_global": dict(window_size=(7, 7, 14, 7)),  # all of the third stage's map of a 224-pixel image
}
_CFGS: dict[str, Any] = dict.fromkeys(_STVITS, cfg()) | dict.fromkeys(_SWINS, cfg(first_conv="patch_embed.proj"))
default_cfgs = generate_default_cfgs(_CFGS)


def _create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    if name in _STVITS:
        return build(STViT, name, pretrained, _STVITS[name], kwargs)
    arch = dict(dims=(64, 128, 320, 512), depths=(3, 5, 9, 3), num_heads=(2, 4, 10, 16), **_SWINS[name])
    kwargs.setdefault("pretrained_filter_fn", swin_transformer.checkpoint_filter_fn)
    return build(IsotropicSwin, name, pretrained, arch, kwargs)


__getattr__ = register(__name__, [*_STVITS, *_SWINS], _create)
