"""PartialFormer written the long way: sort all tokens, project every row, scatter the rows back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

# Number of tokens of the four stages of a 224x224 image; foreground counts are stated for these grids.
REFERENCE_TOKENS = (3136, 784, 196, 49)


def foreground_count(
    num_tokens: int,
    n: int | Fraction,
    reference: int,
    fixed: bool = False,
    uncapped: bool = False,
    cap: int | None = None,
) -> int:
    """Number of foreground tokens among `num_tokens`.

    `n` tokens out of `reference` scale with the grid (`n` may be a Fraction, the arithmetic is exact); `fixed` takes
    `n` as it is at every size. `uncapped` lets the foreground be everything, otherwise one background token is kept.
    """
    count = math.floor(Fraction(n) if fixed else Fraction(n) * num_tokens / reference)
    if cap is not None:
        count = min(count, cap)
    largest = num_tokens if uncapped or num_tokens == 1 else num_tokens - 1
    return max(1, min(count, largest))


def to_tokens(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H*W, C), raster order."""
    return x.flatten(2).transpose(1, 2)


def to_map(x: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, H*W, C) -> (B, C, H, W)."""
    return x.transpose(1, 2).unflatten(2, size)


class ChannelMLP(nn.Module):
    """(B, 1, d) -> (B, 1, d) through a narrow hidden layer."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-6)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.norm(self.fc1(x))))


class PartialAttention(nn.Module):
    """Head-mixed attention among the foreground and one abstract query over the background.

    `project_all` moves the output projection to the end, where it acts on all N image tokens; the abstract token, which
    is dropped there, then queries the background unprojected.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_expansion: int = 4,
        channel_hidden: int | None = None,
        bg_identity: bool = True,
        project_all: bool = False,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"{heads} heads do not divide width {dim}")
        self.heads = heads
        self.head_dim = dim // heads
        self.bg_identity = bg_identity
        self.project_all = project_all
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.proj = nn.Linear(dim, dim)
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        # Copy every head e times, then average the copies: head mixing starts next to ordinary attention.
        copies = torch.eye(heads).repeat(head_expansion, 1)
        self.head_up = nn.Parameter(copies + 0.02 * torch.randn_like(copies))
        self.head_down = nn.Parameter(copies.t() / head_expansion + 0.02 * torch.randn_like(copies.t()))
        self.channel_mlp = ChannelMLP(dim, max(4, dim // 32) if channel_hidden is None else channel_hidden)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, h, T, d_h)."""
        return x.unflatten(2, (self.heads, self.head_dim)).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        """(B, h, T, d_h) -> (B, T, d)."""
        return x.transpose(1, 2).flatten(2)

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
        q, k, v = self.split_heads(q + self.q_bias), self.split_heads(k), self.split_heads(v + self.v_bias)
        num_rows = num_foreground + 1
        q_fg, k_fg, v_fg = q[:, :, :num_rows], k[:, :, :num_rows], v[:, :, :num_rows]
        k_bg, v_bg = k[:, :, num_rows:], v[:, :, num_rows:]

        # d, e: logits (B, h, F, F) -> (B, e*h, F, F) -> (B, h, F, F)
        logits = torch.matmul(q_fg, k_fg.transpose(2, 3)) * scale
        weights = torch.softmax(torch.einsum("gh,bhij->bgij", self.head_up, logits), dim=3)
        weights = torch.einsum("hg,bgij->bhij", self.head_down, weights)

        # f
        out = self.merge_heads(torch.matmul(weights, v_fg))
        if not self.project_all:
            out = self.proj(out)
        abstract, out_fg = out[:, :1], out[:, 1:]

        # g, h, i: without background there is nothing to attend to
        if num_foreground == num_tokens:
            out_ordered = out_fg
        else:
            query = self.split_heads(abstract)
            weights_bg = torch.softmax(torch.matmul(query, k_bg.transpose(2, 3)) * scale, dim=3)
            update = self.channel_mlp(self.merge_heads(torch.matmul(weights_bg, v_bg)))
            out_bg = x_bg + update if self.bg_identity else update.expand_as(x_bg)
            out_ordered = torch.cat([out_fg, out_bg], dim=1)
        if self.project_all:
            out_ordered = self.proj(out_ordered)

        # j
        return torch.zeros_like(x).scatter(1, index, out_ordered)


