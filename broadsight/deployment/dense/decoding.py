"""From the raw outputs of an exported dense model to what it found. Needs numpy alone, in any runtime's company."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Found = dict[str, np.ndarray]


@dataclass(frozen=True)
class Place:
    """Where the pixels that a model sees are from."""

    image: tuple[int, int]  # (height, width)
    seen: tuple[int, int]  # (height, width) that it was resized to, in the upper left corner of the canvas
    canvas: tuple[int, int]  # (height, width) of what the model sees
    matrix: np.ndarray | None = None  # (2, 3), of a crop: from its pixels to those of the image


def decode(decoding: Mapping[str, Any], outputs: Mapping[str, np.ndarray], places: Sequence[Place]) -> list[Found]:
    """What was found in each image, in its own pixels.

    Of detectors "boxes" (N, 4), x1 y1 x2 y2, "labels" (N,) from 1 and "scores" (N,), the best first; of segmenters
    "probabilities" (K, H, W) and "classes" (H, W); of pose models "keypoints" (K, 3), x, y and how sure. Outputs come
    by name, each with a row for every image.
    """
    for name, values in outputs.items():
        if len(values) != len(places):
            raise ValueError(f"{name} has {len(values)} rows for {len(places)} images; expected one each")
    rows = [dict(zip(outputs, row, strict=True)) for row in zip(*outputs.values(), strict=True)]
    return [KINDS[decoding["kind"]](decoding, row, place) for row, place in zip(rows, places, strict=True)]


def _from_anchors(decoding: Mapping[str, Any], outputs: Found, place: Place) -> Found:
    levels = []
    for level in decoding["levels"]:  # the boxes of a position, at every position of a map row by row
        grid = [-(-side // level["stride"]) for side in place.canvas]
        steps = [(np.arange(n) + decoding["offset"]) * step for n, step in zip(grid, level["step"], strict=True)]
        y, x = np.meshgrid(*steps, indexing="ij")
        boxes = np.stack([x, y, x, y], -1).reshape(-1, 1, 4) + np.array(level["boxes"])
        levels.append(boxes.reshape(-1, 4).astype(np.float32))
    anchors, counts = np.concatenate(levels), [len(level) for level in levels]
    if len(anchors) != len(outputs["cls_logits"]):
        what = f"{len(outputs['cls_logits'])} rows of cls_logits for an image of {place.canvas[0]}x{place.canvas[1]}"
        raise ValueError(f"{what}; expected {len(anchors)}, one for each anchor")
    boxes = box_of(decoding, outputs["bbox_regression"], anchors)
    boxes = boxes.clip(0, np.array(place.seen[::-1] * 2, np.float32))
    if decoding["scores"] == "softmax":  # the best of each class
        scores = softmax(outputs["cls_logits"], 1)[:, 1:]
        parts = [_best(decoding, column) * scores.shape[1] + label for label, column in enumerate(scores.T)]
    else:  # the best of each level
        scores = sigmoid(outputs["cls_logits"])
        if "bbox_ctrness" in outputs:
            scores = np.sqrt(scores * sigmoid(outputs["bbox_ctrness"]))
        starts = np.cumsum([0, *counts]) * scores.shape[1]
        parts = [start + _best(decoding, scores.ravel()[start:end]) for start, end in pairwise(starts)]
    chosen = np.concatenate(parts)
    rows, labels = np.divmod(chosen, scores.shape[1])
    boxes, scores = boxes[rows], scores.ravel()[chosen]
    kept = suppress(boxes, scores, labels, decoding["overlap"], decoding["detections"])
    stretch = np.array(place.image, np.float32) / np.array(place.seen, np.float32)
    return {"boxes": boxes[kept] * np.tile(stretch[::-1], 2), "labels": labels[kept] + 1, "scores": scores[kept]}


def box_of(decoding: Mapping[str, Any], said: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Boxes (A, 4) from what a head says of each anchor."""
    low, high = anchors[:, :2], anchors[:, 2:]
    sides, centres = high - low, (low + high) / 2
    if decoding["coder"] == "distances":  # from the centre to each side of the box
        said = said * np.tile(sides, 2)
        return np.concatenate([centres - said[:, :2], centres + said[:, 2:]], 1)
    said = said / np.array(decoding["weights"], np.float32)
    centres = said[:, :2] * sides + centres
    half = np.exp(np.minimum(said[:, 2:], np.float32(decoding["largest_growth"]))) * sides / 2
    return np.concatenate([centres - half, centres + half], 1)


