"""Multi-token attention pooling: groups of class tokens, each group a small classifier that sees the whole image."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from ...errors import check_choice
from ..checks import check_divides
from . import register_pool
from .class_attention import GroupClassAttention
from .gram_tokens import GramTokens, choose_gram_groups
from .group_linear import GroupLayerNorm, GroupLinear
from .merge_maps import MergeMaps, check_features, rows_of


class GroupLogits(NamedTuple):
    """Logits of every group, for losses and analysis. B images, G groups, T tokens in a group, C classes."""

    tokens: Tensor | None  # (B, G, C), what each group says; None from a light pool, which has no such classifiers
    average: Tensor | None = None  # (B, G, C), what each group's averaged token says, if there is one
    per_token: Tensor | None = None  # (B, G, T, C), the share of each token in `tokens`, without the bias; if asked for
    distill: Tensor | None = None  # (B, G, C), what each group's distillation tokens say, if there are some


def settings_of_map(groups, dim, heads, mlp_dim, level, attn_dim, tokens, light=False) -> dict[str, Any]:
    """Groups of several tokens, as `swap_pool` describes them."""
    sizes = dict(level=level, dim=dim, groups=groups, tokens=tokens, light=light)
    return sizes | dict(heads=heads or 12, attn_dim=attn_dim or dim // 2, mlp_ratio=mlp_dim / dim)


def settings_of_ga(groups, dim, heads, mlp_dim, level, attn_dim) -> dict[str, Any]:
    """Groups of one token each."""
    return settings_of_map(groups, dim, heads, mlp_dim, level, attn_dim, tokens=1) | dict(mean_token=False)


def class_attention_pool(width: int, heads: int | None = None) -> dict[str, Any]:
    """The plain class attention pooling (CAP) of the last map: one learned token, 64 channels a head."""
    heads = heads or max(n for n in range(1, max(1, width // 64) + 1) if width % n == 0)
    sizes = dict(level=-1, dim=width, groups=1, tokens=1, heads=heads, mlp_ratio=2, mlp_groups=1)
    return sizes | dict(mean_token=False, gram=False, classifier="linear")


@register_pool("cap", class_attention_pool)
@register_pool("ga", settings_of_ga)
@register_pool("map-light", partial(settings_of_map, light=True))
@register_pool("map", settings_of_map)
@register_notrace_module
class MultiTokenPool(nn.Module):
    """Pools feature maps into logits through groups of class tokens (MAP, WACV 2025). [(B, C_i, H_i, W_i)] -> (B, C).

    The maps are merged into one. Every group makes its tokens from the Gram matrix of that map, or has learned ones,
    adds their average as one more token, lets all of them attend to the map, and classifies the concatenated tokens.
    The average of the groups' logits is the result. `forward_groups` gives the parts that `MultiTokenLoss` trains.

    Args:
        channels, num_classes: Channels of each map, lowest level first; 0 classes: `forward` returns the normed tokens.
        level: Position of the map whose grid all maps are brought to. 0 or less: only the last map is pooled.
        dim: Width of the merged map and the tokens.
        groups, tokens: Groups, and class tokens in each.
        mean_token: Add the average of a group's tokens as one more token, with its own classifier.
        gram: Tokens from the Gram matrix; otherwise learned ones that start at zero.
        gram_dim: Channels that the Gram matrix is taken of; as `dim` if None.
        gram_groups: Channel groups of the map from Gram matrix to tokens; if None the largest possible up to 32.
        heads, attn_dim: Attention heads, and the width of all of them together; as `dim` if None.
        mlp_ratio, mlp_groups: Hidden width of the MLP over `dim`, and its channel groups.
        head_mixing: Mix the attention heads before and after the soft-max.
        classifier: "norm" for a LayerNorm before the linear classifier of the tokens, or "linear".
        drop, fc_drop: Dropout of attention, projection and MLP, and before the classifiers.
        light: Classify with the averaged token alone, for inference; `lighten` cuts down a full pool that was trained.
        resize: How maps are resized: "release", or "ga" for the sound opposite; see MergeMaps.
        layers, distill_tokens: Attention blocks; further tokens in each group that learn from a teacher.
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
        gram_groups: int | None = None,
        attn_dim: int | None = None,
        heads: int = 12,
        mlp_ratio: float = 4,
        mlp_groups: int = 2,
        head_mixing: bool = False,
        classifier: str = "norm",
        drop: float = 0.05,
        fc_drop: float = 0.0,
        light: bool = False,
        resize: str = "release",
        layers: int = 1,
        distill_tokens: int = 0,
    ):
        super().__init__()
        gram_dim, attn_dim = gram_dim or dim, attn_dim or dim
        made = tokens + distill_tokens
        for argument, value in dict(dim=dim, groups=groups, tokens=tokens, heads=heads, layers=layers).items():
            if value < 1:
                raise ValueError(f"{argument}={value}; expected 1 or more")
        if gram:
            gram_groups = choose_gram_groups(dim, made, gram_dim, gram_groups)
        check_divides("attn_dim", attn_dim, "heads", heads)
        check_divides("dim", dim, "mlp_groups", mlp_groups)
        check_divides("the MLP's hidden width", round(mlp_ratio * dim), "mlp_groups", mlp_groups)
        check_choice("classifier", classifier, ("norm", "linear"))
        if light and not mean_token:
            raise ValueError("light=True classifies with the averaged token, but mean_token=False; drop one of the two")
        self.channels, self.level, self.dim, self.groups, self.tokens = tuple(channels), level, dim, groups, tokens
        self.distill_tokens, self.mean_token, self.light = distill_tokens, mean_token, light
        self.num_classes, self.classifier_kind, self.fc_drop_rate = num_classes, classifier, fc_drop
        self.merge = MergeMaps(channels, dim, level, resize) if level > 0 or self.channels[-1] != dim else None
        self.gram = GramTokens(dim, groups, made, gram_dim, gram_groups) if gram and gram_groups else None
        if self.gram is None:
            self.learned = nn.Parameter(torch.zeros(groups, made, dim))
        sizes: dict[str, Any] = dict(mlp_ratio=mlp_ratio, mlp_groups=mlp_groups, head_mixing=head_mixing, drop=drop)
        self.blocks = nn.ModuleList(GroupClassAttention(dim, groups, heads, attn_dim, **sizes) for _ in range(layers))
        self.reset_classifier(num_classes)
        self.register_load_state_dict_pre_hook(drop_unused_classifiers)

    @property
    def num_features(self) -> int:
        """Numbers that describe an image before the classifiers: all tokens, or in a light pool the averaged ones."""
        return self.groups * self.dim * (1 if self.light else self.tokens + self.distill_tokens)

    def reset_classifier(self, num_classes: int) -> None:
        """New classifiers for num_classes; 0 leaves the norms alone."""
        self.num_classes, normed, one = num_classes, self.classifier_kind == "norm", next(self.parameters())

        def new(tokens: int, normed: bool) -> GroupClassifier:
            made = GroupClassifier(self.groups, tokens * self.dim, num_classes, normed, self.fc_drop_rate)
            return made.to(one.device, one.dtype).train(self.training)

        self.classifier = None if self.light else new(self.tokens, normed)
        self.distill_classifier = new(self.distill_tokens, normed) if self.distill_tokens and not self.light else None
        self.average_classifier: Any = new(1, True) if self.mean_token else None

    def lighten(self) -> "MultiTokenPool":
        """Drop the token classifiers for good and classify with the averaged tokens, in place."""
        if not self.mean_token:
            raise ValueError("a pool without averaged token has no light form; build it with mean_token=True")
        self.light, self.classifier, self.distill_classifier = True, None, None
        return self

    def merge_maps(self, features: Sequence[Tensor]) -> Tensor:
        """The one map that all groups look at. [(B, C_i, H_i, W_i)] -> (B, dim, h, w)."""
        if self.merge is not None:
            return self.merge(features)
        check_features(features, self.channels)
        return features[-1]

    def initial_tokens(self, merged: Tensor) -> Tensor:
        """Tokens before the attention. (B, dim, h, w) -> (B, G, T, dim)."""
        return self._make_tokens(rows_of(merged)).transpose(0, 1)

    def attended_tokens(self, merged: Tensor) -> Tensor:
        """Tokens after the attention, the averaged one last. (B, dim, h, w) -> (B, G, Q, dim)."""
        return self._attend(rows_of(merged), slice(None)).transpose(0, 1)

    def classify(self, merged: Tensor, pre_logits: bool = False) -> Tensor:
        """From the merged map to logits (B, num_classes), or to the normed tokens (B, num_features)."""
        x = rows_of(merged)
        if self.light:
            return self._aggregate([(self.average_classifier, self._attend(x, slice(-1, None)))], pre_logits)
        # In training the averaged token asks as well, for the sake of its classifier: see below.
        trains = self.training and self.mean_token and not pre_logits and bool(self.num_classes)
        attended = self._attend(x, slice(None) if trains else slice(self.tokens + self.distill_tokens))
        logits = self._aggregate(self._parts(attended), pre_logits)
        if trains:
            # Nothing here depends on the averaged token, which learns through `forward_groups`. A gradient of zero for
            # its classifier is what distributed training needs in a loop that never asks for the groups.
            logits = logits + 0.0 * self.average_classifier(attended[:, :, -1:]).sum()
        return logits

    def classify_groups(self, merged: Tensor, per_token: bool = False) -> GroupLogits:
        """From the merged map to every group's logits."""
        if not self.num_classes:
            raise ValueError("a pool without classes has no logits; call reset_classifier(num_classes) first")
        attended = self._attend(rows_of(merged), slice(-1, None) if self.light else slice(None))
        (classifier, own), distill = self._parts(attended)
        kinds = (classifier, own), (self.average_classifier, attended[:, :, -1:]), distill
        tokens, average, distilled = (None if c is None else c(part).transpose(0, 1) for c, part in kinds)
        shares = classifier.shares(own).permute(1, 0, 2, 3) if per_token and classifier is not None else None
        return GroupLogits(tokens, average, shares, distilled)

    def forward_groups(self, features: Sequence[Tensor], per_token: bool = False) -> GroupLogits:
        """Every group's logits; each token's share of them too if asked for."""
        return self.classify_groups(self.merge_maps(features), per_token)

    def forward(self, features: Sequence[Tensor], pre_logits: bool = False) -> Tensor:
        return self.classify(self.merge_maps(features), pre_logits)

    def _parts(self, attended: Tensor) -> "list[tuple[GroupClassifier | None, Tensor]]":
        """Class tokens and distillation tokens, each with their classifier."""
        distill = attended[:, :, self.tokens : self.tokens + self.distill_tokens]
        return [(self.classifier, attended[:, :, : self.tokens]), (self.distill_classifier, distill)]

    def _aggregate(self, parts: "Iterable[tuple[GroupClassifier | None, Tensor]]", pre_logits: bool) -> Tensor:
        """The average of the groups' logits (B, C), or their normed tokens (B, G*T*dim)."""
        known = [(classifier, tokens) for classifier, tokens in parts if classifier is not None]
        if pre_logits or not self.num_classes:
            return torch.cat([classifier.normed(tokens) for classifier, tokens in known], -1).transpose(0, 1).flatten(1)
        logits = [classifier(tokens) for classifier, tokens in known]  # G B C
        return (logits[0] if len(logits) == 1 else torch.cat(logits)).mean(0)

    def _make_tokens(self, x: Tensor) -> Tensor:
        """(B, n, dim) -> (G, B, T, dim)."""
        return self.learned[:, None].expand(-1, x.shape[0], -1, -1) if self.gram is None else self.gram(x)

    def _attend(self, x: Tensor, asking: slice) -> Tensor:
        """Make tokens and let the asking ones attend. (B, n, dim) -> (G, B, q, dim)."""
        tokens = self._make_tokens(x)
        if self.mean_token:
            tokens = torch.cat([tokens, tokens.mean(2, keepdim=True)], 2)
        for i, block in enumerate(self.blocks):
            tokens = block(tokens, x, asking if i == len(self.blocks) - 1 else slice(None))
        return tokens


