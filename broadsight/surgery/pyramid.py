"""Feature maps of every level from any timm model: what it already offers, and its stem where it keeps that back."""

import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import first_line
from ..inspection.meta_pass import (
    as_pair,
    call_without_content,
    image_channels,
    in_eval_mode,
    undisturbed,
    without_content,
)
from ..inspection.meta_pass import image_size as built_for

# Names that timm's models give to what comes before their first stage.
STEMS = ("stem", "patch_embed")


class Tap:
    """A forward hook that keeps what a module gives, until the pass that ran the module takes it.

    Each thread has its own, so that several may run one model. A compiler follows a plain attribute more easily, and
    what it makes of that holds no state.
    """

    def __init__(self) -> None:
        self._traced: Any = None
        self._local = threading.local()
        self.handle: Any = None

    def __call__(self, module: nn.Module, inputs: tuple, output: Any = None) -> None:
        """As a forward hook keeps the output, as a pre-hook the input."""
        kept = inputs[0] if output is None else output
        if torch.compiler.is_compiling():
            self._traced = kept
        else:
            self._local.kept = kept

    def take(self) -> Any:
        """What the latest call kept; once."""
        if torch.compiler.is_compiling():
            kept, self._traced = self._traced, None
        else:
            kept = self._local.kept
            del self._local.kept
        return kept

    def clear(self) -> None:
        """Forget what a pass kept that asks for nothing."""
        self._traced = None
        self._local.__dict__.clear()

    def __reduce__(self) -> tuple:  # copies and pickles start empty
        return Tap, ()


