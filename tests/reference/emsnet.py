"""EMSNet written the long way: unfold/fold for window attention, transposed convolutions for propagation."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import MLP, Downsample, Model, Stage, Stem, attention, conv, pointwise, split_heads

Linear = partial(nn.Linear, bias=False)


def propagation(width: int, patch: int) -> nn.ConvTranspose2d:
    """Depthwise up-sampling by `patch`: every cell paints one tile."""
    return nn.ConvTranspose2d(width, width, patch, stride=patch, groups=width, bias=False)


class PoolBranch(nn.Module):
    """(B, c_in, H, W) -> (B, c_out, H, W): a coordinate convolution on a max-pooled grid."""

    def __init__(self, in_width: int, out_width: int, patch: int):
        super().__init__()
        self.patch, self.expand = patch, Linear(in_width, out_width)
        self.conv_h = nn.Conv2d(out_width, out_width, (1, 3), padding=(0, 1), groups=out_width, bias=False)
        self.conv_v = nn.Conv2d(out_width, out_width, (3, 1), padding=(1, 0), groups=out_width, bias=False)
        self.prop = propagation(out_width, patch)

    def forward(self, x: Tensor) -> Tensor:
        cells = F.max_pool2d(x, self.patch, self.patch, ceil_mode=True)
        out = self.prop(self.conv_v(self.conv_h(pointwise(self.expand, cells))))
        return out[:, :, : x.shape[2], : x.shape[3]]


class StaticBranch(nn.Module):
    """(B, c, H, W) -> (B, out_width, H, W); slices are the widths of p=2, identity and p=4, None: whitening alone."""

    def __init__(self, width: int, slices: tuple | None, expansion=2, merge=True, gate=True, whiten="channel"):
        super().__init__()
        self.whiten_mode, self.slices, self.out_width = whiten, slices, width
        self.whiten = Linear(width, width)
        if slices is None:
            return
        self.dw = conv(width, width, groups=width, bias=False)
        self.pool2 = PoolBranch(slices[0], expansion * slices[0], 2)
        self.pool4 = PoolBranch(slices[2], expansion * slices[2], 4) if slices[2] else None
        concat_width = expansion * slices[0] + slices[1] + expansion * slices[2]
        self.merge = Linear(concat_width, width) if merge else nn.Identity()
        self.gate = Linear(width, width) if gate else None
        self.out_width = width if merge else concat_width

    def forward(self, x: Tensor) -> Tensor:
        white = pointwise(self.whiten, x - x.mean((2, 3), keepdim=True) if self.whiten_mode == "spatial" else x)
        white = white if self.whiten_mode == "spatial" else white - white.mean(1, keepdim=True)
        if self.slices is None:
            return white
        part2, part1, part4 = self.dw(white).split(self.slices, dim=1)
        parts = [self.pool2(part2), part1] + ([self.pool4(part4)] if self.pool4 is not None else [])
        out = pointwise(self.merge, torch.cat(parts, dim=1))
        # The gated signal is the branch input itself, not the whitened map.
        return out if self.gate is None else pointwise(self.gate, x) * torch.sigmoid(out)


class CMHSA(nn.Module):
    """(B, D, h, w) -> (B, D, h, w): predicted 9x9 mixing inside overlapping 3x3 windows of stride 2."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = max(1, width // 32)
        self.dw = conv(width, width, stride=2, groups=width, bias=False)
        self.mix = Linear(width, 81 * self.heads)
        self.value, self.proj = Linear(width, width), Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        logits = pointwise(self.mix, self.dw(x)).flatten(2)  # (B, n*81, L)
        logits = logits.unflatten(1, (self.heads, 9, 9)).permute(0, 1, 4, 2, 3)  # (B, n, L, dst, src)
        value = F.unfold(pointwise(self.value, x), 3, padding=1, stride=2)  # (B, D*9, L)
        value = value.unflatten(1, (self.heads, -1, 9)).permute(0, 1, 4, 3, 2)  # (B, n, L, src, d)
        out = torch.matmul(torch.softmax(logits, dim=4), value)  # (B, n, L, dst, d)
        out = out.permute(0, 1, 4, 3, 2).flatten(1, 3)  # (B, D*9, L)
        return pointwise(self.proj, F.fold(out, x.shape[2:], 3, padding=1, stride=2))


