"""EMSNet written the long way: unfold/fold for window attention, transposed convolutions for propagation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

VARIANTS = ("baseline", "whiten", "patch2", "patch4", "gated", "c_mhsa", "full", "no_split", "no_fusion")


def pointwise(linear: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear layer to the channels of every pixel, (B, C, H, W) -> (B, C', H, W)."""
    return linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def num_heads(width: int) -> int:
    """One head per 32 channels, at least one."""
    heads = max(1, width // 32)
    if width % heads:
        raise ValueError(f"{heads} heads do not divide attention width {width}")
    return heads


def propagation(width: int, patch: int) -> nn.ConvTranspose2d:
    """Depthwise up-sampling by `patch`: every cell paints one tile."""
    return nn.ConvTranspose2d(width, width, patch, stride=patch, groups=width, bias=False)


class PoolBranch(nn.Module):
    """(B, c_in, H, W) -> (B, c_out, H, W): a coordinate convolution on a max-pooled grid."""

    def __init__(self, in_width: int, out_width: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.expand = nn.Linear(in_width, out_width, bias=False)
        self.conv_h = nn.Conv2d(out_width, out_width, (1, 3), padding=(0, 1), groups=out_width, bias=False)
        self.conv_v = nn.Conv2d(out_width, out_width, (3, 1), padding=(1, 0), groups=out_width, bias=False)
        self.prop = propagation(out_width, patch)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        x = nn.functional.max_pool2d(x, self.patch, self.patch, ceil_mode=True)
        x = self.conv_v(self.conv_h(pointwise(self.expand, x)))
        return self.prop(x)[:, :, :height, :width]


class StaticBranch(nn.Module):
    """(B, c, H, W) -> (B, out_width, H, W).

    `slices` are the widths of the p=2, identity and p=4 parts; without them the branch is the whitening alone.
    """

    def __init__(
        self,
        width: int,
        slices: tuple[int, int, int] | None,
        expansion: int = 2,
        merge: bool = True,
        gate: bool = True,
        whiten: str = "channel",
    ) -> None:
        super().__init__()
        if whiten not in ("channel", "spatial"):
            raise ValueError(f"unknown whitening {whiten!r}")
        self.whiten_mode = whiten
        self.slices = slices
        self.whiten = nn.Linear(width, width, bias=False)
        self.out_width = width
        if slices is None:
            return
        if sum(slices) != width:
            raise ValueError(f"slices {slices} do not add up to {width}")
        self.dw = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.pool2 = PoolBranch(slices[0], expansion * slices[0], 2)
        self.pool4 = PoolBranch(slices[2], expansion * slices[2], 4) if slices[2] else None
        concat_width = expansion * slices[0] + slices[1] + expansion * slices[2]
        self.merge = nn.Linear(concat_width, width, bias=False) if merge else None
        self.gate = nn.Linear(width, width, bias=False) if gate else None
        self.out_width = width if merge else concat_width

    def whitened(self, x: Tensor) -> Tensor:
        """(B, c, H, W) -> (B, c, H, W)."""
        if self.whiten_mode == "spatial":
            return pointwise(self.whiten, x - x.mean(dim=(2, 3), keepdim=True))
        x = pointwise(self.whiten, x)
        return x - x.mean(dim=1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        white = self.whitened(x)
        if self.slices is None:
            return white
        part2, part1, part4 = self.dw(white).split(self.slices, dim=1)
        parts = [self.pool2(part2), part1]
        if self.pool4 is not None:
            parts.append(self.pool4(part4))
        out = torch.cat(parts, dim=1)
        if self.merge is not None:
            out = pointwise(self.merge, out)
        if self.gate is not None:
            # The gated signal is the branch input itself, not the whitened map.
            out = pointwise(self.gate, x) * torch.sigmoid(out)
        return out


class CMHSA(nn.Module):
    """(B, D, h, w) -> (B, D, h, w): predicted 9x9 mixing inside overlapping 3x3 windows of stride 2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = num_heads(width)
        self.dw = nn.Conv2d(width, width, 3, stride=2, padding=1, groups=width, bias=False)
        self.mix = nn.Linear(width, 81 * self.heads, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        heads, head_dim = self.heads, x.shape[1] // self.heads
        logits = pointwise(self.mix, self.dw(x)).flatten(2)  # (B, n*81, L)
        logits = logits.unflatten(1, (heads, 9, 9)).permute(0, 1, 4, 2, 3)  # (B, n, L, dst, src)
        weights = torch.softmax(logits, dim=4)
        value = nn.functional.unfold(pointwise(self.value, x), 3, padding=1, stride=2)  # (B, D*9, L)
        value = value.unflatten(1, (heads, head_dim, 9)).permute(0, 1, 4, 3, 2)  # (B, n, L, src, d)
        out = torch.matmul(weights, value)  # (B, n, L, dst, d)
        out = out.permute(0, 1, 4, 3, 2).flatten(1, 3)  # (B, D*9, L)
        out = nn.functional.fold(out, tuple(size), 3, padding=1, stride=2)
        return pointwise(self.proj, out)


class GMHSA(nn.Module):
    """(B, D, h, w) -> (B, D, h, w): plain self-attention over all cells."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = num_heads(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        head_dim = x.shape[1] // self.heads
        qkv = self.qkv(x.flatten(2).transpose(1, 2))  # (B, T, 3D)
        q, k, v = (t.unflatten(2, (self.heads, head_dim)).transpose(1, 2) for t in qkv.chunk(3, dim=2))
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(head_dim), dim=3)
        out = self.proj(torch.matmul(weights, v).transpose(1, 2).flatten(2))
        return out.transpose(1, 2).unflatten(2, size)


class AttentionPath(nn.Module):
    """(B, c_in, H, W) -> (B, c_out, H, W): attention on an average-pooled grid."""

    def __init__(self, in_width: int, out_width: int, patch: int, attn: nn.Module) -> None:
        super().__init__()
        self.patch = patch
        self.expand = nn.Linear(in_width, out_width, bias=False)
        self.attn = attn
        self.prop = propagation(out_width, patch)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        x = pointwise(self.expand, x)
        # Border windows are averaged over the pixels that exist.
        x = nn.functional.avg_pool2d(x, self.patch, self.patch, ceil_mode=True, count_include_pad=False)
        return self.prop(self.attn(x))[:, :, :height, :width]


class DynamicBranch(nn.Module):
    """(B, c_local + c_global, H, W) -> (B, out_width, H, W); each path is given as (input width, attention width)."""

    def __init__(self, local: tuple[int, int], global_: tuple[int, int] | None, merge_width: int | None) -> None:
        super().__init__()
        self.local_width = local[0]
        self.local = AttentionPath(local[0], local[1], 4, CMHSA(local[1]))
        self.global_ = AttentionPath(global_[0], global_[1], 6, GMHSA(global_[1])) if global_ is not None else None
        concat_width = local[1] + (global_[1] if global_ is not None else 0)
        self.merge = nn.Linear(concat_width, merge_width, bias=False) if merge_width is not None else None
        self.out_width = concat_width if merge_width is None else merge_width

    def forward(self, x: Tensor) -> Tensor:
        out = self.local(x[:, : self.local_width])
        if self.global_ is not None:
            out = torch.cat([out, self.global_(x[:, self.local_width :])], dim=1)
        return out if self.merge is None else pointwise(self.merge, out)


class MSI(nn.Module):
    """Multi-scale spatial interaction, (B, C, H, W) -> (B, C, H, W), and all its ablations."""

    def __init__(self, dim: int, variant: str, ratios: tuple[int, int, int], whiten: str) -> None:
        super().__init__()
        if variant not in VARIANTS:
            raise ValueError(f"unknown variant {variant!r}")
        if dim % 8:
            raise ValueError(f"width {dim} is not a multiple of 8")
        if len(ratios) != 3 or sum(ratios) != 4:
            raise ValueError(f"ratios {ratios} are not three numbers of quarters")
        half, quarter = dim // 2, dim // 4

        def slices(width: int) -> tuple[int, int, int]:
            return tuple(r * width // 4 for r in ratios)

        in_width = dim
        self.static: StaticBranch | None = None
        self.dynamic: DynamicBranch | None = None
        if variant == "whiten":
            self.static_width = dim
            self.static = StaticBranch(dim, None, whiten=whiten)
        elif variant == "patch2":
            self.static_width = dim
            self.static = StaticBranch(dim, (half, half, 0), merge=False, gate=False, whiten=whiten)
        elif variant == "patch4":
            self.static_width = dim
            self.static = StaticBranch(dim, slices(dim), merge=False, gate=False, whiten=whiten)
        elif variant == "gated":
            self.static_width = dim
            self.static = StaticBranch(dim, slices(dim), whiten=whiten)
        elif variant == "c_mhsa":
            self.static_width = half
            self.static = StaticBranch(half, slices(half), whiten=whiten)
            self.dynamic = DynamicBranch((half, dim), None, half)
        elif variant == "full":
            self.static_width = half
            self.static = StaticBranch(half, slices(half), whiten=whiten)
            self.dynamic = DynamicBranch((quarter, half), (quarter, quarter), half)
        elif variant == "no_split":
            # The input projection makes three full-width copies instead of slicing one.
            in_width = 3 * dim
            self.static_width = dim
            self.static = StaticBranch(dim, slices(dim), whiten=whiten)
            self.dynamic = DynamicBranch((dim, dim), (dim, half), dim)
        elif variant == "no_fusion":
            # Nothing widens, so that the concatenations have the right width without fusion layers.
            self.static_width = half
            self.static = StaticBranch(half, slices(half), expansion=1, merge=False, whiten=whiten)
            self.dynamic = DynamicBranch((quarter, quarter), (quarter, quarter), None)

        out_width = dim
        if self.static is not None:
            out_width = self.static.out_width + (self.dynamic.out_width if self.dynamic is not None else 0)
        self.in_proj = nn.Linear(dim, in_width, bias=False)
        self.out_proj = nn.Linear(out_width, dim, bias=False) if variant != "no_fusion" else None

    def forward(self, x: Tensor) -> Tensor:
        z = pointwise(self.in_proj, x)
        if self.dynamic is not None:
            out = torch.cat([self.static(z[:, : self.static_width]), self.dynamic(z[:, self.static_width :])], dim=1)
        elif self.static is not None:
            out = self.static(z)
        else:
            out = z
        return out if self.out_proj is None else pointwise(self.out_proj, out)


class MLP(nn.Module):
    """(B, C, H, W) -> (B, C, H, W)."""

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, ratio * dim, bias=False)
        self.fc2 = nn.Linear(ratio * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return pointwise(self.fc2, nn.functional.gelu(pointwise(self.fc1, x)))


class Block(nn.Module):
    """(B, C, H, W) -> (B, C, H, W)."""

    def __init__(self, dim: int, mlp_ratio: int, variant: str, ratios: tuple[int, int, int], whiten: str) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(dim)
        self.mixer = MSI(dim, variant, ratios, whiten)
        self.norm2 = nn.BatchNorm2d(dim)
        self.mlp = MLP(dim, mlp_ratio)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stem(nn.Module):
    """(B, c, H, W) -> (B, C, ceil(H/4), ceil(W/4))."""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, dim, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(dim)
        self.conv2 = nn.Conv2d(dim, dim, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(self.conv2(nn.functional.gelu(self.norm1(self.conv1(x)))))


class Downsample(nn.Module):
    """(B, C, H, W) -> (B, C', ceil(H/2), ceil(W/2))."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_dim, out_dim, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Stage(nn.Module):
    """(B, C_in, H, W) -> (B, C, H', W')."""

    def __init__(self, downsample: nn.Module | None, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        if self.downsample is not None:
            x = self.downsample(x)
        for block in self.blocks:
            x = block(x)
        return x


class Head(nn.Module):
    """(B, C, H, W) -> (B, num_classes)."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean(dim=(2, 3)))


class EMSNet(nn.Module):
    """Image (B, in_chans, H, W) -> logits (B, num_classes).

    `ratios` are the quarters of the static branch that go to p=2, identity and p=4. `num_classes=0` leaves out the
    classifier and its norm: only `features` is usable then.
    """

    def __init__(
        self,
        dims: Sequence[int],
        depths: Sequence[int],
        mlp_ratios: Sequence[int],
        variant: str = "full",
        ratios: tuple[int, int, int] = (1, 2, 1),
        whiten: str = "channel",
        num_classes: int = 1000,
        in_chans: int = 3,
    ) -> None:
        super().__init__()
        self.stem = Stem(in_chans, dims[0])
        self.stages = nn.ModuleList()
        for i in range(4):
            blocks = [Block(dims[i], mlp_ratios[i], variant, tuple(ratios), whiten) for _ in range(depths[i])]
            self.stages.append(Stage(Downsample(dims[i - 1], dims[i]) if i > 0 else None, blocks))
        self.norm = nn.BatchNorm2d(dims[3]) if num_classes else None
        self.head = Head(dims[3], num_classes) if num_classes else None

    def features(self, x: Tensor) -> list[Tensor]:
        """Four maps (B, C_i, H_i, W_i)."""
        outputs = []
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
            outputs.append(x)
        return outputs

    def forward(self, x: Tensor) -> Tensor:
        if self.head is None:
            raise RuntimeError("built without a classifier (num_classes=0)")
        return self.head(self.norm(self.features(x)[-1]))