@dataclass(frozen=True)
class Pyramid:
    """How the maps of one model are obtained; made by `find_pyramid`.

    Args:
        image_size: (H, W) that the model was built for.
        in_chans: Channels of an image.
        indices: Positions among the model's intermediate features, the upper maps; None if it does not offer these.
        taps: Hooks at the modules whose outputs are the lower maps, or all of them.
        channels: Channels of each map, lowest level first.
        sizes: (H, W) of each map for an image of `image_size`.
        forms: How the model keeps each tapped map: as "NCHW", "NHWC", "rows" (B, H*W, C), or
            "rows, grid", a pair of these rows and (H, W).
    """

    image_size: tuple[int, int]
    in_chans: int
    indices: tuple[int, ...] | None = None
    taps: tuple[Tap, ...] = field(default=(), repr=False)
    channels: tuple[int, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    forms: tuple[str, ...] = ()

    def __call__(self, backbone: nn.Module, images: Tensor) -> list[Tensor]:
        """Maps (B, C_i, H_i, W_i), lowest level first, raw: without the model's final norm."""
        tapped, maps = self.run(backbone, images)
        lower = [self.as_map(kept, i, images) for i, kept in enumerate(tapped)]
        return [*lower, *maps]

    def with_features(self, backbone: nn.Module, images: Tensor, wanted: Sequence[int]) -> tuple[list, list[Tensor]]:
        """In one pass the maps, and any of the model's intermediate features by their positions."""
        assert self.indices is not None
        every = sorted({*self.indices, *wanted})
        both = replace(self, indices=tuple(every))
        tapped, features = both.run(backbone, images)
        lower = [self.as_map(kept, i, images) for i, kept in enumerate(tapped)]
        found = dict(zip(every, features, strict=True))
        return [*lower, *(found[i] for i in self.indices)], [found[i] for i in wanted]

    def run(self, backbone: Any, images: Tensor) -> tuple[list[Any], list[Tensor]]:
        """What the taps kept, in whatever form, and the maps that the model gives by itself."""
        if self.indices is not None:
            maps = backbone.forward_intermediates(images, indices=list(self.indices), intermediates_only=True)
        else:
            last = backbone.forward_features(images)
            maps = [] if self.taps else [last]
        return [tap.take() for tap in self.taps], maps

    def as_map(self, kept: Any, position: int, images: Tensor) -> Tensor:
        """A tapped output as (B, C, H, W)."""
        form = self.forms[position]
        if form == "NCHW":
            return kept
        if form == "NHWC":
            return kept.permute(0, 3, 1, 2)
        if form == "rows, grid":
            rows, grid = kept
        else:  # the grid shrinks with the image
            sides = zip(images.shape[-2:], self.sizes[position], self.image_size, strict=True)
            rows, grid = kept, [side * cells // full for side, cells, full in sides]
        return rows.mT.unflatten(2, tuple(grid))

    @property
    def level(self) -> int:
        """The map that is merged at by default: of the second-smallest size, at stride 16 in most models.

        Negative if there is but one map, and nothing to merge.
        """
        if len(self.sizes) == 1:
            return -1
        heights = sorted({height for height, _ in self.sizes})
        chosen = heights[min(1, len(heights) - 1)]
        return max(1, *(i for i, (height, _) in enumerate(self.sizes) if height == chosen))


def find_pyramid(
    model: nn.Module,
    *,
    indices: Sequence[int] | None = None,
    stem: str | None = None,
    last_only: bool = False,
    in_chans: int | None = None,
    image_size: int | Sequence[int] | None = None,
) -> tuple[nn.Module, Pyramid]:
    """The model as a backbone, and how to obtain its pyramid.

    The model is changed in place: what the maps do not need (classifier, final norm, later blocks) is cut off where
    it knows how to do that.

    Args:
        model: A timm model, or one that offers `forward_intermediates` or `forward_features` likewise.
        indices: Which of the model's intermediate features to take; by default all stages, and of a model whose
            maps are all of one size four evenly spaced blocks.
        stem: Name of the module whose output is the lowest map; "" for none; by default what the model calls a stem,
            unless it lists that among its features or its maps are all of one size.
        last_only: Only the last map is wanted.
        in_chans: Channels of an image; by default as many as the model's first convolution takes.
        image_size: Side or (H, W) that the model was built for; by default what it says itself.

    Raises:
        ValueError: The model offers no feature maps.
    """
    inner: Any = model
    info = _feature_info(inner)
    pyramid = Pyramid(as_pair(image_size) if image_size else built_for(inner), 0)
    if callable(getattr(inner, "forward_intermediates", None)) and info:
        one_size = len(info) > 1 and len({entry.get("reduction") for entry in info}) == 1
        if indices is None:
            indices = _evenly_spaced(len(info)) if one_size else range(len(info))
        indices = list(indices)[-1:] if last_only else list(indices)
        if stem is None or last_only:
            stem = "" if one_size or last_only else _unlisted_stem(inner, info)
        _prune(inner, indices, info)
        taps = (_tap(inner, stem),) if stem else ()
        pyramid = replace(pyramid, indices=tuple(indices), taps=taps)
    elif callable(getattr(inner, "forward_features", None)):
        if hasattr(inner, "reset_classifier"):
            inner.reset_classifier(0)
        listed = [(str(entry["module"]), entry.get("hook_type", "forward")) for entry in info if entry.get("reduction")]
        modules = dict(inner.named_modules())
        if not last_only and listed and all(name in modules for name, _ in listed):
            pyramid = replace(pyramid, taps=tuple(_tap(inner, name, kind) for name, kind in listed))
            for child in inner.children():
                if hasattr(child, "inplace"):  # it would overwrite the map that is kept from the layer before it
                    child.inplace = False
    else:
        raise ValueError(_no_features(model, "it has neither forward_intermediates nor forward_features"))
    channels = [in_chans] if in_chans else image_channels(inner)
    try:
        return inner, _measured(pyramid, inner, channels)
    except ValueError:
        if pyramid.indices is not None or not pyramid.taps:
            raise
    for tap in pyramid.taps:  # what it lists are no maps; its last one may be
        tap.handle.remove()
    return inner, _measured(replace(pyramid, taps=()), inner, channels)


def takes(backbone: nn.Module, pyramid: Pyramid, size: Sequence[int]) -> bool:
    """Whether the model gives its maps for images of another size (H, W), too."""
    probe, like = _Probe(backbone, pyramid), next(backbone.parameters(), torch.empty(0))
    images = torch.zeros(1, pyramid.in_chans, *size, device=like.device, dtype=like.dtype)
    with in_eval_mode(backbone):
        for attempt in (partial(_dry_run, freeze=False), _wet_run):
            with suppress(Exception):
                attempt(probe, images)
                return True
    return False


def _measured(pyramid: Pyramid, backbone: nn.Module, in_chans: Sequence[int]) -> Pyramid:
    """The same with channels and sizes, seen in one pass without arithmetic, or with it where a model insists.

    Args:
        in_chans: What the channels of an image may be; the first that the model takes is right.
    """
    probe = _Probe(backbone, pyramid)
    like = next(backbone.parameters(), torch.empty(0))
    faults = []
    with in_eval_mode(backbone):
        for channels in in_chans:
            images = torch.zeros(1, channels, *pyramid.image_size)
            for attempt in (_dry_run, _wet_run):
                try:
                    tapped, maps = attempt(probe, images.to(like.device, like.dtype))
                    _cut_off_unused(probe, images)
                    return _with_shapes(replace(pyramid, in_chans=channels), tapped, maps, backbone)
                except Exception as error:
                    faults.append(error)
    # What a pass with arithmetic says of the likeliest number of channels.
    fault = next((fault for fault in faults if isinstance(fault, ValueError)), faults[1])
    raise ValueError(_no_features(backbone, first_line(fault))) from fault


def _with_shapes(pyramid: Pyramid, tapped: list[Any], maps: list[Tensor], backbone: nn.Module) -> Pyramid:
    channels, sizes, forms = [], [], []
    for kept in tapped:
        shape, form = _shape_of(kept, getattr(backbone, "output_fmt", None))
        channels.append(shape[0])
        sizes.append(shape[1:])
        forms.append(form)
    for x in maps:
        if not isinstance(x, Tensor) or x.ndim != 4:
            came = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"its features are {came}, not maps (B, C, H, W)")
        channels.append(x.shape[1])
        sizes.append(tuple(x.shape[-2:]))
    return replace(pyramid, channels=tuple(channels), sizes=tuple(sizes), forms=tuple(forms))


def _cut_off_unused(probe: "_Probe", images: Tensor) -> None:
    """Parts of the model that have been found to be of no use to the maps, such as a last wide convolution."""
    unused = {
        name: child
        for name, child in probe.backbone.named_children()
        if any(True for _ in child.parameters()) and probe.unused.issuperset(child.parameters())
    }
    if not unused:
        return
    for name in unused:
        setattr(probe.backbone, name, nn.Identity())
    probe.backbone.train().eval()  # what the first pass left in caches is of no use to a second
    try:
        _dry_run(probe, images, freeze=False)
    except Exception:  # called after all
        for name, child in unused.items():
            setattr(probe.backbone, name, child)


def _wet_run(probe: "_Probe", images: Tensor) -> tuple[list[Any], list[Tensor]]:
    with torch.no_grad():
        return probe(images)


def _dry_run(probe: "_Probe", images: Tensor, freeze: bool = True) -> tuple[list[Any], list[Tensor]]:
    """A pass over tensors without content. On the way, parameters that no map depends on are frozen: none must wait in
    vain for a gradient, which distributed training takes for an error."""
    parameters, buffers = without_content(probe)
    with torch.enable_grad(), undisturbed(probe):
        tapped, maps = call_without_content(probe, parameters | buffers, images.to("meta"))
        seen = [kept[0] if isinstance(kept, tuple) else kept for kept in tapped] + list(maps)
        if freeze and all(isinstance(x, Tensor) and x.requires_grad for x in seen):
            sources = {name: p for name, p in parameters.items() if p.requires_grad}
            total = torch.stack([x.sum() for x in seen]).sum()
            gradients = torch.autograd.grad(total, list(sources.values()), allow_unused=True)
            for name, gradient in zip(sources, gradients, strict=True):
                if gradient is None:
                    probe.unused.add(probe.get_parameter(name).requires_grad_(False))
    return tapped, maps


class _Probe(nn.Module):
    def __init__(self, backbone: nn.Module, pyramid: Pyramid):
        super().__init__()
        self.backbone, self.pyramid = backbone, pyramid
        self.unused: set[nn.Parameter] = set()  # found so; what somebody froze before may well be used

    def forward(self, images: Tensor) -> tuple[list[Any], list[Tensor]]:
        return self.pyramid.run(self.backbone, images)


def _shape_of(kept: Any, output_fmt: Any) -> tuple[tuple[int, int, int], str]:
    """(C, H, W) of a tapped output for a square image, and its form."""
    x, grid = kept if isinstance(kept, tuple) else (kept, None)
    if not isinstance(x, Tensor):
        raise ValueError(f"one of its features is a {type(x).__name__}, not a map (B, C, H, W)")
    if x.ndim == 4:
        _, a, b, c = x.shape
        channels_last = a == b != c or (a == b == c and str(output_fmt) == "NHWC")
        return ((c, a, b), "NHWC") if channels_last else ((a, b, c), "NCHW")
    rows = x.shape[1]
    height, width = grid or (math.isqrt(rows), math.isqrt(rows))
    if height * width != rows:
        raise ValueError(f"the stem gives {rows} tokens, which are no square grid; pass stem='' to do without them")
    return (x.shape[2], int(height), int(width)), "rows" if grid is None else "rows, grid"


def _tap(model: nn.Module, name: str, kind: str = "forward") -> Tap:
    tap, module = Tap(), model.get_submodule(name)
    tap.handle = module.register_forward_pre_hook(tap) if kind == "forward_pre" else module.register_forward_hook(tap)
    return tap


def _feature_info(model: Any) -> list[dict[str, Any]]:
    info = getattr(model, "feature_info", None)
    return list(getattr(info, "info", info) or [])


def _evenly_spaced(blocks: int, count: int = 4) -> list[int]:
    """The last of every quarter: 2, 5, 8, 11 of 12."""
    count = min(count, blocks)
    return [(i + 1) * blocks // count - 1 for i in range(count)]


def _unlisted_stem(model: nn.Module, info: Sequence[dict[str, Any]]) -> str:
    """The name of the model's stem, or "" if it has none or its output is among the features anyway."""
    listed = [str(entry.get("module", "")) for entry in info]
    for name in STEMS:
        stem = getattr(model, name, None)
        if isinstance(stem, nn.Module) and not isinstance(stem, nn.ModuleList):  # a list is never called itself
            return "" if any(module.split(".")[0] == name for module in listed) else name
    return ""


def _prune(model: Any, indices: list[int], info: Sequence[dict[str, Any]]) -> None:
    """Without what the maps do not need."""
    makes_maps = any(str(entry.get("module", "")).startswith("head.") for entry in info)  # in spite of its name
    if hasattr(model, "prune_intermediate_layers"):
        # Some heads cannot be reset to nothing; that of the model goes below anyway.
        model.prune_intermediate_layers(indices, prune_norm=True, prune_head=not isinstance(_head(model), nn.Module))
    elif hasattr(model, "reset_classifier"):
        model.reset_classifier(0)
    if isinstance(_head(model), nn.Module) and not makes_maps:  # a norm or a hidden layer may be left in it
        model.head = nn.Identity()


def _head(model: nn.Module) -> Any:
    return getattr(model, "head", None)


def _no_features(model: nn.Module, reason: str) -> str:
    return f"{type(model).__name__} offers no feature maps to pool: {reason}"
