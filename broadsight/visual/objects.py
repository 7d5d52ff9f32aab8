"""Predictions of dense models drawn on images: boxes, masks, skeletons and maps of classes, each with a legend."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from PIL import Image, ImageDraw

from .canvas import array, blend, by, class_name, enlarged, line_width, resampling
from .colours import WHITE, Colour, colour, ink
from .lettering import MOST, WIDEST, Entry, chip_size, draw_labels, fitting, letter_size, with_legend
from .lettering import side_by_side as side_by_side

IGNORED = 255  # what masks hold, by convention, where no class is
FINER = 4  # skeletons are drawn larger by this and then reduced, so that slanted lines are smooth
COLUMNS = ("boxes", "labels", "scores", "masks", "keypoints", "keypoints_scores")


def draw_objects(
    image: Image.Image,
    prediction: Mapping[str, Any],
    class_names: Sequence[str],
    *,
    threshold: float = 0.5,
    skeleton: Sequence[tuple[int, int]] = (),
    keypoint_threshold: float = 0.3,
    legend: bool = True,
) -> Image.Image:
    """Objects on their image, in RGB; a small image is enlarged by a whole factor. A legend counts them by class.

    Args:
        prediction: As of detectors: boxes (M, 4) x1 y1 x2 y2, labels (M,) from 1, scores (M,) 0 to 1 and optionally
            masks (M, 1, H, W) or (M, H, W), keypoints (M, K, 3) and keypoints_scores (M, K); a target has no scores.
        threshold, keypoint_threshold: The lowest score that is drawn, and of keypoints_scores, in the model's own unit.
        skeleton: Pairs of keypoints, from 0, that are joined by a limb.
    """
    objects, (canvas, factor) = _kept(prediction, threshold, image.size), enlarged(image)
    width = line_width(canvas)
    labels, scores, points = objects["labels"], objects.get("scores"), objects.get("keypoints")
    by_instance = points is not None and len(class_names) == 1  # with one class, colours distinguish the objects
    colours = [colour(int(index)) for index in (np.arange(len(labels)) if by_instance else labels - 1)]
    boxes = [_pixels(box, factor, canvas.size) for box in objects["boxes"]]
    worst_first = range(len(labels) - 1, -1, -1)  # the highest score is drawn last, on top
    if "masks" in objects:
        for i in worst_first:
            _draw_mask(canvas, objects["masks"][i], colours[i], width)
    for i in worst_first:
        ImageDraw.Draw(canvas).rectangle(boxes[i], outline=colours[i], width=width)
    if points is not None:
        if max(map(max, skeleton), default=-1) >= points.shape[1]:
            raise ValueError(f"skeleton joins keypoint {max(map(max, skeleton))}; there are {points.shape[1]}, from 0")
        seen = (points[:, :, 2] > 0) & (objects.get("keypoints_scores", np.inf) >= keypoint_threshold)
        for i in worst_first:
            _draw_skeleton(canvas, points[i, :, :2] * factor, seen[i], skeleton, colours[i], width)
    names = [class_name(class_names, int(label) - 1) for label in labels]
    amounts = [""] * len(names) if scores is None else [f"{score:.2f}" for score in scores]
    # With many objects, boxes narrower than their label show only the score: names are in the legend
    draw_labels(canvas, boxes, names, amounts, colours, brief=legend and len(names) > 12)
    if not legend:
        return canvas
    entries = []
    for label, count in sorted(Counter(labels.tolist()).items(), key=lambda pair: (-pair[1], pair[0])):
        swatch = tuple(colours[:4]) if by_instance else (colour(label - 1),)
        entries.append(Entry(class_name(class_names, label - 1), f"{count:,}", swatch))
    above = "" if scores is None else f" with a score of {threshold:g} or more"
    return with_legend(canvas, entries, f"nothing found{above}")


def _kept(objects: Mapping[str, Any], threshold: float, size: tuple[int, int]) -> dict[str, Any]:
    """Objects with finite boxes and high enough scores as arrays, the best first. Masks stay on their device."""
    kept = {name: objects[name] for name in COLUMNS if objects.get(name) is not None}
    kept |= {name: array(values).astype(np.float64) for name, values in kept.items() if name != "masks"}
    kept["boxes"], kept["labels"] = kept["boxes"].reshape(-1, 4), kept["labels"].reshape(-1).astype(np.int64)
    counts = {name: len(values) for name, values in kept.items() if name != "keypoints_scores"}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(f"prediction has {said}; expected as many of each")
    if (kept["labels"] < 1).any():
        raise ValueError(f"prediction has label {kept['labels'].min()}; expected labels from 1, 0 is the background")
    masks = kept.get("masks", ())
    if len(masks) and tuple(masks.shape[-2:]) != size[::-1]:
        raise ValueError(f"masks are {by(masks.shape[:-3:-1])}, the image is {by(size)}; expected masks of its size")
    keep, order = np.isfinite(kept["boxes"]).all(1), np.arange(counts["boxes"])
    if "scores" in kept:
        keep &= kept["scores"] >= threshold  # drops nan
        order = np.argsort(-kept["scores"], kind="stable")
    order = order[keep[order]]
    return {name: [values[i] for i in order] if name == "masks" else values[order] for name, values in kept.items()}


def _pixels(box: np.ndarray, factor: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """First and last column and row of a box, inside of the image."""
    (x1, y1), (x2, y2) = (box * factor).reshape(2, 2).clip(0, size).round().astype(int)
    left, top = min(x1, size[0] - 1), min(y1, size[1] - 1)
    return left, top, max(left, x2 - 1), max(top, y2 - 1)


def _draw_mask(canvas: Image.Image, mask: Any, paint: Colour, width: int) -> None:
    """Translucent inside, solid along the inner side of the outline; values above a half are inside."""
    values = array(mask).reshape(tuple(mask.shape[-2:]))
    if values.shape != (canvas.height, canvas.width):
        small = Image.fromarray(values.astype(np.float32))
        values = np.asarray(small.resize(canvas.size, resampling(max(small.size))))
    whole = values > 0.5
    if not whole.any():
        return
    left, top, right, bottom = _padded(Image.fromarray(whole).getbbox(), width, canvas)
    inside = whole[top:bottom, left:right]
    reach = width // 2
    near = F.max_pool2d(torch.from_numpy(~inside).float()[None], (1, 2 * reach + 1), 1, (0, reach))
    near = F.max_pool2d(near, (2 * reach + 1, 1), 1, (reach, 0))[0].numpy() > 0  # to the outside; not to the frame
    pixels = np.array(canvas.crop((left, top, right, bottom)))
    pixels[inside] = blend(pixels[inside], paint, 0.45)
    pixels[inside & near] = paint
    canvas.paste(Image.fromarray(pixels), (left, top))


def _draw_skeleton(
    canvas: Image.Image, points: np.ndarray, seen: np.ndarray, skeleton: Sequence, paint: Colour, width: int
) -> None:
    """Limbs between points (K, 2) that are seen, and a dot with a rim on each of them."""
    seen = seen & np.isfinite(points).all(1)
    if not seen.any():
        return
    radius = float(np.clip(np.ptp(points[seen], axis=0).max() / 60, width, 2 * width))
    box = *np.floor(points[seen].min(0)), *np.ceil(points[seen].max(0))
    left, top, right, bottom = _padded(box, int(2 * radius) + 2, canvas)
    if min(size := (right - left, bottom - top)) < 1:
        return
    layers = [Image.new("L", (FINER * size[0], FINER * size[1])) for _ in range(3)]
    limbs, rims, dots = map(ImageDraw.Draw, layers)
    at = [tuple(((point - (left, top) + 0.5) * FINER).tolist()) for point in np.where(seen[:, None], points, 0)]
    for i, j in skeleton:
        if seen[i] and seen[j]:
            limbs.line((at[i], at[j]), fill=255, width=round(FINER * 1.2 * radius))
    for i in np.flatnonzero(seen):
        rims.circle(at[i], FINER * (radius + max(1.0, width / 3)), fill=255)
        dots.circle(at[i], FINER * radius, fill=255)
    for layer, filling in zip(layers, (paint, ink(paint), paint), strict=True):
        canvas.paste(filling, (left, top), layer.resize(size, Image.Resampling.BOX))


def _padded(box: Any, margin: int, canvas: Image.Image) -> tuple[int, int, int, int]:
    left, top, right, bottom = map(int, box)
    after = min(canvas.width, right + margin), min(canvas.height, bottom + margin)
    return max(0, left - margin), max(0, top - margin), *after


def draw_semantic(
    image: Image.Image,
    classes: ArrayLike | torch.Tensor,
    class_names: Sequence[str],
    *,
    opacity: float = 0.55,
    labels: bool = True,
    legend: bool = True,
) -> Image.Image:
    """A map of classes (H, W), 255 for none, over its image, in RGB; a small image is enlarged by a whole factor.

    Labels name regions with room for them; the legend lists the classes that occur, the largest first, with shares.
    """
    indices = _indices(classes)
    if (size := indices.shape[::-1]) != image.size:
        raise ValueError(f"classes are {by(size)}, the image is {by(image.size)}; expected a class for each pixel")
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
    border = np.zeros(shown.shape, bool)  # pixels with another class a little to the right or below
    for step in range(1, max(1, line_width(canvas) // 2) + 1):
        border[:, :-step] |= shown[:, :-step] != shown[:, step:]
        border[:-step] |= shown[:-step] != shown[step:]
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
    shares = {index: 100 * present[index] / indices.size for index in here}
    amounts = {index: f"{share:.1f} %" if share >= 0.05 else "< 0.1 %" for index, share in shares.items()}
    entries = [Entry(class_name(class_names, index), amounts[index], (colour(index),)) for index in here]
    return with_legend(canvas, entries, "nothing found")


def palette_png(classes: ArrayLike | torch.Tensor) -> Image.Image:
    """Classes (H, W) as an image of mode P, whose values are the classes; 255, which means no class, is white."""
    indices = _indices(classes)
    low, high = (indices.min(), indices.max()) if indices.size else (0, 0)
    if low < 0 or high > 255:
        raise ValueError(f"classes go from {low} to {high}; a palette has 0 to 255, save more as 16-bit grey PNG")
    image = Image.frombytes("P", indices.shape[::-1], indices.astype(np.uint8).tobytes())
    image.putpalette([part for i in range(256) for part in (WHITE if i == IGNORED else colour(i))])
    return image


def _indices(classes: ArrayLike | torch.Tensor) -> np.ndarray:
    indices = array(classes)
    if indices.ndim != 2 or indices.dtype.kind not in "iub":
        what = f"classes are {indices.dtype} {indices.shape}"
        raise ValueError(f"{what}; expected (H, W) of whole numbers, logits.argmax(1)[0] for instance")
    return indices.astype(np.int64)


def _name_regions(canvas: Image.Image, shown: np.ndarray, here: Sequence[int], class_names: Sequence[str]) -> None:
    """A chip in the middle of each class that is high enough for one."""
    size = letter_size(canvas)
    step = -(-max(shown.shape) // 96)  # the middle is found on a coarse map
    coarse = shown[step // 2 :: step, step // 2 :: step]
    chips = []
    for index in here:
        x, y, radius = (step * value for value in _middle(coarse == index))
        name = class_name(class_names, index)
        width, height = chip_size(*fitting(name, size, WIDEST * size), size)
        if 2 * radius > height:
            left, bottom = round(x - width / 2), round(y + height / 2)
            chips.append(((left, bottom, left + width - 1, bottom), name, "", colour(index)))
    if chips:
        boxes, names, amounts, colours = zip(*chips, strict=True)
        draw_labels(canvas, boxes, names, amounts, colours)


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
