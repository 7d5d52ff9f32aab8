"""STViT in the published formulation: (B, C, H, W) throughout, unfold and fold as convolutions, explicit attention.

State dicts are interchangeable with `broadsight.models.STViT`: linear layers hold the paper's 1x1 convolutions.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import Downsample, Head, MapNorm, Model, Stage, conv, pointwise


def neighbourhoods(x: Tensor) -> Tensor:
    """The 3x3 cells around each, by convolution with the nine unit kernels. (B, C, p, q) -> (B, p*q, C, 9)."""
    B, C, p, q = x.shape
    kernels = torch.eye(9, dtype=x.dtype).view(9, 1, 3, 3)
    around = F.conv2d(x.reshape(B * C, 1, p, q), kernels, padding=1)
    return around.reshape(B, C * 9, p * q).transpose(1, 2).reshape(B, p * q, C, 9)


def overlap(parts: Tensor, p: int, q: int) -> Tensor:
    """Sum of what the cells hold for each other, by transposed convolution. (B, p*q, C, 9) -> (B, C, p, q)."""
    B, _, C, _ = parts.shape
    kernels = torch.eye(9, dtype=parts.dtype).view(9, 1, 3, 3)
    maps = parts.permute(0, 2, 3, 1).reshape(B * C, 9, p, q)
    return F.conv_transpose2d(maps, kernels, padding=1).reshape(B, C, p, q)


class Attention(nn.Module):
    """Super-token attention, step by step as the equations name them. (B, C, H, W) -> (B, C, H, W)."""

    def __init__(self, dim, cell: tuple[int, int], heads, iterations, qkv_bias, differentiated: bool = False):
        super().__init__()
        self.cell, self.heads, self.iterations, self.differentiated = cell, heads, iterations, differentiated
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        if self.cell == (1, 1):
            return self.attend(x)
        B, C, H, W = x.shape
        h, w = self.cell
        x = F.pad(x, (0, -W % w, 0, -H % h))
        p, q = x.shape[2] // h, x.shape[3] // w
        tokens = F.adaptive_avg_pool2d(x, (p, q))
        pixels = x.reshape(B, C, p, h, q, w).permute(0, 2, 4, 3, 5, 1).reshape(B, p * q, h * w, C)
        share, mass = pixels, tokens
        with torch.set_grad_enabled(self.differentiated and torch.is_grad_enabled()):
            for iteration in range(self.iterations):
                if iteration:
                    tokens = overlap(pixels.transpose(2, 3) @ share, p, q) / (mass + 1e-12)
                share = (pixels @ neighbourhoods(tokens) * C**-0.5).softmax(-1)  # B p*q h*w 9
                mass = overlap(share.sum(2, keepdim=True), p, q)  # B 1 p q
        tokens = overlap(pixels.transpose(2, 3) @ share, p, q) / (mass + 1e-12)
        y = neighbourhoods(self.attend(tokens)) @ share.transpose(2, 3)  # B p*q C h*w
        y = y.reshape(B, p, q, C, h, w).permute(0, 3, 1, 4, 2, 5).reshape(B, C, p * h, q * w)
        return y[:, :, :H, :W]

    def attend(self, x: Tensor) -> Tensor:
        B, C, p, q = x.shape
        query, key, value = pointwise(self.qkv, x).reshape(B, self.heads, -1, p * q).chunk(3, 2)  # each B heads d N
        weights = (key.transpose(2, 3) @ query * (C // self.heads) ** -0.5).softmax(2)
        return pointwise(self.proj, (value @ weights).reshape(B, C, p, q))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.dw = conv(hidden, hidden, groups=hidden)

    def forward(self, x: Tensor) -> Tensor:
        u = F.gelu(pointwise(self.fc1, x))
        return pointwise(self.fc2, u + self.dw(u))


class Block(nn.Module):
    def __init__(self, dim: int, cell: tuple[int, int], heads: int):
        super().__init__()
        self.cpe = conv(dim, dim, groups=dim)
        self.norm1, self.attn = MapNorm(dim), Attention(dim, cell, heads, 1, True)
        self.norm2, self.mlp = nn.BatchNorm2d(dim), Mlp(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.cpe(x)
        x = x + self.attn(self.norm1(x).contiguous())
        return x + self.mlp(self.norm2(x))


class Stem(nn.Module):
    def __init__(self, in_chans: int, dim: int):
        super().__init__()
        widths = (in_chans, dim // 2, dim // 2, dim, dim)
        for i, stride in enumerate((2, 1, 2, 1), 1):
            setattr(self, f"conv{i}", conv(widths[i - 1], widths[i], stride=stride))
            setattr(self, f"norm{i}", nn.BatchNorm2d(widths[i]))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, 5):
            x = getattr(self, f"norm{i}")(F.gelu(getattr(self, f"conv{i}")(x)))
        return x


class STViT(Model):
    """As the registered sizes are: cells of 8, 4, 1 and 1 pixels, for colour images of 1000 classes."""

    def __init__(self, dims: Sequence[int], depths: Sequence[int], heads: Sequence[int]):
        stages = []
        for i, (dim, cell) in enumerate(zip(dims, (8, 4, 1, 1), strict=True)):
            blocks = [Block(dim, (cell, cell), heads[i]) for _ in range(depths[i])]
            stages.append(Stage(Downsample(dims[i - 1], dim) if i else None, blocks))
        super().__init__(Stem(3, dims[0]), stages, Head(dims[-1], 1024, 1000, F.silu))
