"""Necks for dense prediction: what class tokens have seen of the whole image, told to every stage."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import check_choice
from ..checks import check_divides
from .class_attention import GroupClassAttention
from .gram_tokens import GramTokens, choose_gram_groups
from .merge_maps import MergeMaps, rows_of
from .multi_token_pool import MultiTokenPool


class PoolNeck(nn.Module):
    """Feeds the output tokens of a model's own pool back to its stages, as MAP does (section 4.3).

    Maps of the stages [(B, C_i, H_i, W_i)] and those that the pool takes -> the stages' maps, of the same shapes.

    The pool makes its tokens as it does to classify, with its own weights; only its classifiers go. The tokens of one
    group after the other are divided by the number of stages. Each stage adds the mean of its part, projected to its
    channels, at every position; where there are fewer tokens than stages, as the one of "cap", neighbours share one.
    The averaged token is attended to, but goes to no stage: it is there to teach the others. The projections are new
    and start at zero, so that a new neck changes nothing.

    The pool's BatchNorms keep their statistics, as its training has left them: an image is one sample to those of Gram
    tokens, and detectors train on few images. Their scale and shift learn on. In a pool that nobody has trained they
    do no more than that; of Gram tokens, the variance is set to what their initial weights give.

    Args:
        pool, channels: The pool, which loses its classifiers, and the channels of each stage, lowest level first.
    """

    def __init__(self, pool: MultiTokenPool, channels: Sequence[int]):
        super().__init__()
        pool.classifier = pool.distill_classifier = pool.average_classifier = None
        self.pool, count, stages = pool, pool.groups * pool.tokens, len(channels)
        firsts = [stage * count // stages for stage in range(stages + 1)]
        self.parts = [slice(first, max(end, first + 1)) for first, end in pairwise(firsts)]
        one = next(pool.parameters())
        place: dict[str, Any] = dict(device=one.device, dtype=one.dtype)
        self.to_stages = nn.ModuleList(nn.Linear(pool.dim, width, **place) for width in channels)
        for parameter in self.to_stages.parameters():
            nn.init.zeros_(parameter)
        gram: Any = pool.gram
        if gram is not None and not one.is_meta and bool((gram.embed_norm.running_var == 1).all()):
            # Entries of length one, cut into parts, each times weights of 0.02
            gram.embed_norm.running_var.fill_(0.02**2 * pool.groups / len(gram.embed))
        self.train(pool.training)

    def train(self, mode: bool = True) -> "PoolNeck":
        super().train(mode)
        for module in self.pool.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self

    def forward(self, features: Sequence[Tensor], pooled: Sequence[Tensor]) -> list[Tensor]:
        vectors = self.stage_vectors(pooled)
        return [x + vector[:, :, None, None] for x, vector in zip(features, vectors, strict=True)]

    def stage_vectors(self, pooled: Sequence[Tensor]) -> list[Tensor]:
        """What is added at every position of each stage. Maps that the pool takes -> [(B, C_i)]."""
        tokens = self.pool.attended_tokens(self.pool.merge_maps(pooled))[:, :, : self.pool.tokens].flatten(1, 2)
        return [to(tokens[:, part].mean(1)) for to, part in zip(self.to_stages, self.parts, strict=True)]


class MultiTokenNeck(nn.Module):
    """Adds to every stage a vector that its share of the neck's own class tokens found in the whole image.

    A form of MAP's section 4.3 for models without a pool: the tokens and all that makes them begin anew.

    [(B, C_i, H_i, W_i)] -> the same shapes, so that any decoder may follow; a dict of maps, as torchvision's detectors
    pass around, gives a dict. The maps are merged into one, learned tokens attend to it, and the tokens are shared out
    to the stages in equal consecutive parts. The last layers start at zero: a new neck changes nothing.

    Args:
        channels: Channels of each stage, lowest level first.
        dim: Width of the merged map and the tokens.
        tokens, groups: Class tokens in each group, and groups; groups * tokens must split over the stages.
        level: Position of the stage whose grid all are brought to; by default the last but one, at stride 16.
        heads, attn_dim: Attention heads, one for every 32 channels by default, and their width, as `dim` if None.
        mlp_ratio, mlp_groups: Hidden width of the MLP over `dim`, and its channel groups.
        gram: Tokens from the Gram matrix, whose batch statistics want large batches, instead of learned ones.
        norm: Of the merged map: "batch", "frozen" (a BatchNorm that keeps its statistics) or "group".
        drop: Dropout of attention, projection and MLP.
        resize: As in MergeMaps.
    """

    def __init__(
        self,
        channels: Sequence[int],
        *,
        dim: int = 384,
        tokens: int = 8,
        groups: int = 1,
        level: int | None = None,
        heads: int | None = None,
        attn_dim: int | None = None,
        mlp_ratio: float = 4,
        mlp_groups: int = 1,
        gram: bool = False,
        norm: str = "batch",
        drop: float = 0.0,
        resize: str = "release",
    ):
        super().__init__()
        stages = len(channels)
        attn_dim, heads = attn_dim or dim, heads or max(1, dim // 32)
        if (groups * tokens) % stages:
            made = f"groups={groups} of tokens={tokens} are {groups * tokens} tokens"
            raise ValueError(f"{made}, which do not split over {stages} stages; choose a multiple of {stages}")
        check_choice("norm", norm, ("batch", "frozen", "group"))
        check_divides("attn_dim", attn_dim, "heads", heads)
        check_divides("dim", dim, "mlp_groups", mlp_groups)
        self.channels, self.groups, self.frozen = tuple(channels), groups, norm == "frozen"
        self.merge = MergeMaps(channels, dim, stages - 2 if level is None else level, resize)
        if norm == "group":
            self.merge.norm = nn.GroupNorm(32 if dim % 32 == 0 else 1, dim)
        self.gram = GramTokens(dim, groups, tokens, dim, choose_gram_groups(dim, tokens, dim)) if gram else None
        if self.gram is None:
            self.learned = nn.Parameter(torch.empty(groups, tokens, dim))
        sizes: dict[str, Any] = dict(mlp_ratio=mlp_ratio, mlp_groups=mlp_groups, drop=drop)
        self.block = GroupClassAttention(dim, groups, heads, attn_dim, **sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(dim, eps=1e-6) for _ in channels)
        self.to_stages = nn.ModuleList(nn.Linear(dim, width) for width in channels)
        self.reset_parameters()
        self.train()

    def reset_parameters(self) -> None:
        if self.gram is None:
            # Tokens that start alike and are averaged would stay alike.
            nn.init.trunc_normal_(self.learned, std=0.02)
        for parameter in self.to_stages.parameters():
            nn.init.zeros_(parameter)

    def train(self, mode: bool = True) -> "MultiTokenNeck":
        super().train(mode)
        if self.frozen:
            self.merge.norm.eval().requires_grad_(False)
        return self

    def forward(self, features: Any) -> Any:
        """Maps of all stages, as a list or as a dict, to maps of the same shapes in a container of the same kind."""
        if isinstance(features, Mapping):
            return type(features)(zip(features, self.forward(list(features.values())), strict=True))
        vectors = self.stage_vectors(features)
        return [x + vector[:, :, None, None] for x, vector in zip(features, vectors, strict=True)]

    def stage_vectors(self, features: Sequence[Tensor]) -> list[Tensor]:
        """What is added at every position of each stage. [(B, C_i, H_i, W_i)] -> [(B, C_i)]."""
        x = rows_of(self.merge(features))  # B n dim
        tokens = self.learned[:, None].expand(-1, x.shape[0], -1, -1) if self.gram is None else self.gram(x)
        tokens = self.block(tokens, x).transpose(0, 1).flatten(1, 2)  # B groups*tokens dim
        parts = tokens.unflatten(1, (len(self.channels), -1)).mean(2).unbind(1)  # one B dim for each stage
        return [to(norm(part)) for norm, to, part in zip(self.norms, self.to_stages, parts, strict=True)]
