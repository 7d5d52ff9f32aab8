"""Where in an image the tokens of an attention are: on a grid, behind a class token, or in windows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Attributes of timm's blocks and of our attentions that say how a map is cut into windows.
WINDOWS = ("window_size", "window", "ws", "partition_size")
# The same for attentions among cells of a map, each of which is one token.
CELLS = ("cell", "patch")
CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")


@dataclass(frozen=True)
class Windows:
    """A map that is cut into windows, in raster order, each with its tokens in raster order.

    Args:
        size: (H, W) of the map; it was padded at the end up to whole windows.
        window: (h, w) of a window.
        shift: How far the map was rolled to the top left before it was padded and cut.
        spread: The tokens of a window are spread evenly over the map instead, as in MaxViT's grid attention.
    """

    size: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    spread: bool = False

    @property
    def counts(self) -> tuple[int, int]:
        """Rows and columns of windows."""
        return -(-self.size[0] // self.window[0]), -(-self.size[1] // self.window[1])

    def joined(self, x: Tensor) -> Tensor:
        """Values (..., windows, h*w) at their places, (..., H, W)."""
        x = x.unflatten(-1, self.window).unflatten(-3, self.counts)  # ... p q h w
        order = (-2, -4, -1, -3) if self.spread else (-4, -2, -3, -1)
        lead = range(x.ndim - 4)
        x = x.permute(*lead, *(x.ndim + i for i in order)).flatten(-4, -3).flatten(-2)
        return x[..., : self.size[0], : self.size[1]].roll(self.shift, (-2, -1))

    def inside(self) -> Tensor:
        """Which tokens are of the map and not of its padding. -> (windows, h*w), bool."""
        (p, q), (h, w) = self.counts, self.window
        whole = torch.zeros(p * h, q * w, dtype=torch.bool)
        whole[: self.size[0], : self.size[1]] = True
        if self.spread:
            return whole.view(h, p, w, q).permute(1, 3, 0, 2).reshape(p * q, h * w)
        return whole.view(p, h, q, w).transpose(1, 2).reshape(p * q, h * w)


def cuts(module: Any) -> bool:
    """Whether the module says that it cuts its map into windows or cells."""
    return any(_pair(getattr(module, name, None)) for name in (*WINDOWS, *CELLS))


def windows_of(
    owners: Sequence[Any], inputs: dict[Any, list[tuple[int, ...]]], count: int, keys: int
) -> Windows | None:
    """How the map was cut of which an attention sees `count` windows with `keys` tokens each; None if none tells.

    Args:
        owners: The attention and the block around it, which may say it.
        inputs: What each of them was called with: shapes of tensors, and pairs of numbers as they are.
    """
    for owner in owners:
        window = next((pair for name in WINDOWS if (pair := _pair(getattr(owner, name, None)))), None)
        if window is None or window[0] * window[1] != keys:
            continue
        spread = hasattr(owner, "partition_size") and not getattr(owner, "partition_block", True)
        if hasattr(owner, "partition_size") and not hasattr(owner, "partition_block"):
            continue  # several ways to cut in one block
        shift = _pair(getattr(owner, "shift_size", 0)) or (0, 0)
        for size in sizes_of(inputs.get(owner, []), getattr(owner, "dim", None)):
            found = Windows(size, window, (shift[0], shift[1]), spread)
            if math.prod(found.counts) == count:
                return found
    return None


def sizes_of(inputs: Sequence[tuple[int, ...]], channels: int | None = None) -> Iterator[tuple[int, int]]:
    """What may be the (H, W) of the map that a module was called with, the likeliest first."""
    for shape in inputs:
        if len(shape) == 2:  # given in so many words, as timm's Twins does
            yield shape[0], shape[1]
    for shape in inputs:
        if len(shape) == 4:
            last, first = (shape[1], shape[2]), (shape[2], shape[3])  # where the channels are
            yield from (first, last) if channels == shape[1] != shape[3] else (last, first)


def cells_of(owners: Sequence[Any], inputs: dict[Any, list[tuple[int, ...]]], keys: int) -> Windows | None:
    """The map whose cells are the `keys` tokens of an attention among cells; None if it is none, or they fit."""
    for owner in owners:
        cell = next((pair for name in CELLS if (pair := _pair(getattr(owner, name, None)))), None)
        if cell is None:
            continue
        for size in sizes_of(inputs.get(owner, []), getattr(owner, "dim", None)):
            found = Windows(size, cell)
            if math.prod(found.counts) == keys and (size[0] % cell[0] or size[1] % cell[1]):
                return found
    return None


def grid_of(keys: int, prefixes: Sequence[int], size: tuple[int, int]) -> tuple[int, int, int] | None:
    """(prefix, h, w): so many tokens that stand for no place, then h x w in raster order, shaped like the image.

    Args:
        keys: All tokens.
        prefixes: How many of them may come before, the likeliest first.
        size: (H, W) of the image.
    """
    best: tuple[float, int, int, int] | None = None
    for prefix in prefixes:
        tokens = keys - prefix
        for h in range(1, tokens + 1):
            w, rest = divmod(tokens, h)
            # Strides are the same both ways, and rounding takes or gives less than a place.
            low, high = max(size[0] / (h + 1), size[1] / (w + 1)), _least(size[0], h - 1, size[1], w - 1)
            if rest or low >= high:
                continue
            misfit = abs(math.log(h * size[1] / (w * size[0])))
            if best is None or misfit < best[0] - 1e-9:
                best = misfit, prefix, h, w
    return best[1:] if best else None


def prefixes_of(path: Sequence[Any]) -> tuple[list[int], bool]:
    """How many tokens may come before those of the image, the likeliest first, and whether one is a class token.

    Args:
        path: The attention and all that it is in, from the inside out.
    """
    for owner in path:
        classes = [x for name in CLASS_TOKENS if isinstance(x := getattr(owner, name, None), Tensor)]
        count = getattr(owner, "num_prefix_tokens", None)
        if not isinstance(count, int):
            if not classes:
                continue
            count = classes[0].shape[1] if classes[0].ndim == 3 else 1
            count += isinstance(getattr(owner, "dist_token", None), Tensor)
        return [count, 0] if count else [0], bool(classes)
    return [0], False


def path_of(model: nn.Module, name: str) -> list[nn.Module]:
    """The module of that name and all that it is in, from the inside out."""
    parts = name.split(".") if name else []
    return [model.get_submodule(".".join(parts[:i])) for i in range(len(parts), -1, -1)]


def _pair(x: Any) -> tuple[int, int] | None:
    if isinstance(x, int) and not isinstance(x, bool):
        return (x, x) if x > 0 else None
    if isinstance(x, Sequence | torch.Size) and len(x) == 2 and all(isinstance(i, int) for i in x):
        return (x[0], x[1])
    return None


def _least(a: float, over_a: int, b: float, over_b: int) -> float:
    return min(a / over_a if over_a else math.inf, b / over_b if over_b else math.inf)