class MLP(nn.Module):
    """(B, N, d) -> (B, N, d), optionally with a depthwise 3x3 on the hidden map."""

    def __init__(self, dim: int, dw: bool) -> None:
        super().__init__()
        hidden = 4 * dim
        self.fc1 = nn.Linear(dim, hidden)
        self.dw = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden) if dw else None
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        x = self.fc1(x)
        if self.dw is not None:
            x = to_tokens(self.dw(to_map(x, size)))
        return self.fc2(nn.functional.gelu(x))


class Block(nn.Module):
    """(B, N, d) -> (B, N, d)."""

    def __init__(
        self,
        dim: int,
        heads: int,
        head_expansion: int,
        channel_hidden: int | None,
        peg_kernel: int,
        bg_identity: bool,
        mlp_dw: bool,
        project_all: bool,
    ) -> None:
        super().__init__()
        self.peg = nn.Conv2d(dim, dim, peg_kernel, padding=peg_kernel // 2, groups=dim)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = PartialAttention(dim, heads, head_expansion, channel_hidden, bg_identity, project_all)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, mlp_dw)

    def forward(self, x: Tensor, size: tuple[int, int], num_foreground: int) -> Tensor:
        x = x + to_tokens(self.peg(to_map(x, size)))
        # Taken before the norm, whose output has a channel mean of zero; half precision would tie all the time.
        score = (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).mean(dim=2)
        x = x + self.attn(self.norm1(x), score, num_foreground)
        return x + self.mlp(self.norm2(x), size)


class ConvStem(nn.Module):
    """(B, c, H, W) -> (B, C, ceil(H/4), ceil(W/4)) with three convolutions."""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.conv1 = nn.Conv2d(in_chans, half, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(half)
        self.conv2 = nn.Conv2d(half, half, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(half)
        self.conv3 = nn.Conv2d(half, dim, 3, stride=2, padding=1)
        self.norm3 = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.norm1(self.conv1(x)))
        x = nn.functional.gelu(self.norm2(self.conv2(x)))
        x = self.conv3(x)
        return to_map(self.norm3(to_tokens(x)), tuple(x.shape[2:]))


class TwoConvStem(nn.Module):
    """(B, c, H, W) -> (B, C, ceil(H/4), ceil(W/4)), the stem above without its middle convolution."""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, dim // 2, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(dim // 2)
        self.conv2 = nn.Conv2d(dim // 2, dim, 3, stride=2, padding=1)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(nn.functional.gelu(self.norm1(self.conv1(x))))
        return to_map(self.norm2(to_tokens(x)), tuple(x.shape[2:]))


class PatchStem(nn.Module):
    """(B, c, H, W) -> (B, C, ceil(H/4), ceil(W/4)) with one 7x7 convolution of stride 4."""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, dim, 7, stride=4, padding=3)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        return to_map(self.norm1(to_tokens(x)), tuple(x.shape[2:]))


class Downsample(nn.Module):
    """(B, C, H, W) -> (B, 2C, ceil(H/2), ceil(W/2))."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_dim, out_dim, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(out_dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return to_map(self.norm(to_tokens(x)), tuple(x.shape[2:]))


class Stage(nn.Module):
    """An optional down-sampling, then blocks that share one foreground count."""

    def __init__(self, downsample: nn.Module | None, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)


class Head(nn.Module):
    """(B, N, C) -> (B, num_classes); the hidden layer acts on every token, or on their mean with `pool_first`."""

    def __init__(self, dim: int, num_classes: int, pool_first: bool) -> None:
        super().__init__()
        self.pool_first = pool_first
        self.proj = nn.Linear(dim, 1280, bias=False)
        self.norm = nn.BatchNorm1d(1280)
        self.fc = nn.Linear(1280, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.pool_first:
            x = x.mean(dim=1, keepdim=True)
        x = self.norm(self.proj(x).transpose(1, 2))
        return self.fc(nn.functional.gelu(x).mean(dim=2))


class PartialFormer(nn.Module):
    """Image (B, in_chans, H, W) -> logits (B, num_classes).

    `foreground` holds one count per stage, stated for the grids of a 224x224 image. `channel_hidden` is one width for
    all stages or one per stage. `num_classes=0` leaves out the classifier and its norm: only `features` is usable then.
    """

    def __init__(
        self,
        dim: int,
        depths: Sequence[int],
        heads: Sequence[int],
        foreground: Sequence[int | Fraction] = (39, 16, 16, 17),
        head_expansion: int = 4,
        channel_hidden: int | Sequence[int] | None = None,
        peg_kernel: int = 7,
        bg_identity: bool = True,
        mlp_dw: bool = False,
        project_all: bool = False,
        stem: str = "conv",
        pool_first: bool = False,
        feature_norms: bool = False,
        num_classes: int = 1000,
        in_chans: int = 3,
        *,
        foreground_fixed: bool = False,
        foreground_uncapped: bool = False,
        foreground_cap: int | None = None,
    ) -> None:
        super().__init__()
        self.foreground = tuple(foreground)
        self.foreground_fixed = foreground_fixed
        self.foreground_uncapped = foreground_uncapped
        self.foreground_cap = foreground_cap
        dims = [dim * 2**i for i in range(4)]
        if channel_hidden is None or isinstance(channel_hidden, int):
            hidden = [channel_hidden] * 4
        else:
            hidden = list(channel_hidden)
        self.stem = {"conv": ConvStem, "conv2": TwoConvStem, "patch7": PatchStem}[stem](in_chans, dim)
        self.stages = nn.ModuleList()
        for i in range(4):
            blocks = [
                Block(dims[i], heads[i], head_expansion, hidden[i], peg_kernel, bg_identity, mlp_dw, project_all)
                for _ in range(depths[i])
            ]
            self.stages.append(Stage(Downsample(dims[i - 1], dims[i]) if i > 0 else None, blocks))
        if feature_norms:
            self.feature_norms = nn.ModuleList(nn.LayerNorm(d, eps=1e-6) for d in dims)
        else:
            self.feature_norms = None
        self.norm = nn.LayerNorm(dims[3], eps=1e-6) if num_classes else None
        self.head = Head(dims[3], num_classes, pool_first) if num_classes else None

    def num_foreground(self, stage: int, num_tokens: int) -> int:
        """Foreground tokens of stage `stage` (0..3) on a grid of `num_tokens`."""
        return foreground_count(
            num_tokens,
            self.foreground[stage],
            REFERENCE_TOKENS[stage],
            self.foreground_fixed,
            self.foreground_uncapped,
            self.foreground_cap,
        )

    def stage_outputs(self, x: Tensor) -> list[Tensor]:
        """Four raw maps (B, d_i, H_i, W_i)."""
        outputs = []
        x = self.stem(x)
        for i, stage in enumerate(self.stages):
            if stage.downsample is not None:
                x = stage.downsample(x)
            size = (x.shape[2], x.shape[3])
            tokens = to_tokens(x)
            for block in stage.blocks:
                tokens = block(tokens, size, self.num_foreground(i, tokens.shape[1]))
            x = to_map(tokens, size)
            outputs.append(x)
        return outputs

    def features(self, x: Tensor) -> list[Tensor]:
        """Four maps (B, d_i, H_i, W_i), normalised if the model has feature norms."""
        outputs = self.stage_outputs(x)
        if self.feature_norms is None:
            return outputs
        return [
            to_map(norm(to_tokens(y)), (y.shape[2], y.shape[3]))
            for norm, y in zip(self.feature_norms, outputs, strict=True)
        ]

    def forward(self, x: Tensor) -> Tensor:
        if self.head is None:
            raise RuntimeError("built without a classifier (num_classes=0)")
        return self.head(self.norm(to_tokens(self.stage_outputs(x)[-1])))
