"""Where a model keeps its feature maps: which module gives each of them, and in what layout."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import nearest
from .layout import MOST_PREFIX_TOKENS, Layout, layouts_of
from .watch import hooked


@dataclass(frozen=True)
class Place:
    """Where a model keeps a map: in the output of a module."""

    module: nn.Module
    item: int | None  # number of the map if the output is a tuple
    layout: Layout
    name: str = ""  # path of the module; of the outermost one if several give the very same tensor
    said: bool = True  # whether the model says that this is a map of its features, rather than having the shape of one

    def tensor(self, output: Any) -> Tensor:
        return output if self.item is None else output[self.item]

    def replaced(self, output: Any, x: Tensor) -> Any:
        """The module's output with another tensor in this place."""
        return x if self.item is None else (*output[: self.item], x, *output[self.item + 1 :])

    def error(self, x: Tensor, wanted: Tensor, scale: float) -> float:
        """How far an output is from that map, as a share of its largest value; infinite if it cannot be that."""
        if not self.layout.suits(x):
            return math.inf
        found = self.layout.as_map(x)
        if found.shape != wanted.shape or not torch.allclose(found[..., 0, 0], wanted[..., 0, 0], 0.1, 1e-2 * scale):
            return math.inf  # one corner tells most others apart, and costs nothing
        return float((found - wanted).abs().max()) / max(scale, 1e-12)


def places_of(model: nn.Module, run: Callable[[Tensor], Any], images: Tensor) -> list[Place]:
    """Where the maps of more than one place are found in a pass over one image, the last first.

    Maps that a model says it has are recognised by their values; if it says nothing these are all that may be maps.
    """
    names = {module: name for name, module in model.named_modules()}
    maps: list[tuple[Tensor, float]] | None = None  # with their largest values
    known: dict[int, tuple[float, Place, int]] = {}
    around: dict[int, list[str]] = {}  # modules that give the very same tensor, from the innermost on
    guesses: dict[Place, None] = {}

    def look(module: nn.Module, inputs: tuple, output: Any) -> None:
        name = names[module]
        for item, x in tensors_in(output) if maps is not None else ():
            if len(x) != 1:
                continue
            if not known and (found := _layout_of(model, x, images)) is not None and min(found.grid) > 1:
                weights = bool((x >= 0).all()) and torch.allclose(x.sum(-1), torch.ones_like(x[..., 0]), atol=1e-3)
                if not weights:  # of an attention
                    guesses[Place(module, item, found, name, said=False)] = None
            for number, (wanted, scale) in enumerate(maps or ()):
                for form in ("NCHW", "NHWC") if x.ndim == 4 else ("NLC",):
                    place = Place(module, item, Layout(form, (wanted.shape[-2], wanted.shape[-1])), name)
                    error = place.error(x, wanted, scale)
                    # Of equals the first: later ones may be a branch that passes it on
                    if error < known.get(number, (1e-3,))[0]:
                        known[number] = error, place, x.data_ptr()
                        around[number] = [name]
                    elif error < 1e-3 and known[number][2] == x.data_ptr() and name:
                        around[number] += [name] * around[number][0].startswith(f"{name}.")

    with hooked(names, after=look), torch.no_grad():
        # Both with hooks, with which a model may take another form, with other roundings
        maps = [(x, float(x.abs().max())) for x in _feature_maps(model, images) if x.shape[-2] * x.shape[-1] > 1]
        run(images)
    # A stage that gives what its last layer gave is the better name for it, unless other maps are in there too
    for number, inside in around.items():
        others = [chain[0] for other, chain in around.items() if other != number]
        while len(inside) > 1 and any(name.startswith(f"{inside[-1]}.") for name in others):
            inside.pop()
    found = [replace(known[number][1], name=around[number][-1]) for number in sorted(known, reverse=True)]
    return found or list(guesses)[::-1]


def place_named(model: nn.Module, run: Callable[[Tensor], Any], images: Tensor, layer: str) -> Place:
    """The map that a module gives, by the module's path; found in a pass over one image."""
    modules = dict(model.named_modules())
    if not layer or layer not in modules:
        near = nearest(layer, [name for name in modules if name], 3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise ValueError(f"{type(model).__name__} has no layer {layer!r}; expected the path of a module{hint}")
    outputs: list[Any] = []
    with hooked([modules[layer]], after=lambda module, inputs, output: outputs.append(output)), torch.no_grad():
        run(images)
    if not outputs:
        raise ValueError(f"layer {layer} takes no part in a pass through {type(model).__name__}; choose another")
    output = outputs[-1]
    for item, x in tensors_in(output):
        if (found := _layout_of(model, x, images)) is not None:
            return Place(modules[layer], item, found, layer)
    shapes = [tuple(x.shape) for x in (output if isinstance(output, tuple) else [output]) if isinstance(x, Tensor)]
    given = f"layer {layer} gives {shapes[0] if shapes else type(output).__name__}"
    raise ValueError(f"{given}, which is no map of several places; choose another layer")


def tensors_in(output: Any) -> Iterator[tuple[int | None, Tensor]]:
    """The tensors of a module's output that may be maps: their number in a tuple, or None if there is one alone."""
    for item, x in enumerate(output) if isinstance(output, tuple) else [(None, output)]:
        if isinstance(x, Tensor) and x.ndim in (3, 4) and x.is_floating_point():
            yield item, x


def _layout_of(model: Any, x: Tensor, images: Tensor) -> Layout | None:
    """How an output holds a map of several places; None if it holds none."""
    said = getattr(model, "num_prefix_tokens", None)
    # Where the model does not say how many tokens come first, a class token and some registers may.
    prefixes = [said] if isinstance(said, int) else range(min(MOST_PREFIX_TOKENS, x.shape[1] // 2) + 1)
    size = (images.shape[-2], images.shape[-1])
    found = layouts_of(x.shape, size, form=getattr(model, "output_fmt", None), prefixes=prefixes)
    return next((layout for layout in found if layout.places > 1), None)


def _feature_maps(model: Any, images: Tensor) -> list[Tensor]:
    """What a model says its maps (B, C, h, w) are, lowest level first; nothing if it does not say."""
    try:
        if hasattr(model, "pyramid"):
            found = [*model.pyramid(model.backbone, images), model.forward_features(images)]
        else:
            found = model.forward_intermediates(images, intermediates_only=True)
    except Exception:  # a model is free not to offer any, in whatever words
        return []
    return [x for x in found if isinstance(x, Tensor) and x.ndim == 4]
