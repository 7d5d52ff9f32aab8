"""PartialFormer written the long way: sort all tokens, project every row, scatter the rows back."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .parts import MLP, Downsample, Head, MapNorm, Model, Stage, Stem, conv, merge_heads, split_heads

# Number of tokens of the four stages of a 224x224 image; foreground counts are stated for these grids.
REFERENCE_TOKENS = (3136, 784, 196, 49)


def foreground_count(
    num_tokens: int, n: int | Fraction, reference: int, fixed=False, uncapped=False, cap: int | None = None
) -> int:
    """`n` of `reference` tokens, exactly, or just `n` if `fixed`; all only if `uncapped`, or there is but one."""
    count = math.floor(Fraction(n) if fixed else Fraction(n) * num_tokens / reference)
    count = count if cap is None else min(count, cap)
    largest = num_tokens if uncapped or num_tokens == 1 else num_tokens - 1
    return max(1, min(count, largest))


class ChannelMLP(nn.Module):
    """(B, 1, d) -> (B, 1, d) through a narrow hidden layer."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(dim, hidden), nn.LayerNorm(hidden, 1e-6), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.norm(self.fc1(x))))


class PartialAttention(nn.Module):
    """Head-mixed attention among the foreground and one abstract query over the background.

    `project_all` moves the output projection to the end; the abstract token then queries the background unprojected.
    """

    def __init__(self, dim, heads, head_expansion=4, channel_hidden=None, bg_identity=True, project_all=False):
        super().__init__()
        self.head_dim, self.split = dim // heads, partial(split_heads, heads=heads)
        self.bg_identity, self.project_all = bg_identity, project_all
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.head_up = nn.Parameter(torch.zeros(head_expansion * heads, heads))
        self.head_down = nn.Parameter(torch.zeros(heads, head_expansion * heads))
        self.channel_mlp = ChannelMLP(dim, max(4, dim // 32) if channel_hidden is None else channel_hidden)

    def forward(self, x: Tensor, score: Tensor, num_foreground: int) -> Tensor:
        """x (B, N, d), score (B, N) -> (B, N, d)."""
        batch, num_tokens, dim = x.shape
        scale = 1.0 / math.sqrt(self.head_dim)
        # a: a stable sort, so that among equal scores the lower raster index comes first
        order = torch.sort(score.detach(), dim=1, descending=True, stable=True).indices
        index = order.unsqueeze(2).expand(batch, num_tokens, dim)
        ordered = torch.gather(x, 1, index)
        x_bg = ordered[:, num_foreground:]
        # b, c: all N + 1 rows are projected; keys have no bias
        rows = torch.cat([self.token.expand(batch, 1, dim), ordered], dim=1)
        q, k, v = self.qkv(rows).split(dim, dim=2)
        q, k, v = self.split(q + self.q_bias), self.split(k), self.split(v + self.v_bias)
        num_rows = num_foreground + 1
        q_fg, k_fg, v_fg = q[:, :, :num_rows], k[:, :, :num_rows], v[:, :, :num_rows]
        k_bg, v_bg = k[:, :, num_rows:], v[:, :, num_rows:]
        # d, e: logits (B, h, F, F) -> (B, e*h, F, F) -> (B, h, F, F)
        logits = torch.matmul(q_fg, k_fg.transpose(2, 3)) * scale
        weights = torch.softmax(torch.einsum("gh,bhij->bgij", self.head_up, logits), dim=3)
        weights = torch.einsum("hg,bgij->bhij", self.head_down, weights)
        # f
        out = merge_heads(torch.matmul(weights, v_fg))
        if not self.project_all:
            out = self.proj(out)
        abstract, out_ordered = out[:, :1], out[:, 1:]
        # g, h, i: without background there is nothing to attend to
        if num_foreground < num_tokens:
            weights_bg = torch.softmax(torch.matmul(self.split(abstract), k_bg.transpose(2, 3)) * scale, dim=3)
            update = self.channel_mlp(merge_heads(torch.matmul(weights_bg, v_bg)))
            out_bg = x_bg + update if self.bg_identity else update.expand_as(x_bg)
            out_ordered = torch.cat([out_ordered, out_bg], dim=1)
        if self.project_all:
            out_ordered = self.proj(out_ordered)
        # j
        return torch.zeros_like(x).scatter(1, index, out_ordered)


class Block(nn.Module):
    """`count` gives the number of foreground tokens for that of all."""

    def __init__(self, dim, attn: nn.Module, count: Callable[[int], int], peg_kernel, mlp_dw, normed_score: bool):
        super().__init__()
        self.count, self.normed_score = count, normed_score
        self.peg = conv(dim, dim, peg_kernel, groups=dim)
        self.norm1, self.attn = MapNorm(dim), attn
        self.norm2, self.mlp = MapNorm(dim), MLP(dim, 4 * dim, mlp_dw)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.peg(x)
        score = (self.norm1(x) if self.normed_score else x).flatten(2).mean(1)
        attended = self.attn(self.norm1(x).flatten(2).mT, score, self.count(score.shape[1]))
        x = x + attended.transpose(1, 2).view(x.shape)
        return x + self.mlp(self.norm2(x))


class PartialFormer(Model):
    """`foreground` holds one count per stage, stated for the grids of a 224x224 image."""

    def __init__(
        self,
        dim: int,
        depths: Sequence[int],
        heads: Sequence[int],
        foreground: Sequence[int | Fraction] = (39, 16, 16, 17),
        channel_hidden: int | Sequence[int] | None = None,
        peg_kernel: int = 7,
        mlp_dw: bool = False,
        stem: str = "conv",
        pool_first: bool = False,
        feature_norms: bool = False,
        num_classes: int = 1000,
        in_chans: int = 3,
        foreground_fixed: bool = False,
        foreground_uncapped: bool = False,
        foreground_cap: int | None = None,
        reading: str = "fitted",
        **switches: Any,
    ):
        dims = [dim * 2**i for i in range(4)]
        hidden = channel_hidden if isinstance(channel_hidden, Sequence) else [channel_hidden] * 4
        limits = dict(fixed=foreground_fixed, uncapped=foreground_uncapped, cap=foreground_cap)
        stages = []
        for i, width in enumerate(dims):
            count = partial(foreground_count, n=foreground[i], reference=REFERENCE_TOKENS[i], **limits)
            attend = partial(PartialAttention, width, heads[i], channel_hidden=hidden[i], **switches)
            last = count, peg_kernel, mlp_dw, reading == "equations"
            blocks = [Block(width, attend(), *last) for _ in range(depths[i])]
            stages.append(Stage(Downsample(dims[i - 1], width, MapNorm) if i else None, blocks))
        half = dim // 2
        first = conv(in_chans, half, stride=2, bias=False), nn.BatchNorm2d(half)
        second = conv(half, half, bias=False), nn.BatchNorm2d(half)
        last = conv(half, dim, stride=2), MapNorm(dim)
        patches = conv(in_chans, dim, 7, stride=4), MapNorm(dim)
        layers = {"conv": (first, second, last), "conv2": (first, last), "patch7": (patches,)}[stem]
        head = Head(dims[3], 1280, num_classes, bias=False, pool_first=pool_first)
        super().__init__(Stem(*layers), stages, head, MapNorm(dims[3]))
        self.feature_norms = nn.ModuleList(MapNorm(d) for d in dims) if feature_norms else None

    def features(self, x: Tensor) -> list[Tensor]:
        """Normalised if the model has feature norms."""
        norms = self.feature_norms or [nn.Identity()] * 4
        return [norm(y) for norm, y in zip(norms, self.outputs(x), strict=True)]
