"""MAT written the long way: windows are visited one at a time and nothing is ever padded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

WINDOW = 7


def to_nhwc(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H, W, C)."""
    return x.permute(0, 2, 3, 1)


def to_nchw(x: Tensor) -> Tensor:
    """(B, H, W, C) -> (B, C, H, W)."""
    return x.permute(0, 3, 1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with q (B, h, T, d), k and v (B, h, S, d) -> (B, h, T, d)."""
    logits = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[3])
    return torch.matmul(torch.softmax(logits, dim=3), v)


def bilinear_sample(x: Tensor, px: Tensor, py: Tensor) -> Tensor:
    """Read x (B, C, H, W) at pixel positions px, py (B, Ho, Wo), clamped to the border -> (B, C, Ho, Wo)."""
    batch, channels, height, width = x.shape
    px, py = px.clamp(0, width - 1), py.clamp(0, height - 1)
    left, top = px.detach().floor(), py.detach().floor()
    wx, wy = (px - left).unsqueeze(1), (py - top).unsqueeze(1)
    x0, y0 = left.long(), top.long()
    # On the last column or row the far neighbour has weight zero; it only has to be a legal index.
    x1, y1 = (x0 + 1).clamp(max=width - 1), (y0 + 1).clamp(max=height - 1)

    def pick(iy: Tensor, ix: Tensor) -> Tensor:
        index = (iy * width + ix).flatten(1).unsqueeze(1).expand(batch, channels, -1)
        return x.flatten(2).gather(2, index).unflatten(2, px.shape[1:])

    upper = pick(y0, x0) * (1 - wx) + pick(y0, x1) * wx
    lower = pick(y1, x0) * (1 - wx) + pick(y1, x1) * wx
    return upper * (1 - wy) + lower * wy


class Stem(nn.Module):
    """(B, c, H, W) -> (B, C, ceil(H/4), ceil(W/4))."""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.conv1 = nn.Conv2d(in_chans, half, 3, stride=2, padding=1)
        self.norm1 = nn.BatchNorm2d(half)
        self.conv2 = nn.Conv2d(half, half, 3, padding=1, groups=half)
        self.norm2 = nn.BatchNorm2d(half)
        self.conv3 = nn.Conv2d(half, dim, 3, stride=2, padding=1)
        self.norm3 = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.norm1(self.conv1(x)))
        x = nn.functional.gelu(self.norm2(self.conv2(x)))
        return self.norm3(self.conv3(x))


class BilinearEmbed(nn.Module):
    """(B, C, H, W) -> (B, 2C, ceil(H/2), ceil(W/2)): bilinear reads at learned positions, then a separable conv."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.offset_dw = nn.Conv2d(dim, dim, 3, stride=2, padding=1, groups=dim)
        self.offset_proj = nn.Linear(dim, 2, bias=False)
        self.dw = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        self.proj = nn.Linear(dim, 2 * dim)
        self.norm = nn.BatchNorm2d(2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        offsets = self.offset_proj(to_nhwc(self.offset_dw(x)))
        rows = torch.arange(offsets.shape[1], device=x.device, dtype=x.dtype)
        cols = torch.arange(offsets.shape[2], device=x.device, dtype=x.dtype)
        px = 2 * cols.view(1, 1, -1) + 0.5 + offsets[..., 0]
        py = 2 * rows.view(1, -1, 1) + 0.5 + offsets[..., 1]
        sampled = bilinear_sample(x, px, py)
        return self.norm(to_nchw(self.proj(to_nhwc(self.dw(sampled)))))


class ConvEmbed(nn.Module):
    """(B, C, H, W) -> (B, 2C, ceil(H/2), ceil(W/2)) with a dense 3x3."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, 2 * dim, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class MergeEmbed(nn.Module):
    """(B, C, H, W) -> (B, 2C, ceil(H/2), ceil(W/2)) from concatenated 2x2 patches."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, eps=1e-6)
        self.proj = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
        patches = torch.cat([x[:, :, dy::2, dx::2] for dy in (0, 1) for dx in (0, 1)], dim=1)
        return to_nchw(self.proj(self.norm(to_nhwc(patches))))


class MLP(nn.Module):
    """(B, H, W, C) -> (B, H, W, C), with a depthwise 3x3 on the hidden map unless `dw` is off."""

    def __init__(self, dim: int, dw: bool) -> None:
        super().__init__()
        hidden = 4 * dim
        self.fc1 = nn.Linear(dim, hidden)
        self.dw = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden) if dw else None
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.dw is not None:
            x = to_nhwc(self.dw(to_nchw(x)))
        return self.fc2(nn.functional.gelu(x))


class WindowAttention(nn.Module):
    """(B, H, W, C) -> (B, H, W, C), attention inside 7x7 windows; a window at the border just has fewer tokens."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"{heads} heads do not divide width {dim}")
        self.heads = heads
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, ..., C) -> (B, h, T, d), all positions in raster order."""
        return x.flatten(1, -2).unflatten(2, (self.heads, self.head_dim)).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        """(B, h, T, d) -> (B, T, C)."""
        return x.transpose(1, 2).flatten(2)

    def windows(self, height: int, width: int) -> list[tuple[slice, slice]]:
        """Row and column ranges of the windows in raster order."""
        return [
            (slice(top, min(top + WINDOW, height)), slice(left, min(left + WINDOW, width)))
            for top in range(0, height, WINDOW)
            for left in range(0, width, WINDOW)
        ]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=3)
        out = torch.zeros_like(x)
        for rows, cols in self.windows(x.shape[1], x.shape[2]):
            wq, wk, wv = (self.split_heads(t[:, rows, cols]) for t in (q, k, v))
            local = self.merge_heads(attention(wq, wk, wv))
            out[:, rows, cols] = local.unflatten(1, (rows.stop - rows.start, cols.stop - cols.start))
        return self.proj(out)


