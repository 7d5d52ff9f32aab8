"""Feature maps of every level from any timm model: what it already offers, and its stem where it keeps that back."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import first_line
from ..inspection.layout import layouts_of
from ..inspection.meta_pass import as_pair, copied, idle_parameters, image_channels
from ..inspection.meta_pass import image_size as built_for


class Passed:
    """A value that a hook hands on to a later step of the same pass, one for each thread; copies start empty."""

    def __init__(self) -> None:
        self._traced: Any = None  # a compiler follows a plain attribute more easily
        self._local = threading.local()

    def put(self, value: Any) -> None:
        if torch.compiler.is_compiling():
            self._traced = value
        else:
            self._local.value = value

    def get(self) -> Any:
        return self._traced if torch.compiler.is_compiling() else self._local.value

    def take(self) -> Any:
        """The value, once."""
        value = self.get()
        self.put(None)
        return value

    def __reduce__(self) -> tuple:
        return Passed, ()


class Tap:
    """A hook at the module of a path that keeps what it gives ("forward") or takes ("forward_pre") for that pass."""

    def __init__(self, module: str, kind: str = "forward") -> None:
        self.module, self.kind, self.kept = module, kind, Passed()

    def detach(self, model: nn.Module) -> None:
        module = model.get_submodule(self.module)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]

    def __call__(self, module: nn.Module, inputs: tuple, output: Any = None) -> None:
        self.kept.put(inputs[0] if self.kind == "forward_pre" else output)


@dataclass(frozen=True)
class Pyramid:
    """How the maps of one model are obtained; made by `find_pyramid`, for what `as_backbone` makes of the model."""

    image_size: tuple[int, int]  # (H, W) that the model was built for
    in_chans: int
    # Positions among the model's intermediate features, the upper maps; None if it does not offer these.
    indices: tuple[int, ...] | None = None
    taps: tuple[Tap, ...] = field(default=(), repr=False)  # at what gives the lower maps, or all of them
    channels: tuple[int, ...] = ()  # of each map, lowest level first
    sizes: tuple[tuple[int, int], ...] = ()  # (H, W) of each for an image of `image_size`
    forms: tuple[str, ...] = ()  # of each tapped map, see `Layout`; tokens may come in a pair with their (H, W)
    idle: tuple[str, ...] = field(default=(), repr=False)  # names of the parameters that no map depends on,
    dropped: tuple[str, ...] = field(default=(), repr=False)  # and of the children that consist of such alone

    def __call__(self, backbone: nn.Module, images: Tensor) -> list[Tensor]:
        """Maps (B, C_i, H_i, W_i), lowest level first, raw: without the model's final norm."""
        return maps_of([self], backbone, images)[0]

    def run(self, backbone: Any, images: Tensor) -> tuple[list[Any], list[Tensor]]:
        """What the taps kept, in whatever form, and the maps that the model gives by itself."""
        if self.indices is not None:
            maps = backbone.forward_intermediates(images, indices=list(self.indices), intermediates_only=True)
        else:
            last = backbone.forward_features(images)
            maps = [] if self.taps else [last]
        return [tap.kept.take() for tap in self.taps], maps

    def _as_map(self, kept: Any, position: int, images: Tensor) -> Tensor:
        """A tapped output as (B, C, H, W)."""
        form = self.forms[position]
        if form != "NLC":
            return kept if form == "NCHW" else kept.permute(0, 3, 1, 2)
        if isinstance(kept, tuple):
            tokens, grid = kept
        else:  # the grid shrinks with the image
            sides = zip(images.shape[-2:], self.sizes[position], self.image_size, strict=True)
            tokens, grid = kept, [side * cells // full for side, cells, full in sides]
        return tokens.mT.unflatten(2, tuple(grid))

    @property
    def level(self) -> int:
        """The map that is merged at by default: of the second-smallest size, at stride 16 in most models; -1 of one."""
        if len(self.sizes) == 1:
            return -1
        heights = [height for height, _ in self.sizes]
        chosen = sorted(set(heights))[:2][-1]
        return max(1, *(i for i, height in enumerate(heights) if height == chosen))


def maps_of(pyramids: Sequence[Pyramid], backbone: Any, images: Tensor) -> list[list[Tensor]]:
    """The maps of several pyramids of one backbone, all from one pass."""
    indices = sorted({index for one in pyramids for index in one.indices or ()})
    if indices:
        found = backbone.forward_intermediates(images, indices=indices, intermediates_only=True)
    else:
        found = [backbone.forward_features(images)]
    maps = []
    for one in pyramids:
        kept = [one._as_map(tap.kept.take(), i, images) for i, tap in enumerate(one.taps)]
        upper = found if one.indices is None and not kept else [found[indices.index(i)] for i in one.indices or ()]
        maps.append([*kept, *upper])
    return maps


def find_pyramid(
    model: nn.Module,
    *,
    indices: Sequence[int] | None = None,
    stem: str | None = None,
    last_only: bool = False,
    in_chans: int | None = None,
    image_size: int | Sequence[int] | None = None,
) -> Pyramid:
    """How to obtain the pyramid of a model, which `as_backbone` changes, not this; a ValueError if it has none.

    Args:
        indices: Which of the model's intermediate features to take; by default all stages, and of a model whose
            maps are all of one size four evenly spaced blocks.
        stem: Name of the module whose output is the lowest map; "" for none; by default what the model calls a stem,
            unless it lists that among its features or its maps are all of one size.
        in_chans, image_size: By default what the first convolution takes, and what the model says it was built for.
    """
    info = _feature_info(model)
    pyramid = Pyramid(as_pair(image_size) if image_size else built_for(model), 0)
    if callable(getattr(model, "forward_intermediates", None)) and info:
        one_size = len(info) > 1 and len({entry.get("reduction") for entry in info}) == 1
        if indices is None:  # all, or the last block of every quarter: 2, 5, 8, 11 of 12
            count = min(4, len(info)) if one_size else len(info)
            indices = [(i + 1) * len(info) // count - 1 for i in range(count)]
        indices = list(indices)[-1:] if last_only else list(indices)
        if stem is None or last_only:
            stem = "" if one_size or last_only else _unlisted_stem(model, info)
        pyramid = replace(pyramid, indices=tuple(indices), taps=(Tap(stem),) if stem else ())
    elif callable(getattr(model, "forward_features", None)):
        listed = [(str(entry["module"]), entry.get("hook_type", "forward")) for entry in info if entry.get("reduction")]
        modules = dict(model.named_modules())
        if not last_only and listed and all(name in modules for name, _ in listed):
            pyramid = replace(pyramid, taps=tuple(Tap(*one) for one in listed))
    else:
        raise ValueError(_no_features(model, "it has neither forward_intermediates nor forward_features"))
    channels = [in_chans] if in_chans else image_channels(model)
    try:
        return _measured(pyramid, model, channels)
    except ValueError:
        if pyramid.indices is not None or not pyramid.taps:
            raise
    return _measured(replace(pyramid, taps=()), model, channels)  # what it lists are no maps; its last one may be


def as_backbone(model: nn.Module, pyramid: Pyramid) -> nn.Module:
    """The model as the backbone of its pyramid, changed in place: cut down to what the maps need, the rest frozen."""
    _edit(model, pyramid)
    for name in pyramid.idle:  # distributed training takes a parameter without a gradient for an error
        model.get_parameter(name).requires_grad_(False)
    for name in pyramid.dropped:
        setattr(model, name, nn.Identity())
    return model


def takes(backbone: nn.Module, pyramid: Pyramid, size: Sequence[int]) -> bool:
    """Whether the backbone gives its maps for images of another size (H, W), too."""
    for with_values in (False, True):
        with suppress(Exception), torch.no_grad():
            copy, its_pyramid = copied((backbone, pyramid), backbone, with_values)
            its_pyramid.run(copy.eval(), _images(copy, pyramid.in_chans, size))
            return True
    return False


def _edit(model: Any, pyramid: Pyramid) -> None:
    """Without what the maps do not need, and with the taps."""
    makes_maps = any(str(entry.get("module", "")).startswith("head.") for entry in _feature_info(model))
    has_head = isinstance(getattr(model, "head", None), nn.Module)
    if pyramid.indices is not None and hasattr(model, "prune_intermediate_layers"):
        # Some heads cannot be reset to nothing; that of the model goes below anyway.
        model.prune_intermediate_layers(list(pyramid.indices), prune_norm=True, prune_head=not has_head)
    elif hasattr(model, "reset_classifier"):
        model.reset_classifier(0)
    if pyramid.indices is not None and has_head and not makes_maps:  # a norm or a hidden layer may be left in it
        model.head = nn.Identity()
    for tap in pyramid.taps:
        module = model.get_submodule(tap.module)
        (module.register_forward_pre_hook if tap.kind == "forward_pre" else module.register_forward_hook)(tap)
    if pyramid.indices is None and pyramid.taps:
        for child in model.children():
            if hasattr(child, "inplace"):  # it would overwrite the map that is kept from the layer before it
                child.inplace = False


def _measured(pyramid: Pyramid, model: nn.Module, in_chans: Sequence[int]) -> Pyramid:
    """The same with channels, sizes and idle parts, by a pass of a copy with the first of `in_chans` that it takes."""
    faults = []
    for channels, with_values in product(in_chans, (False, True)):
        backbone, its_pyramid = copied((model, pyramid), model, with_values)
        _edit(backbone, its_pyramid)
        images = _images(backbone.eval(), channels, pyramid.image_size)
        try:
            with torch.set_grad_enabled(not with_values):
                tapped, maps = its_pyramid.run(backbone, images)
            found = _with_shapes(replace(pyramid, in_chans=channels), tapped, maps, model)
            idle = () if with_values else _idle(backbone, tapped, maps)
            return replace(found, idle=idle, dropped=_dropped(backbone, its_pyramid, idle, images))
        except Exception as error:
            faults.append(error)
    # What a pass with arithmetic says of the likeliest number of channels.
    fault = next((fault for fault in faults if isinstance(fault, ValueError)), faults[1])
    raise ValueError(_no_features(model, first_line(fault))) from fault


def _images(model: nn.Module, channels: int, size: Sequence[int]) -> Tensor:
    return next(model.parameters(), torch.empty(0)).new_zeros(1, channels, *size)


def _with_shapes(pyramid: Pyramid, tapped: list[Any], maps: list[Tensor], model: nn.Module) -> Pyramid:
    channels, sizes, forms = [], [], []
    height, width = pyramid.image_size
    for kept in tapped:
        x, grid = kept if isinstance(kept, tuple) else (kept, None)
        if not isinstance(x, Tensor):
            raise ValueError(f"one of its features is a {type(x).__name__}, not a map (B, C, H, W)")
        if grid is not None:  # some modules give it (H, W) too
            form, size = "NLC", (int(grid[0]), int(grid[1]))
        else:
            asked: dict[str, Any] = dict(form=getattr(model, "output_fmt", None), prefixes=[0], nearest=x.ndim == 4)
            found = layouts_of(x.shape, pyramid.image_size, **asked)
            if not found:
                gives = f"the stem gives {tuple(x.shape[1:])} for an image of {height}x{width}"
                raise ValueError(f"{gives}, which is no map of it; pass stem='' to do without")
            form, size = found[0].form, found[0].grid
        channels.append(x.shape[1 if form == "NCHW" else -1])
        sizes.append(size)
        forms.append(form)
    for x in maps:
        if not isinstance(x, Tensor) or x.ndim != 4:
            came = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"its features are {came}, not maps (B, C, H, W)")
        channels.append(x.shape[1])
        sizes.append(tuple(x.shape[-2:]))
    return replace(pyramid, channels=tuple(channels), sizes=tuple(sizes), forms=tuple(forms))


def _idle(backbone: nn.Module, tapped: list[Any], maps: list[Tensor]) -> tuple[str, ...]:
    """Names of the parameters that could learn and that no map depends on."""
    found = [kept[0] if isinstance(kept, tuple) else kept for kept in tapped] + list(maps)
    learn = all(isinstance(x, Tensor) and x.requires_grad for x in found)
    return idle_parameters(backbone, found) if learn else ()


def _dropped(backbone: nn.Module, pyramid: Pyramid, idle: Sequence[str], images: Tensor) -> tuple[str, ...]:
    """Names of the children without which the maps are the same, such as a last wide convolution."""
    useless = {backbone.get_parameter(name) for name in idle}
    children = {name: set(child.parameters()) for name, child in backbone.named_children()}
    names = [name for name, parameters in children.items() if parameters and parameters <= useless]
    for name in names:
        setattr(backbone, name, nn.Identity())
    backbone.train().eval()  # what the first pass left in caches is of no use to a second
    try:
        with torch.no_grad():
            pyramid.run(backbone, images)
    except Exception:  # called after all
        return ()
    return tuple(names)


def _feature_info(model: Any) -> list[dict[str, Any]]:
    info = getattr(model, "feature_info", None)
    return list(getattr(info, "info", info) or [])


def _unlisted_stem(model: nn.Module, info: Sequence[dict[str, Any]]) -> str:
    """The name of the model's stem, or "" if it has none or its output is among the features anyway."""
    for name in ("stem", "patch_embed"):  # what timm's models call it
        stem = getattr(model, name, None)
        if isinstance(stem, nn.Module) and not isinstance(stem, nn.ModuleList):  # a list is never called itself
            return "" if any(str(entry.get("module", "")).split(".")[0] == name for entry in info) else name
    return ""


def _no_features(model: nn.Module, reason: str) -> str:
    return f"{type(model).__name__} offers no feature maps to pool: {reason}"
