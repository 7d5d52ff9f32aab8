"""What the slow references share. Maps are (B, C, H, W) unless a shape says otherwise."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def pointwise(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a layer over (B, H, W, C) to every pixel of (B, C, H, W)."""
    return layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with q (B, h, T, d), k and v (B, h, S, d) -> (B, T, h*d)."""
    return merge_heads(torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[3]), dim=3) @ v)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, ..., C) -> (B, h, T, d), all positions in raster order."""
    return x.flatten(1, -2).unflatten(2, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, h, T, d) -> (B, T, C)."""
    return x.transpose(1, 2).flatten(2)


def conv(in_dim: int, dim: int, kernel: int = 3, stride: int = 1, bias: bool = True, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_dim, dim, kernel, stride, kernel // 2, groups=groups, bias=bias)


class MapNorm(nn.LayerNorm):
    """A layer norm over the channels of a map."""

    def __init__(self, dim: int):
        super().__init__(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return pointwise(super().forward, x)


class Stem(nn.Module):
    """Convolutions and their norms, with a GELU between one and the next."""

    def __init__(self, *layers: tuple[nn.Module, nn.Module]):
        super().__init__()
        self.depth = len(layers)
        for i, (convolution, norm) in enumerate(layers, 1):
            self.add_module(f"conv{i}", convolution)
            self.add_module(f"norm{i}", norm)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, self.depth + 1):
            x = self.get_submodule(f"norm{i}")(self.get_submodule(f"conv{i}")(x if i == 1 else F.gelu(x)))
        return x


class Downsample(nn.Module):
    """A convolution of stride 2 and its norm."""

    def __init__(self, in_dim: int, dim: int, norm: type[nn.Module] = nn.BatchNorm2d, bias: bool = True):
        super().__init__()
        self.conv, self.norm = conv(in_dim, dim, stride=2, bias=bias), norm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class MLP(nn.Module):
    """fc2(GELU(fc1(x))), with a depthwise 3x3 on the hidden map if `dw`."""

    def __init__(self, dim: int, hidden: int, dw: bool = False, bias: bool = True):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden, bias), nn.Linear(hidden, dim, bias)
        self.dw = conv(hidden, hidden, groups=hidden) if dw else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return pointwise(self.fc2, F.gelu(self.dw(pointwise(self.fc1, x))))


class Head(nn.Module):
    """(B, C, H, W) -> (B, num_classes): a hidden layer at every position, or after the mean with `pool_first`."""

    def __init__(self, dim: int, hidden: int, num_classes: int, act=F.gelu, bias=True, pool_first=False):
        super().__init__()
        self.proj, self.norm = nn.Linear(dim, hidden, bias=bias), nn.BatchNorm2d(hidden)
        self.fc, self.act, self.pool_first = nn.Linear(hidden, num_classes), act, pool_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean((2, 3), keepdim=True) if self.pool_first else x
        return self.fc(self.act(self.norm(pointwise(self.proj, x))).mean((2, 3)))


class Stage(nn.Module):
    def __init__(self, downsample: nn.Module | None, blocks: Sequence[nn.Module], norm: nn.Module | None = None):
        super().__init__()
        self.downsample, self.blocks = downsample or nn.Identity(), nn.Sequential(*blocks)
        self.norm = norm or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.downsample(x)))


class Model(nn.Module):
    """Image (B, in_chans, H, W) -> logits (B, num_classes)."""

    def __init__(self, stem: nn.Module, stages: Sequence[nn.Module], head: nn.Module, norm: nn.Module | None = None):
        super().__init__()
        self.stem, self.stages, self.head, self.norm = stem, nn.ModuleList(stages), head, norm or nn.Identity()

    def outputs(self, x: Tensor) -> list[Tensor]:
        """The map that every stage gives."""
        return list(accumulate(self.stages, lambda x, stage: stage(x), initial=self.stem(x)))[1:]

    def features(self, x: Tensor) -> list[Tensor]:
        return self.outputs(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.outputs(x)[-1]))
