"""Images of what dense models predict: boxes, masks, skeletons, maps of classes, each with a legend."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw

from .canvas import array, blend, by, class_name, dashed_rectangle, enlarged, line_width, resampling
from .class_maps import draw_semantic as draw_semantic
from .class_maps import palette_png as palette_png
from .colours import Colour, colour, ink
from .lettering import Entry, draw_labels, with_legend
from .lettering import side_by_side as side_by_side

MASK_OPACITY = 0.45
CROWD = 12  # with more objects than these, boxes narrower than their label show the score alone: the legend has names
FINER = 4  # skeletons are drawn so much larger and then shrunk, since slanted lines would have steps


def draw_objects(
    image: Image.Image,
    prediction: Mapping[str, Any],
    class_names: Sequence[str],
    *,
    threshold: float = 0.5,
    masks: bool = True,
    skeleton: Sequence[tuple[int, int]] = (),
    keypoint_threshold: float = 0.3,
    legend: bool = True,
    ground_truth: Mapping[str, Any] | None = None,
) -> Image.Image:
    """Objects on their image, RGB; one that is small comes enlarged by a whole factor.

    Args:
        image: Of the size, in pixels, that the prediction is meant for.
        prediction: As detectors give it: boxes (M, 4) x1 y1 x2 y2, labels (M,) from 1, scores (M,) 0 to 1 and, if it
            has them, masks (M, 1, H, W) or (M, H, W), keypoints (M, K, 3) and keypoints_scores (M, K). A target of
            `CocoDataset` will do too: without scores, all of it is drawn.
        class_names: The first is that of label 1.
        threshold: The lowest score that is drawn.
        masks: Whether to draw masks if there are any.
        skeleton: Pairs of keypoints, from 0, that a limb joins.
        keypoint_threshold: The lowest of keypoints_scores that is drawn; they are in the model's own unit.
        legend: Whether to list the classes and how many objects they have.
        ground_truth: A target whose boxes are drawn too, dashed.
    """
    objects = _kept(prediction, threshold, image.size)
    canvas, factor = enlarged(image)
    width = line_width(canvas)
    points = objects.get("keypoints")
    by_instance = points is not None and len(class_names) == 1  # persons among persons are told apart by their colours
    labels = objects["labels"]
    indices = np.arange(len(labels)) if by_instance else labels - 1
    colours = [colour(int(index)) for index in indices]
    boxes = [_pixels(box, factor, canvas.size) for box in objects["boxes"]]

    worst_first = range(len(labels) - 1, -1, -1)  # what is more certain lies on top
    if masks and "masks" in objects:
        for i in worst_first:
            _draw_mask(canvas, objects["masks"][i], colours[i], width)
    for i in worst_first:
        ImageDraw.Draw(canvas).rectangle(boxes[i], outline=colours[i], width=width)
    if ground_truth is not None:
        truth = _kept({**ground_truth, "scores": None}, threshold, image.size)
        for box in truth["boxes"]:
            dashed_rectangle(canvas, _pixels(box, factor, canvas.size), max(1, width // 2))
    if points is not None:
        if max(map(max, skeleton), default=-1) >= points.shape[1]:
            raise ValueError(f"skeleton joins keypoint {max(map(max, skeleton))}; there are {points.shape[1]}, from 0")
        seen = points[:, :, 2] > 0
        if "keypoints_scores" in objects:
            seen &= objects["keypoints_scores"] >= keypoint_threshold
        for i in worst_first:
            _draw_skeleton(canvas, points[i, :, :2] * factor, seen[i], skeleton, colours[i], width)
    names = [class_name(class_names, int(label) - 1) for label in labels]
    scores = objects.get("scores")
    amounts = [""] * len(names) if scores is None else [f"{score:.2f}" for score in scores]
    draw_labels(canvas, boxes, names, amounts, colours, brief=legend and len(names) > CROWD)
    if not legend:
        return canvas

    counts = Counter(labels.tolist())
    order = sorted(counts, key=lambda label: (-counts[label], label))
    entries = []
    for label in order:
        swatch = tuple(colours[:4]) if by_instance else (colour(label - 1),)
        entries.append(Entry(class_name(class_names, label - 1), f"{counts[label]:,}", swatch))
    nothing = "nothing found" if scores is None else f"nothing found with a score of {threshold:g} or more"
    if ground_truth is not None:
        entries = entries or [Entry(nothing, "", ())]
        entries.append(Entry("ground truth", f"{len(truth['boxes']):,}", (), dashed=True))
    return with_legend(canvas, entries, nothing)


def _kept(objects: Mapping[str, Any], threshold: float, size: tuple[int, int]) -> dict[str, Any]:
    """Objects of enough score and finite boxes as arrays, the most certain first. Masks stay on their device."""
    boxes = array(objects["boxes"]).reshape(-1, 4).astype(np.float64)
    labels = array(objects["labels"]).reshape(-1).astype(np.int64)
    scores = objects.get("scores")
    scores = None if scores is None else array(scores).reshape(-1).astype(np.float64)
    counts = {"boxes": len(boxes), "labels": len(labels), **({} if scores is None else {"scores": len(scores)})}
    counts |= {name: len(objects[name]) for name in ("masks", "keypoints") if objects.get(name) is not None}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(f"prediction has {told}; expected as many of each")
    if len(labels) and labels.min() < 1:
        raise ValueError(f"prediction has label {labels.min()}; expected labels from 1, 0 is the background")
    keep = np.isfinite(boxes).all(1)
    if scores is not None:
        keep &= scores >= threshold  # not of NaN
    order = np.flatnonzero(keep)
    if scores is not None:
        order = order[np.argsort(-scores[order], kind="stable")]
    kept = {"boxes": boxes[order], "labels": labels[order]}
    if scores is not None:
        kept["scores"] = scores[order]
    for name in ("keypoints", "keypoints_scores"):
        if objects.get(name) is not None:
            kept[name] = array(objects[name])[order].astype(np.float64)
    if objects.get("masks") is not None:
        masks = objects["masks"]
        if len(masks) and tuple(masks.shape[-2:]) != size[::-1]:
            raise ValueError(
                f"masks are {by(masks.shape[:-3:-1])}, the image is {by(size)}; expected masks of its size"
            )
        kept["masks"] = [masks[i] for i in order]
    return kept


def _pixels(box: np.ndarray, factor: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """First and last column and row of a box, inside of the image."""
    (x1, y1), (x2, y2) = (box * factor).reshape(2, 2).clip(0, size).round().astype(int)
    left, top = min(x1, size[0] - 1), min(y1, size[1] - 1)
    return left, top, max(left, x2 - 1), max(top, y2 - 1)


def _draw_mask(canvas: Image.Image, mask: Any, paint: Colour, width: int) -> None:
    """Translucent inside, solid along the inner side of the outline; probabilities above a half are inside."""
    values = array(mask)
    values = values.reshape(values.shape[-2:])
    if values.shape != (canvas.height, canvas.width):
        small = Image.fromarray(values.astype(np.float32))
        values = np.asarray(small.resize(canvas.size, resampling(max(small.size))))
    whole = values > 0.5
    rows, columns = np.flatnonzero(whole.any(1)), np.flatnonzero(whole.any(0))
    if not len(rows):
        return
    top, bottom = max(0, rows[0] - width), min(canvas.height, rows[-1] + width + 1)
    left, right = max(0, columns[0] - width), min(canvas.width, columns[-1] + width + 1)
    inside = whole[top:bottom, left:right]
    reach = width // 2
    near = F.max_pool2d(torch.from_numpy(~inside).float()[None], (1, 2 * reach + 1), 1, (0, reach))
    near = F.max_pool2d(near, (2 * reach + 1, 1), 1, (reach, 0))[0].numpy() > 0  # to the outside; not to the frame
    pixels = np.array(canvas.crop((left, top, right, bottom)))
    pixels[inside] = blend(pixels[inside], paint, MASK_OPACITY)
    pixels[inside & near] = paint
    canvas.paste(Image.fromarray(pixels), (int(left), int(top)))


def _draw_skeleton(
    canvas: Image.Image, points: np.ndarray, seen: np.ndarray, skeleton: Sequence, paint: Colour, width: int
) -> None:
    """Limbs between points (K, 2) that are seen, and a dot with a rim on each of them."""
    seen = seen & np.isfinite(points).all(1)
    if not seen.any():
        return
    extent = np.ptp(points[seen], axis=0).max()
    radius = float(np.clip(extent / 60, width, 2 * width))
    margin = int(2 * radius) + 2
    low = (np.floor(points[seen].min(0)).astype(int) - margin).clip(0, canvas.size)
    high = (np.ceil(points[seen].max(0)).astype(int) + margin).clip(0, canvas.size)
    size = int(high[0] - low[0]), int(high[1] - low[1])
    if min(size) < 1:
        return
    layers = [Image.new("L", (FINER * size[0], FINER * size[1])) for _ in range(3)]
    limbs, rims, dots = map(ImageDraw.Draw, layers)
    at = [tuple(((point - low + 0.5) * FINER).tolist()) for point in np.where(seen[:, None], points, 0)]
    for i, j in skeleton:
        if seen[i] and seen[j]:
            limbs.line((at[i], at[j]), fill=255, width=round(FINER * 1.2 * radius))
    for i in np.flatnonzero(seen):
        rims.circle(at[i], FINER * (radius + max(1.0, width / 3)), fill=255)
        dots.circle(at[i], FINER * radius, fill=255)
    for layer, filling in zip(layers, (paint, ink(paint), paint), strict=True):
        canvas.paste(filling, (int(low[0]), int(low[1])), layer.resize(size, Image.Resampling.BOX))
