"""PartialFormer: partial attention (thesis on efficient vision backbones, chapter 5). See docs/models.md."""

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerNorm2d, register_notrace_function
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from ..errors import check_choice
from ..layers import ChannelMlp, DepthwiseConv, PartialAttention
from ..layers.checks import check_reading
from ._backbone import ConvNorm, ConvStem, ProjectedHead, Sizes, StagedBackbone, cfg, drops, make_stages, register_class

GRID_224 = (3136, 784, 196, 49)  # tokens of each stage of a 224-pixel image
norm2d = partial(LayerNorm2d, eps=1e-6)


class PartialFormer(StagedBackbone):
    """Four stages of partial attention; features at strides 4, 8, 16, 32.

    Args:
        dim: Channels of the first stage; they double from stage to stage.
        depths, heads: Blocks and attention heads of each stage.
        foreground: Foreground tokens of each stage: a count at 224 pixels, which grows with the map, or a fraction of
            the tokens, as a float below 1 or a Fraction.
        foreground_fixed: The counts do not grow with the map.
        reading: Where the score that picks the foreground is taken: "fitted", before the norm; "equations", from the
            attention's input, as Eq. 5.4 reads; see `saliency` and `normed_saliency`.
        foreground_limit, background_required, background_identity, project_all, head_expansion: See PartialAttention.
        channel_hidden: Width inside the background's MLP, or one a stage; by default 1/32 of the channels, at least 4.
        peg_kernel: Side of the position convolution.
        mlp_ratio, mlp_conv: Hidden over outer channels of the MLPs, and whether they have a 3x3 depth-wise convolution.
        stem: "conv3", "conv2" (3x3 convolutions) or "patch7" (one 7x7 convolution of stride 4).
        pool_first, hidden: Whether to pool before the classifier's hidden layer, and its width.
        feature_norms: A LayerNorm for each stage's output, for dense prediction; on by default with features_only.
        drop_path_rate: Stochastic depth of the last block; it grows linearly from 0 at the first.
        common: num_classes, in_chans, global_pool, drop_rate; anything else is refused.
    """

    def __init__(
        self,
        dim: int,
        depths: Sizes,
        heads: Sizes,
        foreground: Sequence[int | float | Fraction] = (39, 16, 16, 17),
        reading: str = "fitted",
        foreground_fixed: bool = False,
        foreground_limit: int | None = None,
        background_required: bool = True,
        background_identity: bool = True,
        project_all: bool = False,
        head_expansion: int = 4,
        channel_hidden: int | Sizes | None = None,
        peg_kernel: int = 7,
        mlp_ratio: float = 4.0,
        mlp_conv: bool = False,
        stem: str = "conv3",
        pool_first: bool = False,
        hidden: int = 1280,
        feature_norms: bool = False,
        drop_path_rate: float = 0.0,
        in_chans: int = 3,
        **common,
    ):
        check_choice("stem", stem, ("conv3", "conv2", "patch7"))
        check_reading(reading)
        if dim % 2:
            raise ValueError(f"dim={dim} is odd; the stem starts with half of it")
        if peg_kernel % 2 == 0:
            raise ValueError(f"peg_kernel={peg_kernel} is even; a convolution that keeps the size needs an odd one")
        hiddens = channel_hidden if isinstance(channel_hidden, Sequence) else [channel_hidden] * 4
        dims = [dim * 2**i for i in range(4)]
        switches: dict[str, Any] = dict(head_expansion=head_expansion, project_all=project_all)
        switches |= dict(background_identity=background_identity, background_required=background_required)
        switches["foreground_limit"] = foreground_limit

        def block(i: int, drop_path: float) -> Block:
            share = _share(foreground[i], 0 if foreground_fixed else GRID_224[i])
            attn = PartialAttention(dims[i], heads[i], share, channel_hidden=hiddens[i], **switches)
            mlp = ChannelMlp(dims[i], int(dims[i] * mlp_ratio), depthwise="before" if mlp_conv else "none")
            return Block(attn, mlp, dims[i], peg_kernel, drop_path, reading)

        def downsample(i: int) -> ConvNorm:
            return ConvNorm(dims[i - 1], dims[i], norm2d(dims[i]))

        per_stage: dict[str, Any] = dict(heads=heads, foreground=foreground, channel_hidden=hiddens)
        super().__init__(
            stages=make_stages(depths, drop_path_rate, block=block, downsample=downsample, **per_stage),
            stem=make_stem(stem, in_chans, dim),
            dims=dims,
            norm=norm2d(dims[-1]),
            head=partial(ProjectedHead, dims[-1], hidden=hidden, bias=False, pool_first=pool_first),
            feature_norms=[norm2d(width) for width in dims] if feature_norms else (),
            in_chans=in_chans,
            **common,
        )

    def init_module(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class Block(nn.Module):
    """Position, partial attention, MLP, each residual. (B, H, W, C) -> (B, H, W, C)."""

    def __init__(self, attn: nn.Module, mlp: nn.Module, dim: int, peg_kernel: int, drop_path: float, reading: str):
        super().__init__()
        self.reading = reading
        self.peg = DepthwiseConv(dim, peg_kernel, residual=True)
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), attn
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), mlp
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.peg(x)
        scores = saliency(x) if self.reading == "fitted" else normed_saliency(x, self.norm1)
        y = self.attn(self.norm1(x).flatten(1, 2), scores)
        x = x + self.drop_path(y.view(x.shape))
        normed = self.norm2(x)
        return x + self.drop_path(self.mlp(normed)) if drops(self.drop_path) else self.mlp(normed, x)


