"""How a map is cut into the windows or cells among whose tokens a layer attends, and how they are joined again."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .layout import layouts_of

# Attributes of timm's blocks and of our attentions that say how a map is cut into windows, or cells of one token each.
WINDOWS, CELLS = ("window_size", "window", "ws", "partition_size"), ("cell", "patch")

Inputs = dict[Any, list[tuple[int, ...]]]  # of modules: shapes of tensors, and pairs of numbers as they are


@dataclass(frozen=True)
class Windows:
    """A map (H, W) that is padded at the end and cut into windows (h, w), all in raster order."""

    size: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)  # how far it was rolled to the top left before it was padded and cut
    spread: bool = False  # tokens of a window are spread evenly over the map instead, as in MaxViT's grid attention

    @property
    def counts(self) -> tuple[int, int]:
        """Rows and columns of windows."""
        return -(-self.size[0] // self.window[0]), -(-self.size[1] // self.window[1])

    def joined(self, x: Tensor) -> Tensor:
        """Values (..., windows, h*w) at their places, (..., H, W)."""
        x = x.unflatten(-1, self.window).unflatten(-3, self.counts)  # ... p q h w
        order = (-2, -4, -1, -3) if self.spread else (-4, -2, -3, -1)
        x = x.permute(*range(x.ndim - 4), *order).flatten(-4, -3).flatten(-2)
        return x[..., : self.size[0], : self.size[1]].roll(self.shift, (-2, -1))

    def numbers(self) -> Tensor:
        """(H, W), the number of the token at each place, counted through all windows."""
        tokens = math.prod(self.window)
        return self.joined(torch.arange(math.prod(self.counts) * tokens).view(-1, tokens))

    def inside(self) -> Tensor:
        """Which tokens are of the map and not of its padding. -> (windows, h*w), bool."""
        (p, q), (h, w) = self.counts, self.window
        whole = torch.zeros(p * h, q * w, dtype=torch.bool)
        whole[: self.size[0], : self.size[1]] = True
        tokens = whole.view(h, p, w, q).permute(1, 3, 0, 2) if self.spread else whole.view(p, h, q, w).transpose(1, 2)
        return tokens.reshape(p * q, h * w)


def cuts(module: Any) -> bool:
    """Whether the module says that it cuts its map into windows or cells."""
    return _said(module, (*WINDOWS, *CELLS)) is not None


def windows_of(owners: Sequence, inputs: Inputs, image_size: tuple[int, int], count: int, keys: int) -> Windows | None:
    """How the map was cut of which an attention sees `count` windows with `keys` tokens each, if its owners say it."""
    for owner in owners:
        window, cut = _said(owner, WINDOWS), hasattr(owner, "partition_size")
        several = cut and not hasattr(owner, "partition_block")  # ways to cut in one block
        if window is None or several:
            continue
        spread = cut and not owner.partition_block
        shift = _pair(getattr(owner, "shift_size", 0)) or (0, 0)
        for size in _map_sizes(owner, inputs, image_size):
            for sides in dict.fromkeys((window, (min(window[0], size[0]), min(window[1], size[1])))):
                found = Windows(size, sides, shift, spread)
                if math.prod(sides) == keys and math.prod(found.counts) == count:
                    return found
    return None


def cells_of(owners: Sequence[Any], inputs: Inputs, image_size: tuple[int, int], keys: int) -> Windows | None:
    """The map whose cells are the `keys` tokens of an attention among cells; None if it is none, or they fit."""
    for owner in owners:
        cell = _said(owner, CELLS)
        found = [Windows(size, cell) for size in _map_sizes(owner, inputs, image_size)] if cell else []
        for one in found:
            if math.prod(one.counts) == keys and any(n % side for n, side in zip(one.size, one.window, strict=True)):
                return one
    return None


def _map_sizes(owner: Any, inputs: Inputs, image_size: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """What may be the (H, W) of the map that a module was called with, the likeliest first."""
    shapes = inputs.get(owner, [])
    yield from (shape for shape in shapes if len(shape) == 2)  # given as an argument, as timm's Twins does
    for shape in shapes:
        if len(shape) == 4:
            form = "NCHW" if getattr(owner, "dim", None) == shape[1] != shape[3] else "NHWC"
            yield from (layout.grid for layout in layouts_of(shape, image_size, form=form))


def _said(owner: Any, names: Sequence[str]) -> tuple[int, int] | None:
    return next((pair for name in names if (pair := _pair(getattr(owner, name, None)))), None)


def _pair(x: Any) -> tuple[int, int] | None:
    if isinstance(x, int) and not isinstance(x, bool):
        return (x, x) if x > 0 else None
    if isinstance(x, Sequence | torch.Size) and len(x) == 2 and all(isinstance(i, int) for i in x):
        return (x[0], x[1])
    return None