def suppress(boxes: np.ndarray, scores: np.ndarray, labels: np.ndarray, overlap: float, most: int) -> np.ndarray:
    """Indices of boxes (N, 4), best first, without those that overlap a better one of their label by more IoU."""
    order = np.argsort(-scores, kind="stable")
    boxes, labels = boxes[order], labels[order]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    alive, kept = np.ones(len(order), bool), []
    for place in range(len(order)):
        if len(kept) == most:
            break
        if not alive[place]:
            continue
        kept.append(place)
        common = np.minimum(boxes[place, 2:], boxes[:, 2:]) - np.maximum(boxes[place, :2], boxes[:, :2])
        common = common.clip(0).prod(1)
        # Not divided: boxes without an area overlap nothing
        alive &= (common <= overlap * (areas[place] + areas - common)) | (labels != labels[place])
    return order[np.array(kept, np.int64)]


def _from_queries(decoding: Mapping[str, Any], outputs: Found, place: Place) -> Found:
    logits = outputs["logits"].ravel()
    best = np.argsort(-logits, kind="stable")[: decoding["detections"]]
    best = best[sigmoid(logits[best]) >= decoding["score_threshold"]]
    rows, labels = np.divmod(best, decoding["classes"])
    centres, half = outputs["boxes"][rows, :2], outputs["boxes"][rows, 2:] / 2
    boxes = np.concatenate([centres - half, centres + half], 1).clip(0, 1) * np.array(place.image[::-1] * 2, np.float32)
    return {"boxes": boxes, "labels": labels + 1, "scores": sigmoid(logits[best])}


def _from_pixels(decoding: Mapping[str, Any], outputs: Found, place: Place) -> Found:
    rows, columns = (
        resizing(side, whole) @ resizing(cells, cells * decoding["stride"])[:side]
        for side, whole, cells in zip(place.seen, place.image, outputs["logits"].shape[-2:], strict=True)
    )
    probabilities = softmax(rows.astype(np.float32) @ outputs["logits"] @ columns.T.astype(np.float32), 0)
    return {"probabilities": probabilities, "classes": probabilities.argmax(0)}


def resizing(before: int, after: int) -> np.ndarray:
    """(after, before): what resizes a side bilinearly, pixels being squares."""
    if before == after:
        return np.eye(after)
    place = ((np.arange(after) + 0.5) * before / after - 0.5).clip(0)
    low = np.floor(place).astype(np.int64).clip(max=before - 1)
    matrix = np.zeros((after, before))
    np.add.at(matrix, (np.arange(after), low), 1 - (place - low))
    np.add.at(matrix, (np.arange(after), np.minimum(low + 1, before - 1)), place - low)
    return matrix


def _from_heat_maps(decoding: Mapping[str, Any], outputs: Found, place: Place) -> Found:
    maps = outputs["heatmaps"]
    points, (height, width) = np.arange(len(maps)), maps.shape[1:]
    best = maps.reshape(len(maps), -1).argmax(1)
    y, x = np.divmod(best, width)
    edged = np.pad(maps, ((0, 0), (1, 1), (1, 1)))
    # A quarter of a cell towards the higher neighbour; at the border the cell's centre
    right = np.sign(edged[points, y + 1, x + 2] - edged[points, y + 1, x]) / 4 * ((x > 0) & (x < width - 1))
    down = np.sign(edged[points, y + 2, x + 1] - edged[points, y, x + 1]) / 4 * ((y > 0) & (y < height - 1))
    there = np.stack([x + 0.5 + right, y + 0.5 + down], 1) * decoding["stride"]
    if place.matrix is not None:
        there = there @ place.matrix[:, :2].T + place.matrix[:, 2]
    return {"keypoints": np.concatenate([there, maps[points, y, x][:, None]], 1).astype(np.float32)}


KINDS = dict(anchors=_from_anchors, queries=_from_queries, pixels=_from_pixels, heatmaps=_from_heat_maps)


def _best(decoding: Mapping[str, Any], scores: np.ndarray) -> np.ndarray:
    """Indices of the highest scores (N,) above the threshold, best first."""
    above = np.flatnonzero(scores > decoding["score_threshold"])
    return above[np.argsort(-scores[above], kind="stable")[: decoding["candidates"]]]


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    raised = np.exp(x - x.max(axis, keepdims=True))
    return raised / raised.sum(axis, keepdims=True)