class GMHSA(nn.Module):
    """(B, D, h, w) -> (B, D, h, w): plain self-attention over all cells."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = max(1, width // 32)
        self.qkv, self.proj = Linear(width, 3 * width), Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = (split_heads(t, self.heads) for t in self.qkv(tokens).chunk(3, dim=2))
        return self.proj(attention(q, k, v)).transpose(1, 2).unflatten(2, x.shape[2:])


class AttentionPath(nn.Module):
    """(B, c_in, H, W) -> (B, c_out, H, W): attention on an average-pooled grid."""

    def __init__(self, in_width: int, out_width: int, patch: int, attn: nn.Module):
        super().__init__()
        self.patch, self.expand = patch, Linear(in_width, out_width)
        self.attn, self.prop = attn, propagation(out_width, patch)

    def forward(self, x: Tensor) -> Tensor:
        # Border windows are averaged over the pixels that exist.
        options = dict(ceil_mode=True, count_include_pad=False)
        cells = F.avg_pool2d(pointwise(self.expand, x), self.patch, self.patch, **options)
        return self.prop(self.attn(cells))[:, :, : x.shape[2], : x.shape[3]]


class DynamicBranch(nn.Module):
    """(B, c_local + c_global, H, W) -> (B, out_width, H, W); each path is given as (input width, attention width)."""

    def __init__(self, local: tuple[int, int], global_: tuple[int, int] | None, merge_width: int | None):
        super().__init__()
        self.local_width = local[0]
        self.local = AttentionPath(*local, 4, CMHSA(local[1]))
        self.global_ = AttentionPath(*global_, 6, GMHSA(global_[1])) if global_ else None
        concat_width = local[1] + (global_[1] if global_ else 0)
        self.merge = Linear(concat_width, merge_width) if merge_width else nn.Identity()
        self.out_width = merge_width or concat_width

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.local(x[:, : self.local_width])]
        if self.global_ is not None:
            parts.append(self.global_(x[:, self.local_width :]))
        return pointwise(self.merge, torch.cat(parts, dim=1))


class MSI(nn.Module):
    """Multi-scale spatial interaction, (B, C, H, W) -> (B, C, H, W), and all its ablations."""

    def __init__(self, dim: int, variant: str, ratios: tuple[int, int, int], whiten: str):
        super().__init__()
        half, quarter = dim // 2, dim // 4
        slices = {width: tuple(r * width // 4 for r in ratios) for width in (dim, half)}
        plain, unfused = dict(merge=False, gate=False), dict(expansion=1, merge=False)
        # Width and slices of the static branch and its options; local, global and merged width of the dynamic branch.
        # "no_split" makes three full-width copies of its input; in "no_fusion" nothing widens, so that the
        # concatenations have the right width without fusion layers.
        static, options, dynamic = {
            "baseline": (None, {}, None),
            "whiten": ((dim, None), {}, None),
            "patch2": ((dim, (half, half, 0)), plain, None),
            "patch4": ((dim, slices[dim]), plain, None),
            "gated": ((dim, slices[dim]), {}, None),
            "c_mhsa": ((half, slices[half]), {}, ((half, dim), None, half)),
            "full": ((half, slices[half]), {}, ((quarter, half), (quarter, quarter), half)),
            "no_split": ((dim, slices[dim]), {}, ((dim, dim), (dim, half), dim)),
            "no_fusion": ((half, slices[half]), unfused, ((quarter, quarter), (quarter, quarter), None)),
        }[variant]
        self.static = StaticBranch(*static, **options, whiten=whiten) if static else nn.Identity()
        self.dynamic = DynamicBranch(*dynamic) if dynamic else None
        self.static_width = static[0] if static else dim
        out_width = (self.static.out_width if static else dim) + (self.dynamic.out_width if dynamic else 0)
        self.in_proj = Linear(dim, 3 * dim if variant == "no_split" else dim)
        self.out_proj = Linear(out_width, dim) if variant != "no_fusion" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        z = pointwise(self.in_proj, x)
        out = self.static(z[:, : self.static_width])
        if self.dynamic is not None:
            out = torch.cat([out, self.dynamic(z[:, self.static_width :])], dim=1)
        return pointwise(self.out_proj, out)


class Block(nn.Module):
    def __init__(self, dim: int, mlp_ratio: int, *mixer: object):
        super().__init__()
        self.norm1, self.mixer = nn.BatchNorm2d(dim), MSI(dim, *mixer)
        self.norm2, self.mlp = nn.BatchNorm2d(dim), MLP(dim, mlp_ratio * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    def __init__(self, dim: int, num_classes: int):
        super().__init__()
        self.fc = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean(dim=(2, 3)))


class EMSNet(Model):
    """`ratios` are the quarters of the static branch that go to p=2, identity and p=4."""

    def __init__(
        self, dims, depths, mlp_ratios, variant="full", ratios=(1, 2, 1), whiten="channel", num_classes=1000, in_chans=3
    ):
        convolutions = (conv(width, dims[0], stride=2, bias=False) for width in (in_chans, dims[0]))
        stem = Stem(*((convolution, nn.BatchNorm2d(dims[0])) for convolution in convolutions))
        stages = []
        for i, dim in enumerate(dims):
            blocks = [Block(dim, mlp_ratios[i], variant, tuple(ratios), whiten) for _ in range(depths[i])]
            stages.append(Stage(Downsample(dims[i - 1], dim, bias=False) if i else None, blocks))
        super().__init__(stem, stages, Head(dims[3], num_classes), nn.BatchNorm2d(dims[3]))
