"""Where a model keeps its feature maps: which module gives each of them, and in what form."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import nearest

FORMS = {"NHWC": "NHWC", "NLC": "rows"}  # as timm's models say of themselves


@dataclass(frozen=True)
class Place:
    """Where a model keeps a map.

    Args:
        module: Whose output it is, and
        item: which of a tuple's.
        form: "NCHW", "NHWC", or "rows" (B, N, C) with other tokens first.
        grid: (h, w)
        name: Path of the module; of the outermost one if several give the very same tensor.
        said: Whether the model says that this is a map of its features; else it only looks like one.
    """

    module: nn.Module
    item: int | None
    form: str
    grid: tuple[int, int]
    name: str = ""
    said: bool = True

    def tensor(self, output: Any) -> Tensor:
        return output if self.item is None else output[self.item]

    def replaced(self, output: Any, x: Tensor) -> Any:
        """The module's output with another tensor in this place."""
        return x if self.item is None else (*output[: self.item], x, *output[self.item + 1 :])

    def suits(self, x: Tensor) -> bool:
        """Whether an output may be this map: a module that is called several times gives others too."""
        if self.form == "rows":
            return x.ndim == 3 and x.shape[1] >= self.grid[0] * self.grid[1]
        return x.ndim == 4 and tuple(x.shape[2:] if self.form == "NCHW" else x.shape[1:3]) == self.grid

    def as_map(self, x: Tensor) -> Tensor:
        """(B, C, h, w)"""
        if self.form == "rows":
            return x[:, -self.grid[0] * self.grid[1] :].mT.unflatten(2, self.grid)
        return x.permute(0, 3, 1, 2) if self.form == "NHWC" else x

    def error(self, x: Tensor, wanted: Tensor, scale: float) -> float:
        """How far an output is from that map, as a share of its largest value; infinite if it cannot be that."""
        if not self.suits(x):
            return math.inf
        found = self.as_map(x)
        if found.shape != wanted.shape or not torch.allclose(found[..., 0, 0], wanted[..., 0, 0], 0.1, 1e-2 * scale):
            return math.inf  # one corner tells most others apart, and costs nothing
        return float((found - wanted).abs().max()) / max(scale, 1e-12)


def places_of(model: nn.Module, run: Callable[[Tensor], Any], images: Tensor) -> list[Place]:
    """Where the maps of more than one place are found in a pass over one image, the last first.

    A model says what its maps are (as pyramid.py has it), not where: they are known again by their values, whatever
    the form in which a module gives them. Of a model that says nothing, all outputs that may be maps.

    Args:
        run: A plain pass; modules that take no part in it are of no use.
    """
    names = {module: name for name, module in model.named_modules()}
    maps: list[Tensor] | None = None
    scales: list[float] = []
    known: dict[int, tuple[float, Place, int]] = {}
    around: dict[int, list[str]] = {}  # modules that give the very same tensor, from the innermost on
    guesses: dict[Place, None] = {}

    def look(module: nn.Module, inputs: tuple, output: Any) -> None:
        several = isinstance(output, tuple)
        for item, x in enumerate(output if several else (output,)):
            if not isinstance(x, Tensor) or x.ndim not in (3, 4) or len(x) != 1 or not x.is_floating_point():
                continue
            where = item if several else None
            if maps is not None and not known and (found := _guessed(model, x, images)) is not None:
                guesses[Place(module, where, *found, name=names[module], said=False)] = None
            for number, wanted in enumerate(maps or ()):
                for form in ("NCHW", "NHWC") if x.ndim == 4 else ("rows",):
                    place = Place(module, where, form, (wanted.shape[-2], wanted.shape[-1]), names[module])
                    error = place.error(x, wanted, scales[number])
                    # Of equals the first: later ones may be a branch that passes it on
                    if error < known.get(number, (1e-3,))[0]:
                        known[number] = error, place, x.data_ptr()
                        around[number] = [names[module]]
                    elif error < 1e-3 and known[number][2] == x.data_ptr() and names[module]:
                        around[number] += [names[module]] * around[number][0].startswith(f"{names[module]}.")

    with _looking(model, look), torch.no_grad():
        # Both with hooks: where somebody looks, a model may take another way, with other roundings
        maps = [x for x in feature_maps(model, images) if x.shape[-2] * x.shape[-1] > 1]
        scales += [float(x.abs().max()) for x in maps]
        run(images)
    # A stage that gives what its last layer gave is the better name for it, unless other maps are in there too
    for number, inside in around.items():
        others = [chain[0] for other, chain in around.items() if other != number]
        while len(inside) > 1 and any(name.startswith(f"{inside[-1]}.") for name in others):
            inside.pop()
    said = [replace(known[number][1], name=around[number][-1]) for number in sorted(known, reverse=True)]
    return said or list(guesses)[::-1]