@register_notrace_module
class GroupClassifier(nn.Module):
    """Each group's tokens side by side, normed together if asked for, to logits. (G, B, T, D) -> (G, B, classes)."""

    def __init__(self, groups: int, in_features: int, num_classes: int, normed: bool, drop: float):
        super().__init__()
        self.norm: nn.Module = GroupLayerNorm(groups, in_features, eps=1e-5) if normed else nn.Identity()
        self.drop = nn.Dropout(drop)
        self.fc = GroupLinear(groups, in_features, num_classes) if num_classes else None

    def normed(self, tokens: Tensor) -> Tensor:
        """(G, B, T, D) -> (G, B, T*D)."""
        return self.norm(tokens.flatten(2))

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.fc is not None
        return self.fc(self.drop(self.normed(tokens)))

    def shares(self, tokens: Tensor) -> Tensor:
        """What each token adds to the logits, which is all of them but the bias. (G, B, T, D) -> (G, B, T, classes)."""
        assert self.fc is not None
        G, B, T, D = tokens.shape
        normed = self.normed(tokens).view(G, B, T, D)
        return torch.einsum("gbtd,gctd->gbtc", normed, self.fc.weight.view(G, -1, T, D))

    def reparameterize(self) -> None:
        if isinstance(self.norm, GroupLayerNorm) and self.fc is not None:
            self.fc.take_in(*self.norm.scale_and_shift())
            self.norm = nn.LayerNorm(self.norm.dim, eps=self.norm.eps, elementwise_affine=False)


def drop_unused_classifiers(pool: MultiTokenPool, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """A light pool loads what a full one saved."""
    unused = (f"{prefix}classifier.", f"{prefix}distill_classifier.") if pool.light else ()
    for key in [key for key in state_dict if key.startswith(unused)]:
        del state_dict[key]
