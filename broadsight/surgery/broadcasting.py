"""Puts context broadcasting into the blocks of any vision model."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import check_choice
from ..inspection.branch_structure import LOOKED_FOR
from ..inspection.branches import PLACES as POSITIONS
from ..inspection.branches import Tokens, find_branches
from ..layers import ContextBroadcast
from ..layers.buffers import restore_on_load
from ..layers.context_broadcast import KINDS, broadcast_input, broadcast_output, context_broadcast
from ..layers.kernels.dispatch import per_image
from .description import as_edited, describe_edited
from .pyramid import Passed

BRANCHES = {"mlp": ("mlp",), "attn": ("attn",), "both": ("mlp", "attn")}


def add_context_broadcast(
    model: nn.Module,
    kind: str = "cb",
    branch: str = "mlp",
    position: str = "end",
    *,
    class_token: bool | None = None,
    image_size: int | Sequence[int] | None = None,
) -> nn.Module:
    """Broadcast context in every block of a model that has attention or MLPs, in place; the model is returned.

    All keys of its state dict stay. Only "scaled" adds some, one vector for each place, `...context_broadcast.scale`,
    all zero, so that a pretrained model is unchanged at first.

    Args:
        model: Any vision model that takes a batch of images: timm's, ours, transformers', yours; or one of
            transformers that reads a text beside it, as ViLT, of which the mean is over both, without padding.
        kind: "cb", "scaled", "gate" or "hybrid"; see `ContextBroadcast`.
        branch: "mlp", "attn" or "both".
        position: Before the branch ("front"), before its last linear layer ("mid"), or after it ("end").
        class_token: Whether the first token is the class token, which "gate" and "hybrid" use; by default it is one
            where the model has a `cls_token` and the tokens are one more than a grid. The mean token stands in for
            it otherwise.
        image_size: Side or (H, W) that the model was built for, where it does not say so itself.

    Raises:
        ValueError: There is no such place in the model, or context is broadcast already.
    """
    check_choice("kind", kind, KINDS)
    check_choice("branch", branch, BRANCHES)
    check_choice("position", position, POSITIONS)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; expected a model, as timm.create_model gives")
    if present := [name for name, module in model.named_modules() if isinstance(module, ContextBroadcast)]:
        raise ValueError(f"{type(model).__name__} broadcasts context already ({present[0]}); start from a fresh model")
    found = find_branches(model, image_size=image_size)
    kinds = sorted({one.kind for one in found})
    if missing := next((one for one in BRANCHES[branch] if one not in kinds), None):
        classes = ", ".join(sorted({type(one.module).__name__ for one in found}))
        instead = f"; it has {' and '.join(kinds)} blocks ({classes})" if found else ""
        looked = f"looked for {LOOKED_FOR[missing]}, over more than one token{instead}"
        raise ValueError(f"{type(model).__name__} has no {missing} blocks; {looked}")
    # Everything is made before anything is changed, so that a refusal leaves the model as it was.
    made = []
    for one in (one for one in found if one.kind in BRANCHES[branch]):
        tokens: Tokens | None = getattr(one, position)
        if tokens is None:
            where = f"in {one.name} ({type(one.module).__name__}) where all tokens of the image pass"
            possible = ", ".join(repr(place) for place in POSITIONS if getattr(one, place) is not None)
            raise ValueError(f"there is no {position!r} {where}; there is {possible}")
        made.append((one, tokens, _made(kind, tokens, class_token, [tokens.module, one.module, model])))
    described = as_edited(model)
    for one, tokens, broadcast in made:
        tokens.module.context_broadcast = broadcast
        if tokens.side == "input":
            tokens.module.register_forward_pre_hook(broadcast_input)
        else:
            tokens.module.register_forward_hook(broadcast_output)
            parent: Any = model.get_submodule(one.name.rpartition(".")[0])
            if tokens.module is one.module and hasattr(parent, "keep_branches_separate"):
                parent.keep_branches_separate()  # of ours; it would let the branch add to the residual itself
        if isinstance(broadcast, WindowedBroadcast):
            assert tokens.block is not None
            tokens.block.register_forward_pre_hook(broadcast.images)
        elif isinstance(broadcast, MaskedBroadcast):
            assert tokens.masked is not None
            tokens.masked.register_forward_pre_hook(broadcast.padding, with_kwargs=True)
    if getattr(model, "pretrained_cfg", None):  # without, nobody can save the model by a name
        how = dict(branch=branch, position=position, class_token=class_token, image_size=image_size)
        how = {key: value for key, value in how.items() if value is not None}
        after_pool = {"pool_first": True} if described.get("pool") else {}
        describe_edited(model, described | {"broadcast": kind, "broadcast_args": how} | after_pool)
    restore_on_load(model)
    return model


class WindowedBroadcast(ContextBroadcast):
    """Context broadcasting among all tokens of an image, of which `images` knows how many, cut into windows as rows."""

    def __init__(self, kind: str, dim: int, images: "ImageCount", *, channels_last: bool):
        super().__init__(kind, dim, channels_last=channels_last, class_token=False)
        self.images = images

    def forward(self, x: Tensor) -> Tensor:
        images = self.images.count.get()
        windows = x.unflatten(0, (images, x.shape[0] // images))  # B windows ...
        return self.broadcast(windows, self.channel_axis(x) + 1, False).flatten(0, 1)


class MaskedBroadcast(ContextBroadcast):
    """Context broadcasting among the tokens of a sequence that are no padding, which `padding` has noted."""

    def __init__(self, kind: str, dim: int, padding: "PaddingMask", *, class_token: bool):
        super().__init__(kind, dim, channels_last=True, class_token=class_token)
        self.padding = padding

    def broadcast(self, x: Tensor, channel_axis: int, class_token: bool) -> Tensor:
        mask = self.padding.mask.get()
        return context_broadcast(x, self.kind, self.scale, channel_axis, class_token, mask=mask)


class PaddingMask:
    """A forward pre-hook that notes which tokens a block may attend to, for a layer inside. argument: its position."""

    def __init__(self, argument: int):
        self.argument, self.mask = argument, Passed()

    def __call__(self, module: nn.Module, inputs: tuple, options: dict[str, Any]) -> None:
        mask = options.get("attention_mask", inputs[self.argument] if len(inputs) > self.argument else None)
        if mask is not None and not isinstance(mask, Tensor):
            hint = "create the model with attn_implementation='eager' or 'sdpa'"
            raise ValueError(f"context cannot leave out padding that a {type(mask).__name__} marks; {hint}")
        if mask is not None and mask.ndim == 4:  # (B, 1, N, N), what is added to scores or may be attended to
            mask = mask[:, 0, -1] == 0 if mask.is_floating_point() else mask[:, 0, -1]
        self.mask.put(None if mask is None else mask.bool())


@per_image
class ImageCount:
    """A forward pre-hook that notes how many images a block gets, for a layer inside that sees windows of these."""

    def __init__(self, argument: int = 0):
        self.argument, self.count = argument, Passed()

    def __call__(self, module: nn.Module, inputs: tuple) -> None:
        self.count.put(inputs[self.argument].shape[0])


def _made(kind: str, tokens: Tokens, class_token: bool | None, near: Sequence[nn.Module]) -> ContextBroadcast:
    """The layer for a place, with the device and dtype of the first of the modules that has parameters."""
    if class_token and (tokens.windowed or tokens.channel_axis != 2):
        raise ValueError("class_token=True, but there are maps or windows in the model; expected tokens (B, N, C)")
    layout: dict[str, Any] = dict(channels_last=tokens.channel_axis != 1)
    if tokens.windowed:
        made: ContextBroadcast = WindowedBroadcast(kind, tokens.channels, ImageCount(tokens.argument), **layout)
    elif tokens.masked is not None:
        place = list(inspect.signature(tokens.masked.forward).parameters).index("attention_mask")
        made = MaskedBroadcast(kind, tokens.channels, PaddingMask(place), class_token=bool(class_token))
    else:
        with_class = tokens.class_token if class_token is None else class_token
        made = ContextBroadcast(kind, tokens.channels, class_token=with_class, inplace=tokens.fresh, **layout)
    like = next((p for module in near for p in module.parameters() if p.is_floating_point()), None)
    made.train(tokens.module.training)
    return made if like is None else made.to(like.device, like.dtype)
