"""Finds the attention and MLP branches of any vision model, and their tokens, in a pass without arithmetic."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from timm.layers import DropPath, LayerScale, LayerScale2d
from torch import Tensor, nn

from ..errors import first_line
from ..layers import ChannelMlp, SuperTokenAttention
from .branch_structure import Candidate, affine_layers, candidates
from .layout import layouts_of, path_of, prefix_tokens
from .meta_pass import as_pair, copied, image_channels, in_eval_mode, run_on, takes_text
from .meta_pass import image_size as built_for
from .watch import hooked

PLACES = ("front", "mid", "end")
# Images of the pass that watches, without arithmetic and with: primes, of which little else comes in multiples.
DRY_BATCH, WET_BATCH = 101, 3


@dataclass(frozen=True)
class Tokens:
    """Tokens that pass a place of the model: what a module takes or gives."""

    module: nn.Module
    side: str  # "input", the first argument of the module, or "output"
    channels: int
    channel_axis: int  # 1 or the last, counted from the front
    count: int  # tokens of one image
    windowed: bool = False  # whether an image may be cut into several rows of the batch axis
    block: nn.Module | None = None  # the module around that sees the whole batch of images
    argument: int = 0  # of that module
    class_token: bool = False  # whether the first token is the class token
    fresh: bool = False  # whether nobody else holds this tensor, so that it may be overwritten
    alone: bool = True  # whether the module takes or gives nothing but this tensor
    masked: nn.Module | None = None  # the module around that is told as `attention_mask` which tokens are padding


@dataclass(frozen=True)
class Branch(Candidate):
    """An attention or MLP branch, with the tokens that it takes, that its projection takes, and gives, if any."""

    front: Tokens | None = None
    mid: Tokens | None = None
    end: Tokens | None = None


def find_branches(model: nn.Module, *, image_size: int | Sequence[int] | None = None) -> list[Branch]:
    """All branches that see more than one token of the image, in the order of the model's modules.

    `image_size` is the side or (H, W) that the model was built for, by default what it says itself.
    """
    possible = list(candidates(model))
    if not possible:
        return []
    watched = _watch(model, possible, image_size)
    found = [branch for branch in map(watched.located, possible) if branch is not None]
    for place in PLACES:
        # Where one window covers the image, several will cover a larger one.
        roles = [(branch.name.rpartition(".")[2], type(branch.module)) for branch in found]
        at = [getattr(branch, place) for branch in found]
        windowed = {role for role, tokens in zip(roles, at, strict=True) if tokens and tokens.windowed}
        for i, (role, tokens) in enumerate(zip(roles, at, strict=True)):
            if tokens is not None and role in windowed:
                found[i] = replace(found[i], **{place: replace(tokens, windowed=True, class_token=False)})
    beside = watched.beside_windows
    return [replace(one, front=beside(one.front, one.module), end=beside(one.end, one.module)) for one in found]


@dataclass
class _Call:
    """What a module was first called with, and what it gave; None in place of other things than tensors."""

    given: Tensor | None = None  # the first of the tensors, by position or by name
    arguments: list[Tensor | None] = field(default_factory=list)  # all that came by position
    result: Tensor | None = None
    alone: bool = True  # whether it was one tensor each
    order: int = -1  # how many of the watched modules had been called before
    times: int = 0


class _Watched:
    """The calls of some modules in one pass of a copy of the model over zeros (B, C, H, W), with values or without."""

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module], shape: Sequence[int], with_values: bool):
        self.model, self.batch, self.size, self.text = model, shape[0], (shape[2], shape[3]), takes_text(model)
        self.calls = {module: _Call() for module in modules}
        copy, copies = copied((model, list(self.calls)), model, with_values)
        noted = dict(zip(copies, self.calls.values(), strict=True))

        def begins(module: nn.Module, args: tuple, kwargs: dict) -> None:
            call = noted[module]
            call.times += 1
            if call.result is None:
                call.alone = len(args) == 1 and not kwargs
                call.arguments = [x if isinstance(x, Tensor) else None for x in args]
                call.given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)

        def ends(module: nn.Module, args: tuple, result: Any) -> None:
            call = noted[module]
            if call.result is None:
                call.alone &= isinstance(result, Tensor)
                call.order = sum(other.order >= 0 for other in noted.values())
                result = result[0] if isinstance(result, tuple | list) else result
                call.result = result if isinstance(result, Tensor) else None

        like = next(copy.parameters(), torch.empty(0))
        images = torch.zeros(tuple(shape), device=like.device, dtype=like.dtype)
        with in_eval_mode(copy), hooked(copies, before=begins, after=ends), torch.random.fork_rng(devices=[]):
            run_on(copy, images)

    def located(self, branch: Candidate) -> Branch | None:
        """The branch with the tokens at its places, or None if it sees no tokens of an image."""
        call = self.calls[branch.module]
        given, result = call.given, call.result
        if given is None or result is None or not self.are_tokens(result):
            return None
        around = path_of(self.model, branch.name)[1:]
        axis = _channel_axis(branch, result, self.calls[around[0]].given)
        end = self.tokens(branch.module, "output", result, axis, around)
        if end.count == 1:
            return None
        front = mid = None
        first = bool(call.arguments) and call.arguments[0] is given
        start = self.calls[branch.begins].given if branch.begins else None
        if branch.begins is not None and start is not None:
            front = self.tokens(branch.begins, "input", start, axis, around)
        elif first and given.ndim == result.ndim and branch.module is not branch.projection:
            front = _inside_sequences(self.tokens(branch.module, "input", given, axis, around))
        last: Any = branch.projection
        x, y = (self.calls[last].given, self.calls[last].result) if last is not None else (None, None)
        if x is not None and y is not None:
            if isinstance(branch.module, ChannelMlp):  # it may add the residual to what its last layer gives
                end = self.tokens(last, "output", y, 3, around)
            if isinstance(branch.module, ChannelMlp) or y is result:
                end = replace(end, module=last, fresh=True, alone=True)
            if self.are_tokens(x):  # the middle is what the last layer takes, if these are the tokens that it gives
                mid = self.tokens(last, "input", x, x.ndim - 1 if isinstance(last, nn.Linear) else 1, around)
                mid = mid if mid.count == end.count else None
        end = _inside_sequences(end)
        return Branch(**vars(branch), front=front, mid=mid, end=end)

    def beside_windows(self, tokens: Tokens | None, branch: nn.Module) -> Tokens | None:
        """The same tokens where the image is whole: a norm before, a scale or drop path behind, or a block around."""
        if tokens is None or not tokens.windowed or tokens.block is None:
            return tokens
        called = [(name, child) for name, child in tokens.block.named_children() if self.calls[child].order >= 0]
        called.sort(key=lambda one: self.calls[one[1]].order)
        here = next((i for i, (_, child) in enumerate(called) if branch in child.modules()), None)
        if here is None:
            return tokens
        beside, side = tokens.block, tokens.side
        if len(called) > 1:
            other, side = (here - 1, "output") if side == "input" else (here + 1, "input")
            if not 0 <= other < len(called):
                return tokens
            name, beside = called[other]
            if name != "norm1" and not isinstance(beside, nn.Identity | DropPath | LayerScale | LayerScale2d):
                return tokens
        x = self.calls[beside].given if side == "input" else self.calls[beside].result
        if x is None or len(x) != self.batch or self.calls[beside].times > 1:
            return tokens
        axis = next((axis for axis in (x.ndim - 1, 1) if x.shape[axis] == tokens.channels), None)
        return tokens if axis is None else self.tokens(beside, side, x, axis, [tokens.block])

    def are_tokens(self, x: Tensor) -> bool:
        return x.ndim > 2 and x.shape[0] > 0 and x.shape[0] % self.batch == 0

    def tokens(self, module: nn.Module, side: str, x: Tensor, axis: int, around: list[nn.Module]) -> Tokens:
        count, windowed, class_token = x.numel() // x.shape[axis] // self.batch, len(x) != self.batch, False
        arguments = ((holder, i, y) for holder in around for i, y in enumerate(self.calls[holder].arguments))
        whole = ((holder, i) for holder, i, y in arguments if y is not None and y.ndim and len(y) == self.batch)
        taking = (holder for holder in around if "attention_mask" in inspect.signature(holder.forward).parameters)
        masked = next(taking, None) if self.text else None
        if x.ndim == 3 and axis == 2 and not windowed and not self.text:
            prefix, has_class = prefix_tokens(around)
            found = layouts_of((self.batch, count, x.shape[2]), self.size, prefixes=(prefix or 0, 0))
            class_token = has_class and bool(found) and found[0].prefix > 0
        place = (module, side, x.shape[axis], axis, count, windowed, *next(whole, (None, 0)))
        return Tokens(*place, class_token=class_token, alone=self.calls[module].alone, masked=masked)


def _watch(model: nn.Module, possible: Sequence[Candidate], size: int | Sequence[int] | None) -> _Watched:
    inner: Any = model
    for wrapper in ("backbone", "model"):  # a swapped pooling, timm's feature extractors
        inner = getattr(inner, wrapper, inner)
    size = as_pair(size) if size else built_for(inner)
    modules = {module for one in possible for module in (one.module, one.projection, one.begins) if module is not None}
    around = {module for branch in possible for module in path_of(model, branch.name)[1:]}
    modules |= around | {child for module in around for child in module.children()}
    faults: list[Exception] = []
    for channels in image_channels(inner):
        for with_values, batch in ((False, DRY_BATCH), (True, WET_BATCH)):  # some models ask for the values of a tensor
            try:
                return _Watched(model, modules, (batch, channels, *size), with_values)
            except Exception as error:
                faults.append(error)
    why = f"images of {size[0]}x{size[1]} ({first_line(faults[0])})"
    hint = "pass the image_size that it was built for"
    raise ValueError(f"{type(model).__name__} does not run on {why}; {hint}") from faults[0]


def _inside_sequences(tokens: Tokens) -> Tokens:
    """At the first or last module of a sequence, which would also run whatever is added to it."""
    while isinstance(tokens.module, nn.Sequential):
        tokens = replace(tokens, module=tokens.module[0 if tokens.side == "input" else -1])
    return tokens


def _channel_axis(branch: Candidate, x: Tensor, of_block: Tensor | None) -> int:
    """Where the channels are in what a branch gives: a mixer may get (B, C, N) where its block gets (B, N, C)."""
    last = x.ndim - 1
    if isinstance(branch.module, SuperTokenAttention):
        return 1
    if branch.projection is None:
        transposed = x.ndim == 3 and of_block is not None and x.shape[1:] == of_block.mT.shape[1:]
        layers = list(affine_layers(branch.module))
        return 1 if transposed or (x.ndim == 4 and layers and isinstance(layers[0], nn.Conv2d)) else last
    weight: Any = branch.projection.weight
    axes = (last, 1) if isinstance(branch.projection, nn.Linear) else (1, last)
    return next((axis for axis in axes if x.shape[axis] == len(weight)), axes[0])
