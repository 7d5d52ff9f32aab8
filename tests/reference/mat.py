"""MAT written the long way: windows are visited one at a time and nothing is ever padded."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import MLP, Downsample, Head, MapNorm, Model, Stage, Stem, attention, conv, pointwise, split_heads

WINDOW = 7


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


class BilinearEmbed(nn.Module):
    """(B, C, H, W) -> (B, 2C, ceil(H/2), ceil(W/2)): bilinear reads at learned positions, then a separable conv."""

    def __init__(self, dim: int):
        super().__init__()
        self.offset_dw = conv(dim, dim, stride=2, groups=dim)
        self.offset_proj = nn.Linear(dim, 2, bias=False)
        self.dw = conv(dim, dim, groups=dim, bias=False)
        self.proj, self.norm = nn.Linear(dim, 2 * dim), nn.BatchNorm2d(2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        offsets = self.offset_proj(self.offset_dw(x).permute(0, 2, 3, 1))
        rows, cols = (torch.arange(n, dtype=x.dtype) for n in offsets.shape[1:3])
        px = 2 * cols.view(1, 1, -1) + 0.5 + offsets[..., 0]
        py = 2 * rows.view(1, -1, 1) + 0.5 + offsets[..., 1]
        return self.norm(pointwise(self.proj, self.dw(bilinear_sample(x, px, py))))


class MergeEmbed(nn.Module):
    """(B, C, H, W) -> (B, 2C, ceil(H/2), ceil(W/2)) from concatenated 2x2 patches."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.proj = MapNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
        patches = torch.cat([x[:, :, dy::2, dx::2] for dy in (0, 1) for dx in (0, 1)], dim=1)
        return pointwise(self.proj, self.norm(patches))


class WindowAttention(nn.Module):
    """(B, H, W, C) -> (B, H, W, C), attention inside 7x7 windows; a window at the border just has fewer tokens."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.split = partial(split_heads, heads=heads)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def windows(self, x: Tensor) -> list[tuple[slice, slice]]:
        """Row and column ranges of the windows in raster order."""
        rows, cols = ([slice(i, min(i + WINDOW, n)) for i in range(0, n, WINDOW)] for n in x.shape[1:3])
        return [(row, col) for row in rows for col in cols]

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for rows, cols in self.windows(x):
            q, k, v = (self.split(t) for t in self.qkv(x[:, rows, cols]).chunk(3, dim=3))
            out[:, rows, cols] = attention(q, k, v).view_as(x[:, rows, cols])
        return self.proj(out)


class MATAttention(WindowAttention):
    """(B, H, W, C) -> (B, H, W, C): window attention, one summary per window, mixing of summaries, fusion."""

    def __init__(self, dim: int, heads: int, token_is_key: bool = False, token_projected: bool = False):
        super().__init__(dim, heads)
        self.token_is_key, self.token_projected = token_is_key, token_projected
        self.token = nn.Parameter(torch.zeros(heads, 1, dim // heads))
        self.mix_qkv, self.mix_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fuse_kv = nn.Linear(dim, 2 * dim)

    def token_qkv(self, batch: int) -> list[Tensor]:
        """Query, key and value of one window's token, each (B, h, 1, d)."""
        if not self.token_projected:
            return [self.token.expand(batch, -1, -1, -1)] * 3
        flat = self.token.reshape(1, 1, -1).expand(batch, -1, -1)
        return [self.split(t) for t in self.qkv(flat).chunk(3, dim=2)]

    def forward(self, x: Tensor) -> Tensor:
        local, summaries = torch.zeros_like(x), []
        for rows, cols in self.windows(x):
            q, k, v = (self.split(t) for t in self.qkv(x[:, rows, cols]).chunk(3, dim=3))
            tq, tk, tv = self.token_qkv(len(x))
            if self.token_is_key:
                k, v = torch.cat([k, tk], dim=2), torch.cat([v, tv], dim=2)
            out = attention(torch.cat([q, tq], dim=2), k, v)
            local[:, rows, cols] = out[:, :-1].view_as(x[:, rows, cols])
            summaries.append(out[:, -1:])
        return self.fuse(x, local, summaries)

    def fuse(self, x: Tensor, local: Tensor, summaries: list[Tensor]) -> Tensor:
        """Mix the summaries, each (B, 1, C), and let every pixel attend to all of them."""
        q, k, v = (self.split(t) for t in self.mix_qkv(torch.cat(summaries, dim=1)).chunk(3, dim=2))
        mixed = self.mix_proj(attention(q, k, v))
        k, v = (self.split(t) for t in self.fuse_kv(mixed).chunk(2, dim=2))
        q = self.split(self.qkv(x).chunk(3, dim=3)[0])
        return self.proj(local + attention(q, k, v).view_as(x))


class MergedAttention(MATAttention):
    """The same with the token merged into each window before the projection, as Eq. 4.1 and 4.2 are printed."""

    def forward(self, x: Tensor) -> Tensor:
        local, summaries = torch.zeros_like(x), []
        for rows, cols in self.windows(x):
            pixels = x[:, rows, cols].flatten(1, 2)  # B P C
            merged = torch.cat([pixels, self.token.reshape(1, 1, -1).expand(len(x), -1, -1)], dim=1)
            out = attention(*(self.split(t) for t in self.qkv(merged).chunk(3, dim=2)))
            local[:, rows, cols] = out[:, :-1].view_as(x[:, rows, cols])
            summaries.append(out[:, -1:])
        return self.fuse(x, local, summaries)


class Block(nn.Module):
    """Without an attention module only the MLP half exists."""

    def __init__(self, dim: int, attn: nn.Module | None, mlp_dw: bool):
        super().__init__()
        self.attn = attn
        if attn is not None:
            self.cpe, self.norm1 = conv(dim, dim, groups=dim), MapNorm(dim)
        self.norm2, self.mlp = MapNorm(dim), MLP(dim, 4 * dim, mlp_dw)

    def forward(self, x: Tensor) -> Tensor:
        if self.attn is not None:
            x = x + self.cpe(x)
            x = x + pointwise(self.attn, self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MAT(Model):
    """`mixer_stages` counts stages from 1. Features are the maps after the stage norms; others: the tokens'."""

    def __init__(self, dim, depths, heads, mixer_stages=(3, 4), mixer="mat", embed="bilinear", num_classes=1000, **kw):
        dims, half = [dim * 2**i for i in range(4)], dim // 2
        mlp_dw, in_chans = kw.pop("mlp_dw", True), kw.pop("in_chans", 3)
        attend = {"mat": partial(MATAttention, **kw), "window": WindowAttention, "none": lambda *_: None}[mixer]
        shrink = {"bilinear": BilinearEmbed, "conv": lambda d: Downsample(d, 2 * d), "merge": MergeEmbed}[embed]
        stages = []
        for i, width in enumerate(dims):
            mixed = i + 1 in mixer_stages
            blocks = [Block(width, attend(width, heads[i]) if mixed else None, mlp_dw) for _ in range(depths[i])]
            # Patch merging has a norm of its own in front; it takes the place of the norm of the stage before it.
            norm = None if embed == "merge" and i < 3 else MapNorm(width)
            stages.append(Stage(shrink(dims[i - 1]) if i else None, blocks, norm))
        stem = Stem(
            (conv(in_chans, half, stride=2), nn.BatchNorm2d(half)),
            (conv(half, half, groups=half), nn.BatchNorm2d(half)),
            (conv(half, dim, stride=2), nn.BatchNorm2d(dim)),
        )
        super().__init__(stem, stages, Head(dims[3], 1280, num_classes))
