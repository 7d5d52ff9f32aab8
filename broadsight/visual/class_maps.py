"""Maps of classes: over their image, and as files that hold the classes themselves."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from PIL import Image

from .canvas import array, blend, by, class_name, enlarged, line_width
from .colours import WHITE, colour
from .lettering import MOST, WIDEST, Entry, chip_size, draw_labels, fitting, letter_size, with_legend

IGNORED = 255  # what masks hold, by convention, where no class is


def draw_semantic(
    image: Image.Image,
    classes: ArrayLike | torch.Tensor,
    class_names: Sequence[str],
    *,
    opacity: float = 0.55,
    labels: bool = True,
    legend: bool = True,
) -> Image.Image:
    """A map of classes over its image, in RGB; a small image is enlarged by a whole factor.

    Args:
        classes: (H, W), whole numbers from 0; where they are 255, for no class, the image is left as it is.
        class_names: From class 0.
        opacity: Of the colours; 0 shows only the image, 1 only the map.
        labels: Whether to write names on regions that have room for them.
        legend: Whether to list the classes that occur, the largest first, with their share of all pixels.
    """
    indices = _indices(classes)
    if indices.shape != (image.height, image.width):
        what = f"classes are {by(indices.shape[::-1])}, the image is {by(image.size)}"
        raise ValueError(f"{what}; expected a class for each pixel")
    valid = indices[indices != IGNORED]
    if (valid < 0).any():
        raise ValueError(f"classes hold {valid.min()}; expected whole numbers from 0, or {IGNORED} for no class")
    present = np.bincount(valid)  # pixels by class
    here = sorted(np.flatnonzero(present).tolist(), key=lambda index: (-present[index], index))
    canvas, factor = enlarged(image)
    shown = indices.repeat(factor, 0).repeat(factor, 1)
    table = np.zeros((max(len(present), 1), 3), np.uint8)
    table[here] = np.array([colour(index) for index in here], np.uint8).reshape(-1, 3)
    pixels = np.array(canvas)
    border = _borders(shown, max(1, line_width(canvas) // 2))
    for top in range(0, len(pixels), 256):  # in strips: a large image in floating point would fill the memory
        rows = slice(top, top + 256)
        known = shown[rows] != IGNORED
        painted = blend(pixels[rows], np.take(table, np.where(known, shown[rows], 0), axis=0), opacity)
        painted[border[rows]] = WHITE
        painted[~known] = pixels[rows][~known]
        pixels[rows] = painted
    canvas = Image.fromarray(pixels)
    if labels:
        _name_regions(canvas, shown, here[:MOST], class_names)
    if not legend:
        return canvas
    entries = []
    for index in here:
        share = 100 * present[index] / indices.size
        amount = f"{share:.1f} %" if share >= 0.05 else "< 0.1 %"
        entries.append(Entry(class_name(class_names, index), amount, (colour(index),)))
    return with_legend(canvas, entries, "nothing found")


def palette_png(classes: ArrayLike | torch.Tensor) -> Image.Image:
    """Classes (H, W) as an image of mode P, whose values are the classes; 255, which means no class, is white."""
    indices = _indices(classes)
    if indices.size and not 0 <= indices.min() <= indices.max() <= 255:
        what = f"classes go from {indices.min()} to {indices.max()}"
        raise ValueError(f"{what}; a palette has 0 to 255, save more as 16-bit grey PNG")
    image = Image.frombytes("P", indices.shape[::-1], indices.astype(np.uint8).tobytes())
    image.putpalette([part for i in range(256) for part in (WHITE if i == IGNORED else colour(i))])
    return image


def _indices(classes: ArrayLike | torch.Tensor) -> np.ndarray:
    indices = array(classes)
    if indices.ndim != 2 or indices.dtype.kind not in "iub":
        what = f"classes have shape {indices.shape} and type {indices.dtype}"
        raise ValueError(f"{what}; expected (H, W) of whole numbers, logits.argmax(1)[0] for instance")
    return indices.astype(np.int64)


def _name_regions(canvas: Image.Image, shown: np.ndarray, here: Sequence[int], class_names: Sequence[str]) -> None:
    """A chip in the middle of each class that is high enough for one."""
    size = letter_size(canvas)
    step = -(-max(shown.shape) // 96)  # the middle is found on a coarse map
    coarse = shown[step // 2 :: step, step // 2 :: step]
    boxes, names, colours = [], [], []
    for index in here:
        x, y, radius = (step * value for value in _middle(coarse == index))
        name = class_name(class_names, index)
        width, height = chip_size(*fitting(name, size, WIDEST * size), size)
        if 2 * radius > height:
            left, bottom = round(x - width / 2), round(y + height / 2)
            boxes.append((left, bottom, left + width - 1, bottom))
            names.append(name)
            colours.append(colour(index))
    draw_labels(canvas, boxes, names, [""] * len(names), colours)


def _middle(region: np.ndarray) -> tuple[float, float, int]:
    """The place x, y in a region (H, W) that is farthest from its outline, and its distance from that."""
    radius, core, inner = -1, region, region
    while inner.any():
        radius, core, inner = radius + 1, inner, np.pad(inner, 1)
        inner = core & inner[:-2, 1:-1] & inner[2:, 1:-1] & inner[1:-1, :-2] & inner[1:-1, 2:]
    if radius < 0:
        return 0.0, 0.0, 0
    places = np.argwhere(core) + 0.5
    y, x = places[abs(places - places.mean(0)).sum(1).argmin()]
    return float(x), float(y), radius


def _borders(indices: np.ndarray, width: int) -> np.ndarray:
    """Pixels with another class up to `width` pixels to the right or below."""
    borders = np.zeros(indices.shape, bool)
    for step in range(1, width + 1):
        borders[:, :-step] |= indices[:, :-step] != indices[:, step:]
        borders[:-step] |= indices[:-step] != indices[step:]
    return borders