class MATAttention(WindowAttention):
    """(B, H, W, C) -> (B, H, W, C): window attention, one summary per window, mixing of summaries, fusion."""

    def __init__(self, dim: int, heads: int, token_is_key: bool = False, token_projected: bool = False) -> None:
        super().__init__(dim, heads)
        self.token_is_key = token_is_key
        self.token_projected = token_projected
        self.token = nn.Parameter(torch.randn(heads, 1, self.head_dim) * 0.02)
        self.mix_qkv = nn.Linear(dim, 3 * dim)
        self.mix_proj = nn.Linear(dim, dim)
        self.fuse_kv = nn.Linear(dim, 2 * dim)

    def token_qkv(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of one window's token, each (B, h, 1, d)."""
        if not self.token_projected:
            token = self.token.expand(batch, -1, -1, -1)
            return token, token, token
        flat = self.token.reshape(1, 1, -1).expand(batch, -1, -1)
        q, k, v = self.qkv(flat).chunk(3, dim=2)
        return self.split_heads(q), self.split_heads(k), self.split_heads(v)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=3)
        local = torch.zeros_like(x)
        summaries = []
        for rows, cols in self.windows(height, width):
            wq, wk, wv = (self.split_heads(t[:, rows, cols]) for t in (q, k, v))
            tq, tk, tv = self.token_qkv(batch)
            wq = torch.cat([wq, tq], dim=2)
            if self.token_is_key:
                wk, wv = torch.cat([wk, tk], dim=2), torch.cat([wv, tv], dim=2)
            out = self.merge_heads(attention(wq, wk, wv))
            local[:, rows, cols] = out[:, :-1].unflatten(1, (rows.stop - rows.start, cols.stop - cols.start))
            summaries.append(out[:, -1:])

        summary = torch.cat(summaries, dim=1)
        mq, mk, mv = (self.split_heads(t) for t in self.mix_qkv(summary).chunk(3, dim=2))
        mixed = self.mix_proj(self.merge_heads(attention(mq, mk, mv)))

        fk, fv = (self.split_heads(t) for t in self.fuse_kv(mixed).chunk(2, dim=2))
        fused = self.merge_heads(attention(self.split_heads(q), fk, fv)).unflatten(1, (height, width))
        return self.proj(local + fused)


