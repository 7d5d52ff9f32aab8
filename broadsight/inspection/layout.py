"""The layout of an unknown model's tensors, guessed from their shape: where channels, places and other tokens are."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

MOST_PREFIX_TOKENS = 16  # class, distillation and register tokens together
CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")


@dataclass(frozen=True)
class Layout:
    """How a tensor holds a map (h, w) of the image: as "NCHW", "NHWC" or "NLC", tokens (B, N, C) in raster order."""

    form: str
    grid: tuple[int, int]
    prefix: int = 0  # tokens before those of the grid: class and register tokens

    @property
    def places(self) -> int:
        return self.grid[0] * self.grid[1]

    def suits(self, x: Tensor) -> bool:
        """Whether a tensor may have this layout."""
        if self.form == "NLC":
            return x.ndim == 3 and x.shape[1] >= self.places
        return x.ndim == 4 and tuple(x.shape[2:] if self.form == "NCHW" else x.shape[1:3]) == self.grid

    def as_map(self, x: Tensor) -> Tensor:
        """The map as a view (B, C, h, w)."""
        if self.form == "NLC":
            return x[:, -self.places :].mT.unflatten(2, self.grid)
        return x.permute(0, 3, 1, 2) if self.form == "NHWC" else x


def layouts_of(
    shape: Sequence[int],
    image_size: tuple[int, int],
    *,
    form: Any = None,
    prefixes: Iterable[int] = (0, 1, 2),
    nearest: bool = False,
) -> list[Layout]:
    """The layouts that a tensor of this shape may have in the image's proportions, the likeliest first.

    Args:
        form: What the model says of its maps (timm's `output_fmt`), which decides where two forms fit.
        prefixes: How many tokens may come before those of the image, the likeliest first.
        nearest: Take also what fits badly, the best first.
    """
    if len(shape) == 4:
        found = [Layout("NCHW", (shape[2], shape[3])), Layout("NHWC", (shape[1], shape[2]))]
        found.sort(key=lambda one: one.form != str(form or "NCHW"))
    elif len(shape) == 3:
        found = []
        for prefix in prefixes:
            count = shape[1] - prefix
            sides = [n for n in range(1, math.isqrt(max(count, 0)) + 1) if count % n == 0]
            grids = {(n, count // n) for n in sides} | {(count // n, n) for n in sides}
            nearest_first = sorted(grids, key=lambda grid: (_skew(grid, image_size), grid))
            found += [Layout("NLC", grid, prefix) for grid in nearest_first]
    else:
        return []
    if nearest:
        return sorted(found, key=lambda one: _skew(one.grid, image_size))
    return [one for one in found if _fits(one.grid, image_size)]


def prefix_tokens(owners: Iterable[Any]) -> tuple[int | None, bool]:
    """How many tokens come before those of the image (None if unknown), and whether a class token is among them.

    The first that says it is right of the owners: a module and all that it is in, from the inside out.
    """
    for owner in owners:
        classes = [x for name in CLASS_TOKENS if isinstance(x := getattr(owner, name, None), Tensor)]
        count = getattr(owner, "num_prefix_tokens", None)
        if not isinstance(count, int):
            if not classes:
                continue
            count = classes[0].shape[1] if classes[0].ndim == 3 else 1
            count += isinstance(getattr(owner, "dist_token", None), Tensor)
        return count, bool(classes)
    return None, False


def path_of(model: nn.Module, name: str) -> list[nn.Module]:
    """The module of that name and all that it is in, from the inside out, as `prefix_tokens` wants them."""
    parts = name.split(".") if name else []
    return [model.get_submodule(".".join(parts[:i])) for i in range(len(parts), -1, -1)]


def _fits(grid: tuple[int, int], image_size: tuple[int, int]) -> bool:
    """Whether the sides are those of the image over a stride, both rounded up or both down."""
    (rows, columns), (height, width) = grid, image_size
    in_proportion = abs(rows * width - columns * height) < max(height, width)
    return in_proportion and 0 < rows <= height and 0 < columns <= width


def _skew(grid: tuple[int, int], image_size: tuple[int, int]) -> float:
    """How far the proportions are from the image's; 0 if they are the same."""
    return abs(math.log(grid[0] * image_size[1] / (grid[1] * image_size[0])))