def place_named(model: nn.Module, run: Callable[[Tensor], Any], images: Tensor, layer: str) -> Place:
    """The map that a module gives, by the module's path; found in a pass over one image.

    Raises:
        ValueError: There is no such module, or what it gives is no map of more than one place.
    """
    modules = dict(model.named_modules())
    if not layer or layer not in modules:
        near = nearest(layer, [name for name in modules if name], 3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise ValueError(f"{type(model).__name__} has no layer {layer!r}; expected the path of a module{hint}")
    outputs: list[Any] = []
    handle = modules[layer].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        with torch.no_grad():
            run(images)
    finally:
        handle.remove()
    if not outputs:
        raise ValueError(f"layer {layer} takes no part in a pass through {type(model).__name__}; choose another")
    several = isinstance(outputs[-1], tuple)
    for item, x in enumerate(outputs[-1] if several else (outputs[-1],)):
        found = _form_of(model, x, images) if isinstance(x, Tensor) and x.is_floating_point() else None
        if found is not None:
            return Place(modules[layer], item if several else None, *found, name=layer)
    shapes = [tuple(x.shape) for x in (outputs[-1] if several else (outputs[-1],)) if isinstance(x, Tensor)]
    raise ValueError(
        f"layer {layer} gives {shapes[0] if shapes else type(outputs[-1]).__name__}, which is no map of several "
        "places; choose another layer"
    )


def _form_of(model: Any, x: Tensor, images: Tensor) -> tuple[str, tuple[int, int]] | None:
    """In what form an output is a map, and its grid; None if it is none."""
    height, width = images.shape[-2:]
    if x.ndim == 4:
        said = FORMS.get(str(getattr(model, "output_fmt", "")), "")
        grids = {"NCHW": (x.shape[2], x.shape[3]), "NHWC": (x.shape[1], x.shape[2])}
        fitting = {form: grid for form, grid in grids.items() if _proportional(grid, (height, width))}
        chosen = said if said in fitting else next(iter(fitting), None)
        return (chosen, fitting[chosen]) if chosen else None
    if x.ndim != 3:
        return None
    first = getattr(model, "num_prefix_tokens", None)
    grids = {
        (rows, columns)
        for side in range(1, min(height, width) + 1)
        for rows in {height // side, -(-height // side)}
        for columns in {width // side, -(-width // side)}
        if 1 < rows * columns <= x.shape[1] and (not isinstance(first, int) or rows * columns + first == x.shape[1])
    }
    best = min(grids, key=lambda grid: (x.shape[1] - grid[0] * grid[1], _skew(grid, (height, width))), default=None)
    # Without a word on how many tokens come first, some registers and a class token may; half of all may not
    if best is None or 2 * best[0] * best[1] < x.shape[1]:
        return None
    return "rows", best


def _proportional(grid: tuple[int, int], size: tuple[int, int]) -> bool:
    (rows, columns), (height, width) = grid, size
    return 1 < rows * columns <= height * width and abs(rows * width - columns * height) < max(height, width)


def _skew(grid: tuple[int, int], size: tuple[int, int]) -> float:
    return abs(math.log(grid[0] * size[1] / (grid[1] * size[0])))


class _looking:
    """A forward hook on every module, for as long as this lasts."""

    def __init__(self, model: nn.Module, look: Callable[..., None]):
        self.model, self.look = model, look

    def __enter__(self) -> None:
        self.handles = [module.register_forward_hook(self.look) for module in self.model.modules()]

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


def _guessed(model: Any, x: Tensor, images: Tensor) -> tuple[str, tuple[int, int]] | None:
    """The form and grid of an output (1, …) that looks like a map: in proportion, and no weights of an attention."""
    found = _form_of(model, x, images)
    if found is None or min(found[1]) < 2:
        return None
    weights = bool((x >= 0).all()) and torch.allclose(x.sum(-1), torch.ones_like(x[..., 0]), atol=1e-3)
    return None if weights else found


def feature_maps(model: Any, images: Tensor) -> list[Tensor]:
    """What a model says its maps (B, C, h, w) are, lowest level first; nothing if it does not say."""
    try:
        if hasattr(model, "pyramid"):
            found = [*model.pyramid(model.backbone, images), model.forward_features(images)]
        else:
            found = model.forward_intermediates(images, intermediates_only=True)
    except Exception:  # a model is free not to offer any, in whatever words
        return []
    return [x for x in found if isinstance(x, Tensor) and x.ndim == 4]