class Block(nn.Module):
    """(B, H, W, C) -> (B, H, W, C); without an attention module only the MLP half exists."""

    def __init__(self, dim: int, attn: nn.Module | None, mlp_dw: bool) -> None:
        super().__init__()
        self.cpe = nn.Conv2d(dim, dim, 3, padding=1, groups=dim) if attn is not None else None
        self.norm1 = nn.LayerNorm(dim, eps=1e-6) if attn is not None else None
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, mlp_dw)

    def forward(self, x: Tensor) -> Tensor:
        if self.attn is not None:
            x = x + to_nhwc(self.cpe(to_nchw(x)))
            x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stage(nn.Module):
    """(B, C_in, H, W) -> (B, C, H', W')."""

    def __init__(self, downsample: nn.Module | None, blocks: Sequence[Block], norm: nn.Module | None) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        if self.downsample is not None:
            x = self.downsample(x)
        x = to_nhwc(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None:
            x = self.norm(x)
        return to_nchw(x)


class Head(nn.Module):
    """(B, C, H, W) -> (B, num_classes); the hidden layer acts on every position."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, 1280)
        self.norm = nn.BatchNorm2d(1280)
        self.fc = nn.Linear(1280, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.norm(to_nchw(self.proj(to_nhwc(x)))))
        return self.fc(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class MAT(nn.Module):
    """Image (B, in_chans, H, W) -> logits (B, num_classes).

    `mixer_stages` counts stages from 1. `num_classes=0` leaves out the classifier: only `features` is usable then.
    """

    def __init__(
        self,
        dim: int,
        depths: Sequence[int],
        heads: Sequence[int],
        mixer_stages: Sequence[int] = (3, 4),
        mixer: str = "mat",
        embed: str = "bilinear",
        mlp_dw: bool = True,
        token_is_key: bool = False,
        token_projected: bool = False,
        num_classes: int = 1000,
        in_chans: int = 3,
    ) -> None:
        super().__init__()
        if mixer not in ("mat", "window", "none"):
            raise ValueError(f"unknown mixer {mixer!r}")
        embed_class = {"bilinear": BilinearEmbed, "conv": ConvEmbed, "merge": MergeEmbed}[embed]

        def make_attn(stage: int) -> nn.Module | None:
            if mixer == "none" or stage + 1 not in mixer_stages:
                return None
            if mixer == "window":
                return WindowAttention(dims[stage], heads[stage])
            return MATAttention(dims[stage], heads[stage], token_is_key, token_projected)

        dims = [dim * 2**i for i in range(4)]
        self.stem = Stem(in_chans, dim)
        self.stages = nn.ModuleList()
        for i in range(4):
            blocks = [Block(dims[i], make_attn(i), mlp_dw) for _ in range(depths[i])]
            # Patch merging has a norm of its own in front; it takes the place of the norm of the stage before it.
            norm = None if embed == "merge" and i < 3 else nn.LayerNorm(dims[i], eps=1e-6)
            self.stages.append(Stage(embed_class(dims[i - 1]) if i > 0 else None, blocks, norm))
        self.head = Head(dims[3], num_classes) if num_classes else None

    def features(self, x: Tensor) -> list[Tensor]:
        """Four maps (B, C_i, H_i, W_i) after the stage norms (raw where patch merging replaces the norm)."""
        outputs = []
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
            outputs.append(x)
        return outputs

    def forward(self, x: Tensor) -> Tensor:
        if self.head is None:
            raise RuntimeError("built without a classifier (num_classes=0)")
        return self.head(self.features(x)[-1])
