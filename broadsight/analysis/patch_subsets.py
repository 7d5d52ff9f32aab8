"""Images of which only some patches are shown: which ones, for interactions of every order, and how they look."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Design:
    """Which masked images are shown.

    Args:
        grid: Patches from top to bottom, and from left to right.
        orders: Context sizes, each once, ascending.
        pairs: How many are drawn, as many as there are at most.
        contexts: How many are drawn of each pair and order, at most.
    """

    grid: tuple[int, int]
    orders: tuple[int, ...]
    pairs: int
    contexts: int

    @property
    def patches(self) -> int:
        return math.prod(self.grid)

    def drawn(self, order: int) -> int:
        return min(self.contexts, math.comb(self.patches - 2, order))

    def complete(self, order: int) -> bool:
        return math.comb(self.patches - 2, order) <= self.contexts

    def subsets(self, draw: random.Random) -> Iterator[tuple[int, ...]]:
        """The patches that are there: all; then by pair, order and context, the context alone, with i, j, and both."""
        yield tuple(range(self.patches))
        for number in draw.sample(range(math.comb(self.patches, 2)), self.pairs):
            j = (1 + math.isqrt(1 + 8 * number)) // 2  # pairs i < j are numbered by j, then i
            i = number - math.comb(j, 2)
            others = [patch for patch in range(self.patches) if patch not in (i, j)]
            for order in self.orders:
                if self.complete(order):
                    around = combinations(others, order)
                else:
                    around = _different(draw, others, order, self.contexts)
                for context in around:
                    yield from (context, (*context, i), (*context, j), (*context, i, j))

    def interactions(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of all subsets but the first -> (pairs, orders) mean over contexts, and the variance of that mean."""
        alone, with_i, with_j, both = scores.view(self.pairs, -1, 4).unbind(-1)
        parts = (both - with_i - with_j + alone).split([self.drawn(order) for order in self.orders], 1)
        means = torch.stack([part.mean(1) for part in parts], 1)
        variances = []
        for order, part in zip(self.orders, parts, strict=True):
            if self.complete(order):
                variances.append(torch.zeros_like(part[:, 0]))
            elif self.contexts == 1:  # which has no scatter
                variances.append(torch.full_like(part[:, 0], math.nan))
            else:
                untaken = 1 - self.contexts / math.comb(self.patches - 2, order)
                variances.append(part.var(1) / self.contexts * untaken)
        return means, torch.stack(variances, 1)


def _different(draw: random.Random, patches: list[int], order: int, count: int) -> Iterator[tuple[int, ...]]:
    taken = set()
    while len(taken) < count:
        subset = tuple(sorted(draw.sample(patches, order)))
        if subset not in taken:
            taken.add(subset)
            yield subset


def designed(grid: int | Sequence[int], orders: float | Sequence[float], pairs: int, contexts: int) -> Design:
    """A design with orders in numbers of patches; ValueError for what cannot be drawn."""
    sides = (grid, grid) if isinstance(grid, int) else tuple(grid)
    if len(sides) != 2 or not all(isinstance(n, int) and n > 0 for n in sides) or math.prod(sides) < 2:
        raise ValueError(f"grid={grid} has no two patches; pass (rows, columns), such as (16, 16)")
    for name, number in (("pairs", pairs), ("contexts", contexts)):
        if number < 1:
            raise ValueError(f"{name}={number} measures nothing; choose 1 or more")
    patches, sizes = math.prod(sides), set()
    for order in orders if isinstance(orders, Sequence) else [orders]:
        share = not isinstance(order, int)
        if not isinstance(order, int | float) or not 0 <= order <= (1 if share else patches - 2):
            meant = "a share of the patches, 0 to 1" if share else f"a number of patches, 0 to {patches - 2}"
            raise ValueError(f"orders hold {order}; expected {meant}")
        sizes.add(min(round(order * patches), patches - 2) if share else int(order))
    if not sizes:
        raise ValueError("orders are empty; pass shares of the patches, such as 0.05, 0.5 and 0.95")
    return Design((sides[0], sides[1]), tuple(sorted(sizes)), min(pairs, math.comb(patches, 2)), contexts)


def masked(
    image: Tensor, subsets: Iterator[tuple[int, ...]], grid: tuple[int, int], baseline: Any, batch_size: int
) -> Iterator[Tensor]:
    """Of an image (C, H, W), batches in which only the patches of each subset are there."""
    (channels, *size), (height, width) = image.shape, grid
    if size[0] < height or size[1] < width:
        raise ValueError(f"an image of {size[0]}x{size[1]} has no {height}x{width} patches; choose a smaller grid")
    absent = torch.as_tensor(baseline, dtype=image.dtype, device=image.device)
    if absent.numel() not in (1, channels):
        raise ValueError(f"baseline has {absent.numel()} values; expected 1 or one for each of {channels} channels")
    rows, columns = (torch.arange(n, device=image.device) * cells // n for n, cells in zip(size, grid, strict=True))
    while chosen := list(islice(subsets, batch_size)):
        there = torch.zeros(len(chosen), height * width, dtype=torch.bool)
        images = [number for number, subset in enumerate(chosen) for _ in subset]
        there[images, [patch for subset in chosen for patch in subset]] = True
        there = there.to(image.device).view(-1, 1, height, width)[:, :, rows][..., columns]  # B 1 H W
        yield torch.where(there, image, absent.view(-1, 1, 1))
