"""Puts another pooling under any model: multi-token attention pooling and those that it is compared with."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import timm
import torch
from torch import Tensor, nn

from ..errors import check_arguments, check_choice, did_you_mean, nearest, refuse_idle
from ..layers import GroupLogits, MultiTokenPool
from ..layers.buffers import restore_on_load
from ..layers.checks import check_images
from ..layers.pooling import POOLS as POOLS
from .description import EDITED, as_edited, describe_edited, undescribe
from .pyramid import Pyramid, as_backbone, find_pyramid, maps_of

# What lets a timm model take images of any size, by the names that its families know; the first that fits is used.
ANY_SIZE: tuple[dict[str, Any], ...] = (
    dict(strict_img_size=False),
    dict(dynamic_img_size=True, dynamic_img_pad=True),
    dict(dynamic_img_size=True),
)
LAYER_NORMS = (nn.LayerNorm, nn.GroupNorm, timm.layers.RmsNorm, timm.layers.LayerNorm2d)
SIZE_ARGUMENTS = ("img_size", "dynamic_img_size", "dynamic_img_pad", "strict_img_size")


class PooledModel(nn.Module):
    """A timm model with another pooling; a timm model itself. (B, in_chans, H, W) -> (B, num_classes).

    `forward_features` goes as far as the one map (B, num_features, h, w) that is pooled, `forward_head` from there to
    the logits. The backbone is as `as_backbone` gives it, its pyramid as `find_pyramid`; the head pools these maps.
    """

    def __init__(self, backbone: nn.Module, pyramid: Pyramid, head: nn.Module):
        super().__init__()
        self.backbone: Any = backbone
        self.head: Any = head
        self.pyramid, self.pooled = pyramid, True
        self.in_chans, self.num_classes = pyramid.in_chans, self.head.num_classes
        self.num_features, self.head_hidden_size = self.head.dim, self.head.num_features
        self.feature_info = getattr(backbone, "feature_info", [])
        described = {"input_size": (self.in_chans, *pyramid.image_size)}
        described |= getattr(backbone, "pretrained_cfg", None) or {}
        first, names = described.get("first_conv") or (), dict(self.named_modules())
        first = tuple(f"backbone.{name}" for name in ((first,) if isinstance(first, str) else first))
        ends = ("head.fc", "head.classifier.fc", "head.average_classifier.fc", "head.distill_classifier.fc")
        self.pretrained_cfg = {**described, "first_conv": first, "classifier": tuple(n for n in ends if n in names)}
        self._traits = {**getattr(backbone, "_traits", {}), "first_conv": first}
        describe_edited(self, {"undescribed": "the PooledModel was put together by hand; use swap_pool"})
        restore_on_load(self)

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, num_features, h, w)."""
        check_images(x, self.in_chans)
        return self.head.merge_maps(self.pyramid(self.backbone, x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The map to pool -> logits (B, num_classes), or what the classifier sees (B, head_hidden_size)."""
        return self.head.classify(x, pre_logits) if self.pooled else x

    def forward_groups(self, x: Tensor, per_token: bool = False) -> GroupLogits:
        """Logits of every group of tokens, for `MultiTokenLoss`; each token's share as well if asked for."""
        if not self.has_groups:
            raise ValueError(f"{type(self.head).__name__} has no groups of tokens; pool with 'map' or 'ga'")
        return self.head.classify_groups(self.forward_features(x), per_token)

    def forward(self, x: Tensor, groups: bool = False) -> Tensor | GroupLogits:
        """Logits; with `groups` what `forward_groups` gives, so that wrappers of the model see that call too."""
        return self.forward_groups(x) if groups is True else self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The backbone's intermediate features, by timm's arguments, and what `forward_features` gives if wanted.

        `norm` has no effect, since the maps are pooled raw; `stop_early` has one only with `intermediates_only`.
        """
        check_images(x, self.in_chans)
        if self.pyramid.indices is None:
            name = type(self.backbone).__name__
            raise ValueError(f"{name} gives no intermediate features; model.pyramid gives its maps")
        if intermediates_only or isinstance(self.head, nn.Identity):
            options: dict[str, Any] = dict(indices=indices, output_fmt=output_fmt)
            options |= dict(stop_early=True) if stop_early else {}
            features = self.backbone.forward_intermediates(x, intermediates_only=intermediates_only, **options)
            for tap in self.pyramid.taps:
                tap.kept.take()
            return features
        count = len(self.feature_info)
        if indices is None or isinstance(indices, int):
            wanted = list(range(count))[-indices if indices else 0 :]
        else:
            wanted = [index % count for index in indices]
        further = replace(self.pyramid, indices=tuple(wanted), taps=())
        maps, taken = maps_of((self.pyramid, further), self.backbone, x)
        if output_fmt != "NCHW":
            taken = [y.permute(0, 2, 3, 1) if output_fmt == "NHWC" else y.flatten(2).mT for y in taken]
        return self.head.merge_maps(maps), taken

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Leave what the given intermediate features need; the pool goes with `prune_head`."""
        if prune_head:
            self.head, self.pooled, self.num_classes = nn.Identity(), False, 0
        undescribe(self, "layers of it were pruned (prune_intermediate_layers)")
        kept = indices if isinstance(indices, int) else list(indices)
        return self.backbone.prune_intermediate_layers(kept, prune_norm=prune_norm, prune_head=False)

    def get_classifier(self) -> nn.Module:
        return self.head.classifier or self.head.average_classifier if self.has_groups else self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New classifiers for num_classes (0: none). A global_pool of "" also leaves out the pooling."""
        self.num_classes = num_classes
        self.pooled = global_pool != "" if global_pool is not None else self.pooled
        if global_pool is not None:
            self._redescribe({"pooled": self.pooled}, {"global_pool": "avg" if self.pooled else ""})
        self.head.reset_classifier(num_classes)

    @property
    def has_groups(self) -> bool:
        """Whether there are groups of tokens to train with `MultiTokenLoss`."""
        return isinstance(self.head, MultiTokenPool)

    def lighten(self) -> "PooledModel":
        """Keep the averaged tokens' classifiers alone, in place: fewer parameters for inference, after training."""
        if not self.has_groups:
            raise ValueError(f"{type(self.head).__name__} has no light form; only 'map' has")
        self.head.lighten()
        self.head_hidden_size = self.head.num_features
        self._redescribe({"pool_args": {**self._model_args.get("pool_args", {}), "light": True}}, {"light": True})
        return self

    def _redescribe(self, edited: Mapping[str, Any], registered: Mapping[str, Any]) -> None:
        """Note a change in the arguments that make this model: those of `edited`, or of one of our registered names."""
        changes = edited if self.pretrained_cfg.get("architecture") == EDITED else registered
        self._model_args = {**self._model_args, **changes}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone.set_grad_checkpointing(enable)

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """Another image size, for backbones that are built for one."""
        model = self.backbone
        if not hasattr(model, "set_input_size"):
            raise ValueError(f"{type(model).__name__} has no set_input_size; create it with img_size=...")
        before = getattr(model, "_model_args", {})
        model.set_input_size(*args, **kwargs)
        # timm notes the new size in the backbone; what is saved is this model.
        noted = {k: v for k, v in getattr(model, "_model_args", {}).items() if before.get(k) != v}
        self._traits = {**getattr(model, "_traits", {}), "first_conv": self._traits["first_conv"]}
        self._model_args = {**self._model_args, **noted}

    def no_weight_decay(self) -> set[str]:
        names = {f"backbone.{name}" for name in getattr(self.backbone, "no_weight_decay", set)()}
        return names | ({"head.learned"} if hasattr(self.head, "learned") else set())

    def group_matcher(self, coarse: bool = False) -> Any:
        """The backbone's layers; the pool is the last."""
        if not hasattr(self.backbone, "group_matcher"):
            return dict(stem=r"^backbone", blocks=[(r"^head", (99999,))])
        matcher, own = self.backbone.group_matcher(coarse=coarse), "backbone."
        if callable(matcher):
            return lambda name: matcher(name.removeprefix(own)) if name.startswith(own) else float("inf")
        return {key: _below_backbone(pattern) for key, pattern in matcher.items()}


def check_pool_arguments(pool: str | None, given: Iterable[str], what: str = "the pooling's") -> None:
    """Refuse arguments, called `what`, that `swap_pool` does not have, and those that this pooling would ignore."""
    given = list(given)
    check_arguments(swap_pool, given, what, ("model_or_name", "pool", "num_classes", "img_size", "light"))
    pools = {name: [f"the pool {one}" for one in POOLS if name in POOLS[one].takes] for name in given}
    facts = {f"the pool {one}": None if one == pool else f"this is {pool}" for one in POOLS}
    refuse_idle({name: f"{what} {name}" for name in given}, pools, facts)


def swap_pool(
    model_or_name: str | nn.Module,
    pool: str,
    *,
    groups: int = 2,
    tokens: int = 4,
    dim: int = 384,
    heads: int | None = None,
    mlp_dim: int = 1536,
    level: int | None = None,
    light: bool = False,
    num_classes: int | None = None,
    img_size: int | Sequence[int] | None = None,
    attn_dim: int | None = None,
    indices: Sequence[int] | None = None,
    stem: str | None = None,
    pool_options: Mapping[str, Any] | None = None,
    **create_kwargs: Any,
) -> PooledModel:
    """Any timm model with another pooling in place of its last one; what it has learned is kept.

    Args:
        model_or_name: A timm name, or a model object, which is changed and becomes the backbone.
        pool: One of POOLS: "gap" (average), "cap" (one learned class token), "ga" (groups of one token each), "map"
            (groups of several tokens), "map-light" (the same with the averaged tokens' classifiers alone, for
            inference), "vgg" (flatten, fully connected), "dft" (Fourier magnitudes), or one that was registered.
        groups, tokens: Token groups, and class tokens in each.
        dim: Width of the merged map and of the tokens.
        heads: Attention heads; 12, or for "cap" one for every 64 channels.
        mlp_dim: Hidden width of the MLP.
        level: Position of the feature map whose grid all are brought to; by default that at stride 16, which is 3 in a
            pyramid of stem and four stages. -1: only the last map is pooled.
        light: As "map-light".
        num_classes: Classes; by default what the model had.
        img_size: Image size to create the model for, or that a model object was built for, where that matters.
        attn_dim: Width of the attention, half of `dim` by default.
        indices, stem: Which feature maps to use; see `find_pyramid`.
        pool_options: Further arguments of the pool's class, such as dict(head_mixing=True) of MultiTokenPool.
        create_kwargs: For timm.create_model when a name is given: pretrained, in_chans, img_size, ... Models that can
            are created to take images of any size.
    """
    check_choice("pool", pool, POOLS)
    own = list(inspect.signature(swap_pool).parameters.values())[2:-1]  # without the model, the pool, timm's
    given = locals()
    pool_args = {p.name: given[p.name] for p in own if given[p.name] != p.default and p.name != "num_classes"}
    kind, options = POOLS[pool], dict(pool_options or {})
    known = list(inspect.signature(kind.layer).parameters)
    for option in (one for one in options if one not in known):
        hint = did_you_mean(option, known)
        raise ValueError(f"{kind.layer.__name__} has no argument {option!r}; {hint}it takes {', '.join(known)}")
    if light and "light" not in kind.takes:
        light_ones = " and ".join(name for name, one in POOLS.items() if "light" in one.takes)
        raise ValueError(f"light=True with pool={pool!r}; only {light_ones} have a light form")
    if isinstance(model_or_name, str):
        sized: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
        model = create_backbone(model_or_name, **sized, **create_kwargs)
    elif create_kwargs:
        near = did_you_mean(next(iter(create_kwargs)), [p.name for p in own])
        hint = near.strip() or "they are for creating one by name"
        raise ValueError(f"{', '.join(create_kwargs)} given with a model object; {hint}")
    elif isinstance(model_or_name, PooledModel):
        raise ValueError("the model's pooling has been swapped already; swap it in a fresh backbone")
    else:
        model = model_or_name
    described = as_edited(model)
    if num_classes is None:
        num_classes = int(getattr(model, "num_classes", 0) or 1000)
    last_only = "level" not in kind.takes or (level is not None and level <= 0)
    chosen: dict[str, Any] = dict(indices=indices, stem=stem, last_only=last_only, image_size=img_size)
    pyramid = find_pyramid(model, in_chans=create_kwargs.get("in_chans"), **chosen)
    offered: dict[str, Any] = dict(groups=groups, tokens=tokens, dim=dim, heads=heads, mlp_dim=mlp_dim)
    offered |= dict(attn_dim=attn_dim, level=pyramid.level if level is None else level)
    offered |= dict(grid=pyramid.sizes[-1], width=pyramid.channels[-1], norm=ends_with_layer_norm(model))
    offered |= {"light": True} if light else {}
    like = next(model.parameters())
    with torch.device(like.device):  # before the model is touched: what is wrong with the arguments is said here
        head = kind.make(pyramid.channels, num_classes, offered, options).to(like.dtype)
    before = set(model.modules())
    pooled = PooledModel(as_backbone(model, pyramid), pyramid, head)
    # The mode of what is new; modules of a given backbone keep theirs, of which some may be frozen.
    for module in set(pooled.modules()) - before:
        module.training = model.training
    describe_edited(pooled, described | {"pool": pool, "pool_args": pool_args})
    return pooled


def check_name(name: str) -> None:
    """A ValueError with the nearest names if timm knows none like this."""
    if not timm.is_model(name.split(".")[0]) and ":" not in name:
        near = ", ".join(nearest(name, timm.list_models(), 3))
        raise ValueError(f"unknown model {name!r}" + (f"; nearest: {near}" if near else ""))


def create_backbone(name: str, *, any_size: bool = True, **create_kwargs: Any) -> nn.Module:
    """A timm model by name; with `any_size` for images of any, if its family can be and the size is left open."""
    check_name(name)
    sized = not any_size or any(argument in create_kwargs for argument in SIZE_ARGUMENTS)
    for choice in () if sized else ANY_SIZE:
        try:
            return timm.create_model(name, **create_kwargs, **choice)
        except (TypeError, ValueError) as error:  # our own models, edited ones, have refused it as a ValueError
            if not any(argument in str(error) for argument in choice):
                raise ValueError(f"{name} cannot be created: {error}") from error
    try:
        return timm.create_model(name, **create_kwargs)
    except TypeError as error:
        raise ValueError(f"{name} cannot be created: {error}") from error


def ends_with_layer_norm(model: Any) -> bool:
    """Whether the model norms its last features with something like a LayerNorm, so that an average wants one too."""
    places = [getattr(model, name, None) for name in ("norm", "fc_norm", "head_norm")]
    places.append(getattr(getattr(model, "head", None), "norm", None))
    return any(isinstance(place, LAYER_NORMS) for place in places)


def _below_backbone(pattern: Any) -> Any:
    """timm's patterns for parameter names (text, or sequences of (text, position)), for names below `backbone`."""
    if isinstance(pattern, str):  # it may hold several alternatives, each with its own anchor
        unanchored = re.sub(r"(?<![\[\\])\^", "", pattern)
        return rf"^backbone\.(?:{unanchored})"
    return type(pattern)(map(_below_backbone, pattern)) if isinstance(pattern, list | tuple) else pattern