@register_notrace_function
def saliency(x: Tensor) -> Tensor:
    """The score that picks the foreground: the channel mean. (B, H, W, C) -> (B, H*W), without gradient.

    In single precision at least: half precision ties.
    """
    return x.detach().mean(-1, dtype=_wide(x)).flatten(1)


@register_notrace_function
def normed_saliency(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """The channel mean of norm(x). (B, H, W, C) -> (B, H*W), without gradient.

    What is normed adds up to zero, so that the mean comes from the differences of the norm's weights alone, and is
    computed from these: as they begin, all equal, every score is exactly equal, where a sum would give rounding errors.
    """
    normed = F.layer_norm(x.detach().to(_wide(x)), x.shape[-1:], eps=norm.eps)
    weight, bias = norm.weight.detach().to(normed.dtype), norm.bias.detach().to(normed.dtype)
    return (normed @ ((weight - weight.mean()) / len(weight)) + bias.mean()).flatten(1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def make_stem(kind: str, in_chans: int, dim: int) -> ConvStem:
    """3x3 convolutions with BatchNorm inside, or one of 7x7 and stride 4; LayerNorm at the end."""
    if kind == "patch7":
        return ConvStem((nn.Conv2d(in_chans, dim, 7, stride=4, padding=3), norm2d(dim)))
    half = dim // 2
    layers: list[Any] = [(nn.Conv2d(in_chans, half, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(half))]
    if kind == "conv3":
        layers.append((nn.Conv2d(half, half, 3, padding=1, bias=False), nn.BatchNorm2d(half)))
    return ConvStem(*layers, (nn.Conv2d(half, dim, 3, stride=2, padding=1), norm2d(dim)))


def _share(foreground: int | float | Fraction, grid: int) -> tuple[int, int]:
    """(n, of) as PartialAttention takes it; of = 0 for a count that does not grow."""
    if isinstance(foreground, int):
        return foreground, grid
    share = Fraction(foreground).limit_denominator(1_000_000)
    if not 0 < share <= 1:
        raise ValueError(f"foreground={foreground} is not a fraction of the tokens; choose one above 0 and up to 1")
    return share.numerator, share.denominator


_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "partialformer_b0": dict(dim=24, depths=(2, 2, 6, 6), heads=(2, 4, 8, 16)),
    "partialformer_b1": dict(dim=32, depths=(2, 2, 6, 6), heads=(2, 4, 8, 16)),
    "partialformer_b2": dict(dim=48, depths=(2, 2, 8, 8), heads=(3, 6, 12, 24)),
    "partialformer_b3": dict(dim=64, depths=(2, 2, 8, 8), heads=(4, 8, 16, 32)),
    "partialformer_b4": dict(dim=96, depths=(2, 2, 8, 6), heads=(6, 12, 24, 48)),
}
default_cfgs = generate_default_cfgs(dict.fromkeys(_ARCHITECTURES, cfg()))
__getattr__ = register_class(__name__, PartialFormer, _ARCHITECTURES)
