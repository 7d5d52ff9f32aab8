"""Multi-token attention pooling as its authors formulate it: one branch of modules per group and a loop over them.

The yardstick of the benchmarks and the slow reference of the tests. Written from the paper's equations and the released
key names, so that released weights load by name; plain PyTorch modules, nothing fused and nothing slowed down.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GroupLogits(NamedTuple):
    """Logits of every group: of its tokens, of its averaged token (B, G, C), and of each token alone (B, G, T, C)."""

    tokens: Tensor | None
    average: Tensor | None
    per_token: Tensor | None


class PerGroupPool(nn.Module):
    """A pyramid of feature maps (B, C_i, H_i, W_i), lowest level first -> logits (B, classes).

    Args:
        channels: Channels of each map of the pyramid.
        num_classes: Classes.
        level: Index of the map whose grid the others are brought to; zero or less takes the last map alone.
        dim: Width of the merged map and of the tokens.
        groups, tokens: Branches, and class tokens in each.
        mean_token: Whether the mean of a group's tokens attends and is classified too.
        gram: Whether tokens come from the map's Gram matrix; otherwise they are free parameters.
        gram_dim, gram_groups: Width of the Gram matrix (None is dim), and channel groups of its embedding.
        attn_dim, heads: Inner width of the attention (None is dim), and heads that share it.
        mlp_ratio, mlp_groups: Hidden width of the MLP in units of dim, and its channel groups.
        head_mixing: Whether linear maps over the heads follow the scores and the softmax.
        classifier: "norm" normalises the tokens before the linear map, "linear" does not.
        drop: Rate of the attention, projection and MLP dropouts.
        fc_drop: Rate of the dropout before the token classifier.
        light: Classify the averaged token only; the token classifiers are not built.
    """

    def __init__(
        self,
        channels: Sequence[int],
        num_classes: int,
        *,
        level: int,
        dim: int,
        groups: int,
        tokens: int,
        mean_token: bool = True,
        gram: bool = True,
        gram_dim: int | None = None,
        gram_groups: int = 32,
        attn_dim: int | None = None,
        heads: int = 12,
        mlp_ratio: int = 4,
        mlp_groups: int = 2,
        head_mixing: bool = False,
        classifier: str = "norm",
        drop: float = 0.05,
        fc_drop: float = 0.0,
        light: bool = False,
    ):
        super().__init__()
        self.tokens, self.light = tokens, light
        branches = []
        for _ in range(groups):
            source = GramTokens(dim, tokens, gram_dim or dim, gram_groups) if gram else None
            block = Block(dim, attn_dim or dim, heads, mlp_ratio, mlp_groups, head_mixing, drop)
            branches.append(Branch(dim, tokens, mean_token, source, block))
        self.mmcap = Branches(channels, level, dim, branches)
        if not light:
            build = {"norm": NormClassifier, "linear": LinearClassifier}[classifier]
            self.heads = nn.ModuleList(build(tokens * dim, num_classes, fc_drop) for _ in range(groups))
        if mean_token:
            self.self_dt_heads = nn.ModuleList(NormClassifier(dim, num_classes, 0.0) for _ in range(groups))

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        attended = self.mmcap(features)
        if self.light:
            logits = [head(z[:, self.tokens]) for head, z in zip(self.self_dt_heads, attended, strict=True)]
        else:
            logits = [head(self._joined(z)) for head, z in zip(self.heads, attended, strict=True)]
        return torch.stack(logits).mean(0)

    def forward_groups(self, features: Sequence[Tensor], per_token: bool = False) -> GroupLogits:
        attended = self.mmcap(features)
        tokens = average = single = None
        if not self.light:
            tokens = torch.stack([head(self._joined(z)) for head, z in zip(self.heads, attended, strict=True)], 1)
            if per_token:
                pairs = zip(self.heads, attended, strict=True)
                single = torch.stack([head.per_token(self._joined(z), self.tokens) for head, z in pairs], 1)
        if hasattr(self, "self_dt_heads"):
            pairs = zip(self.self_dt_heads, attended, strict=True)
            average = torch.stack([head(z[:, self.tokens]) for head, z in pairs], 1)
        return GroupLogits(tokens, average, single)

    def merge(self, features: Sequence[Tensor]) -> Tensor:
        """The pyramid as one map (B, D, h, w)."""
        return self.mmcap.merge(features)

    def initial_tokens(self, x: Tensor) -> Tensor:
        """Tokens before the attention (B, G, T, D), of a merged map."""
        return torch.stack([branch.initial_tokens(x) for branch in self.mmcap.mmcap], 1)

    def attended_tokens(self, x: Tensor) -> Tensor:
        """Tokens after the attention, the averaged one last (B, G, Q, D), of a merged map."""
        return torch.stack([branch(x) for branch in self.mmcap.mmcap], 1)

    def _joined(self, z: Tensor) -> Tensor:
        return z[:, : self.tokens].flatten(1)  # B T*D


class NormClassifier(nn.Module):
    def __init__(self, dim: int, num_classes: int, drop: float):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(x)))

    def per_token(self, x: Tensor, tokens: int) -> Tensor:
        return logits_per_token(self.head, self.drop(self.norm(x)), tokens)


class LinearClassifier(nn.Linear):
    """A child of Linear, because the released weights lie directly under the group's number."""

    def __init__(self, dim: int, num_classes: int, drop: float):
        super().__init__(dim, num_classes)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))

    def per_token(self, x: Tensor, tokens: int) -> Tensor:
        return logits_per_token(self, self.drop(x), tokens)


