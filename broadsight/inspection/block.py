"""A block of a model, and how the map that it gives is read."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from .map_places import Place


@dataclass(frozen=True)
class Block(Place):
    """A block of a model and how to read the map that it gives.

    Args:
        module, item, form, grid, name: As of a Place; the grid is that of images of `image_size`.
        prefix: Tokens before those of the grid: class and register tokens.
        image_size: (H, W) of the images that it was found with.
        reorder: (B, N, C) -> (B, h, w, C), for a model that does not keep its tokens row by row.
    """

    prefix: int = 0
    image_size: tuple[int, int] = (0, 0)
    reorder: Callable[[Tensor], Tensor] | None = field(default=None, repr=False, compare=False)

    def map_of(self, output: Any, image_size: tuple[int, int]) -> Tensor:
        """What the module gave for images of that size, as a view (B, C, h, w)."""
        x = self.tensor(output)
        if self.reorder is not None:
            return self.reorder(x).permute(0, 3, 1, 2)
        if self.form != "rows" or image_size == self.image_size:
            return self.as_map(x)
        grid = grid_of(x.shape[1] - self.prefix, image_size)
        if grid is None:
            raise ValueError(
                f"{self.name} gives {x.shape[1]} tokens for an image of {image_size[0]}x{image_size[1]}, which are no "
                f"grid after {self.prefix} others; pass images of {self.image_size[0]}x{self.image_size[1]}"
            )
        return replace(self, grid=grid).as_map(x)


def grids_of(x: Tensor) -> dict[str, tuple[int, int]]:
    """(h, w) of a tensor of four axes by its form, whichever that is."""
    return {"NCHW": (x.shape[2], x.shape[3]), "NHWC": (x.shape[1], x.shape[2])}


def is_grid(grid: tuple[int, int], size: tuple[int, int]) -> bool:
    """Whether a map of more than one place has the image's proportions, but for what is rounded at its sides."""
    (rows, columns), (height, width) = grid, size
    fits = abs(rows * width - columns * height) < max(height, width)
    return fits and rows * columns > 1 and rows <= height and columns <= width


def grid_of(count: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """(h, w) of so many tokens in the proportions of an image of that size, or None."""
    possible = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
    fitting = [grid for grid in possible if is_grid(grid, size)]
    return min(fitting, key=lambda grid: abs(math.log(grid[0] * size[1] / (grid[1] * size[0]))), default=None)
