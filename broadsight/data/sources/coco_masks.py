"""COCO's two ways to write a mask, polygons and run lengths, filled to the pixels that pycocotools fills."""

from array import array
from itertools import pairwise
from typing import Any

import numpy as np

# pycocotools draws outlines on a grid this many times finer than the pixels, so that is what rounding happens on.
FINER = 5
FARTHEST = 100_000  # pixels; an outline is walked in steps, so that one absurd corner would fill the memory
LONGEST = 1_000_000  # pixels of an outline, for the same reason: a thousand corners may be far from each other


class MaskPool:
    """Masks of many annotations in flat arrays: unions of closed outlines on the finer grid, or the lengths of runs."""

    def __init__(self) -> None:
        self._numbers = array("i")  # of all parts
        self._ends = array("q", [0])  # of each part, in numbers
        self._parts = array("q", [0])  # of each mask, in parts
        self._runs = bytearray()  # of each mask: 1 if its part is runs

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, segmentation: Any, height: int, width: int) -> bool:
        """Check and keep the mask of an annotation; False, and nothing kept, if it outlines nothing."""
        if isinstance(segmentation, dict):
            parts = [read_runs(segmentation, height, width)]
        elif isinstance(segmentation, list | None):
            parts = [corners for corners in map(read_polygon, segmentation or ()) if len(corners) >= 6]
        else:
            raise ValueError(f"segmentation is a {type(segmentation).__name__}; expected polygons or run lengths")
        if not parts:
            return False
        for part in parts:
            self._numbers.frombytes(part.astype(np.intc).tobytes())
            self._ends.append(len(self._numbers))
        self._parts.append(len(self._ends) - 1)
        self._runs.append(isinstance(segmentation, dict))
        return True

    def numbers(self, i: int) -> list[np.ndarray]:
        """The numbers of each part of mask i."""
        ends = self._ends[self._parts[i] : self._parts[i + 1] + 1]
        return [np.array(self._numbers[start:end], np.int64) for start, end in pairwise(ends)]

    def draw(self, i: int, height: int, width: int) -> np.ndarray:
        """Mask i as (H, W) booleans."""
        mask = np.zeros(height * width, bool)
        for numbers in self.numbers(i):
            runs = numbers if self._runs[i] else polygon_runs(numbers.reshape(-1, 2), height, width)
            mask |= np.repeat(np.arange(len(runs)) % 2 == 1, runs)
        return mask.reshape(width, height).T


def read_polygon(numbers: Any) -> np.ndarray:
    """Corners x, y, x, y, … on the finer grid; checked."""
    if not isinstance(numbers, list):
        raise ValueError(f"a polygon is {str(numbers)[:40]}; expected a list [x, y, x, y, …] inside of a list")
    corners = np.array(numbers, np.float64)
    if corners.ndim != 1 or len(corners) % 2:
        raise ValueError(f"a polygon has {len(numbers)} numbers; expected pairs [x, y, x, y, …]")
    if not (np.abs(corners) < FARTHEST).all():
        raise ValueError("a polygon has a corner that is no number or far outside of any image")
    places = corners.reshape(-1, 2)
    length = np.abs(places - np.roll(places, -1, 0)).max(1, initial=0).sum()
    if length > LONGEST:
        raise ValueError(f"a polygon has an outline of {length:,.0f} pixels; expected up to {LONGEST:,}")
    return (FINER * corners + 0.5).astype(np.int64)  # towards zero, as C does


def polygon_runs(corners: np.ndarray, height: int, width: int) -> np.ndarray:
    """Lengths of the runs, in turn outside and inside, down the columns of an image, from (P, 2) corners.

    As `rleFrPoly` of pycocotools: where the outline passes the middle of a column, what is below changes sides.
    """
    x, y = corners.T
    to_x, to_y = np.roll(x, -1), np.roll(y, -1)
    flat = abs(to_x - x) >= abs(to_y - y)
    steps = np.maximum(abs(to_x - x), abs(to_y - y))
    # An edge is walked from its left or upper end whichever way it points, since rounding would depend on it.
    flip = np.where(flat, x > to_x, y > to_y)
    x, to_x = np.where(flip, to_x, x), np.where(flip, x, to_x)
    y, to_y = np.where(flip, to_y, y), np.where(flip, y, to_y)
    slope = np.where(flat, to_y - y, to_x - x) / np.maximum(steps, 1)
    edge = np.repeat(np.arange(len(steps)), steps + 1)
    step = np.arange(len(edge)) - np.repeat(np.cumsum(steps + 1) - steps - 1, steps + 1)
    step = np.where(flip[edge], steps[edge] - step, step)
    along = np.where(flat, x, y)[edge] + step
    across = (np.where(flat, y, x)[edge] + slope[edge] * step + 0.5).astype(np.int64)
    u, v = np.where(flat[edge], along, across), np.where(flat[edge], across, along)  # every point of the outline
    moved = u[1:] != u[:-1]
    column = np.where(u[1:] < u[:-1], u[1:], u[1:] - 1)[moved] - FINER // 2
    row = np.minimum(v[1:], v[:-1])[moved] - FINER // 2
    seen = (column % FINER == 0) & (column >= 0) & (column < FINER * width)
    row = np.clip(-(-row[seen] // FINER), 0, height)
    changes = np.sort(column[seen] // FINER * height + row)
    return np.diff(changes, prepend=0, append=height * width)


def read_runs(rle: dict, height: int, width: int) -> np.ndarray:
    """Run lengths of COCO's {"size": [height, width], "counts": list or text}; checked against the image."""
    if "size" not in rle or "counts" not in rle:
        raise ValueError('segmentation is a dict without "size" and "counts"; expected run lengths')
    counts = rle["counts"]
    runs = expand_text(counts) if isinstance(counts, str) else np.asarray(counts)
    if list(rle["size"]) != [height, width]:
        raise ValueError(f"mask has size {rle['size']} but its image [{height}, {width}] (height, width)")
    if runs.ndim != 1 or not (np.issubdtype(runs.dtype, np.integer) and (runs >= 0).all()):
        raise ValueError("run lengths are not whole numbers from 0 up; expected them as a list or as COCO's text")
    if runs.sum() != height * width:
        raise ValueError(f"run lengths add up to {runs.sum()} pixels; the image has {height} x {width}")
    return runs


def expand_text(text: str) -> np.ndarray:
    """Run lengths from COCO's text, whose letters hold five bits of a number, lowest first, and whether more follow."""
    letters = np.frombuffer(text.encode("latin-1", "replace"), np.uint8).astype(np.int64) - 48
    last = np.flatnonzero((letters & 32) == 0)
    first = np.concatenate([[0], last[:-1] + 1])
    if not len(last) or last[-1] != len(letters) - 1 or not ((letters >= 0) & (letters < 64)).all():
        raise ValueError("counts is not COCO's text of run lengths; it is cut off or holds other letters")
    lengths = last - first + 1
    if lengths.max() > 7:  # 35 bits: any image's pixels
        raise ValueError("counts is not COCO's text of run lengths; a number in it is too large")
    place = np.arange(len(letters)) - np.repeat(first, lengths)
    numbers = np.add.reduceat((letters & 31) << (5 * place), first)
    numbers -= np.where(letters[last] & 16, 1 << (5 * lengths), 0)  # the highest bit is the sign
    numbers[1::2] = np.cumsum(numbers[1::2])  # from the fourth on: differences to the number before the last
    numbers[2::2] = np.cumsum(numbers[2::2])
    return numbers