def logits_per_token(head: nn.Linear, x: Tensor, tokens: int) -> Tensor:
    """Each token's share of the logits without the bias, which belongs to none of them (B, T, C)."""
    return torch.einsum("btd,ctd->btc", x.unflatten(1, (tokens, -1)), head.weight.unflatten(1, (tokens, -1)))


class Branches(nn.Module):
    def __init__(self, channels: Sequence[int], level: int, dim: int, branches: list["Branch"]):
        super().__init__()
        self.level = level
        if level > 0:
            self.multi_scale = MultiScale(channels, level, dim)
        elif channels[-1] != dim:
            conv = nn.Conv2d(channels[-1], dim, 1, bias=False)
            # ReLU where the merge has GELU: so were the released weights trained.
            self.channel_convertor = nn.Sequential(conv, nn.BatchNorm2d(dim), nn.ReLU())
        else:
            self.channel_convertor = nn.Identity()
        self.mmcap = nn.ModuleList(branches)

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        x = self.merge(features)
        return [branch(x) for branch in self.mmcap]

    def merge(self, features: Sequence[Tensor]) -> Tensor:
        return self.multi_scale(features) if self.level > 0 else self.channel_convertor(features[-1])


class MultiScale(nn.Module):
    def __init__(self, channels: Sequence[int], level: int, dim: int):
        super().__init__()
        self.level = level
        conv = nn.Conv2d(sum(channels), dim, 1, bias=False)
        self.concat_conv = nn.Sequential(conv, nn.BatchNorm2d(dim), nn.GELU())

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        size = features[self.level].shape[-2:]
        return self.concat_conv(torch.cat([resize(x, size) for x in features], 1))


def resize(x: Tensor, size: Sequence[int]) -> Tensor:
    """Bilinear down and average pooling up: the reverse of the usual, but what the released weights were trained on."""
    if x.shape[-2] > size[0]:
        return F.interpolate(x, size, mode="bilinear", align_corners=False)
    if x.shape[-2] < size[0]:
        return F.adaptive_avg_pool2d(x, size)
    return x


class Branch(nn.Module):
    """One group: its tokens look at the merged map once. (B, D, h, w) -> (B, Q, D), the averaged token last."""

    def __init__(self, dim: int, tokens: int, mean_token: bool, source: "GramTokens | None", block: "Block"):
        super().__init__()
        self.mean_token = mean_token
        if source is None:
            self.gram_token_extraction = None
            self.x_cls = nn.Parameter(torch.zeros(1, tokens, dim))
        else:
            self.gram_token_extraction = source
        self.attention = nn.Sequential(block)

    def initial_tokens(self, x: Tensor) -> Tensor:
        if self.gram_token_extraction is None:
            return self.x_cls.expand(x.shape[0], -1, -1)
        return self.gram_token_extraction(x)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.initial_tokens(x)
        if self.mean_token:
            tokens = torch.cat([tokens, tokens.mean(1, keepdim=True)], 1)
        image = x.flatten(2).transpose(1, 2)  # B n D
        for block in self.attention:
            tokens = block(tokens, image)
        return tokens


class GramTokens(nn.Module):
    """Tokens from the upper triangle of the Gram matrix of a reduced map. (B, D, h, w) -> (B, T, D)."""

    def __init__(self, dim: int, tokens: int, gram_dim: int, gram_groups: int):
        super().__init__()
        self.tokens = tokens
        self.ch_reduction = nn.Sequential(nn.Conv2d(dim, gram_dim, 1, bias=False), nn.BatchNorm2d(gram_dim))
        row, column = torch.triu_indices(gram_dim, gram_dim)
        self.register_buffer("bp_index", row * gram_dim + column)
        embed = nn.Conv2d(len(row), dim * tokens, 1, groups=gram_groups, bias=False)
        self.bp_reduction = nn.Sequential(embed, nn.BatchNorm2d(dim * tokens))

    def forward(self, x: Tensor) -> Tensor:
        reduced = self.ch_reduction(x).flatten(2)  # B P n
        with torch.autocast(x.device.type, enabled=False):  # half precision would lose the small products
            reduced = (reduced if reduced.dtype == torch.float64 else reduced.float()) / reduced.shape[-1]
            gram = (reduced @ reduced.transpose(1, 2)).flatten(1)  # B P*P
            triangle = F.normalize(gram[:, self.bp_index])  # B U
        triangle = triangle.to(self.bp_reduction[0].weight.dtype)
        by_token = triangle.unflatten(1, (-1, self.tokens)).transpose(1, 2).flatten(1)  # B U, token by token
        embedded = self.bp_reduction(by_token[:, :, None, None]).flatten(1)  # B D*T
        return embedded.unflatten(1, (-1, self.tokens)).transpose(1, 2)


class Block(nn.Module):
    def __init__(
        self, dim: int, attn_dim: int, heads: int, mlp_ratio: int, mlp_groups: int, head_mixing: bool, drop: float
    ):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = ClassAttention(dim, attn_dim, heads, head_mixing, drop)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = GroupedMlp(dim, int(mlp_ratio * dim), mlp_groups, drop)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        everything = self.norm1(torch.cat([tokens, image], 1))
        tokens = tokens + self.attn(everything, tokens.shape[1])
        return tokens + self.mlp(self.norm2(tokens))


class ClassAttention(nn.Module):
    """The first rows ask, all rows answer. (B, Q + n, D) -> (B, Q, D)."""

    def __init__(self, dim: int, attn_dim: int, heads: int, head_mixing: bool, drop: float):
        super().__init__()
        self.heads, self.head_mixing, self.scale = heads, head_mixing, (attn_dim // heads) ** -0.5
        self.q = nn.Linear(dim, attn_dim)
        self.k = nn.Linear(dim, attn_dim)
        self.v = nn.Linear(dim, attn_dim)
        self.proj = nn.Linear(attn_dim, dim)
        if head_mixing:
            self.w1 = nn.Linear(heads, heads)
            self.w2 = nn.Linear(heads, heads)
        self.attn_drop = nn.Dropout(drop)
        self.proj_drop = nn.Dropout(drop)

    def forward(self, x: Tensor, queries: int) -> Tensor:
        q = self._heads(self.q(x[:, :queries])) * self.scale  # B H Q d
        k, v = self._heads(self.k(x)), self._heads(self.v(x))  # B H Q+n d
        attn = q @ k.transpose(-2, -1)
        if self.head_mixing:
            attn = attn + mix(self.w1, attn)
        attn = attn.softmax(-1)
        if self.head_mixing:
            attn = attn + mix(self.w2, attn)
        out = (self.attn_drop(attn) @ v).transpose(1, 2).flatten(2)  # B Q A
        return self.proj_drop(self.proj(out))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


def mix(linear: nn.Linear, attn: Tensor) -> Tensor:
    """Applies a linear map over the heads of (B, H, Q, N)."""
    return linear(attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GroupedMlp(nn.Module):
    """(B, Q, D) -> (B, Q, D); the hidden channels change groups on the way."""

    def __init__(self, dim: int, hidden: int, groups: int, drop: float):
        super().__init__()
        self.groups = groups
        self.fc1 = nn.Conv2d(dim, hidden, 1, groups=groups)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(drop)
        self.fc2 = nn.Conv2d(hidden, dim, 1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2).unsqueeze(-1)  # B D Q 1
        x = self.drop(self.act(self.fc1(x)))
        if self.groups > 1:
            x = x.unflatten(1, (-1, self.groups)).transpose(1, 2).flatten(1, 2)
        return self.fc2(x).squeeze(-1).transpose(1, 2)
