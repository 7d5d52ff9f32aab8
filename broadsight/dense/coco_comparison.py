"""Predictions matched with targets and counted by COCO's own tools."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .coco_results import INSTALL, coco_masks

AT_ONCE = 100_000  # predictions, each of which takes COCO's tools some kilobytes
COCO_NAMES = {"box": "bbox", "mask": "segm", "keypoint": "keypoints"}
Objects = Mapping[str, Any]
OneImage = tuple[tuple[int, int], Objects, Objects]  # height and width, targets, predictions


def compare(
    kind: str,
    images: Sequence[OneImage],
    labels: Sequence[int],
    counts: Sequence[int],
    sigmas: Sequence[float] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Precision and recall, -1 where there are no objects.

    Args:
        kind: "box", "mask" or "keypoint".
        images: (height, width), targets and predictions of each: labels (N,), boxes (N, 4) as x y w h, masks as N
            texts of run lengths, keypoints (N, 3 K); areas and crowds (N,) of targets, scores (N,) of predictions.
            Of equal scores, that of an earlier image goes first.
        labels: Of all C classes.
        counts: Numbers of predictions in an image that count, of each class; ascending.
        sigmas: Tolerance of each keypoint.

    Returns:
        Precision (10, 101, C, A, len(counts)) by IoU from 0.5 to 0.95 and recall from 0 to 1, and the largest recall
        (10, C, A, len(counts)). The areas A are all, small, medium and large; keypoints have no small ones.
    """
    every = np.concatenate([np.zeros(0, np.int64), *(found["labels"] for _, _, found in images)])
    numbers = np.bincount(every, minlength=max(labels) + 1)
    parts = [_compare(kind, images, some, counts, sigmas) for some in group(labels, numbers, AT_ONCE)]
    return np.concatenate([part[0] for part in parts], 2), np.concatenate([part[1] for part in parts], 1)


def _compare(
    kind: str, photos: Sequence[OneImage], labels: Sequence[int], counts: Sequence[int], sigmas: Sequence[float] | None
) -> tuple[np.ndarray, np.ndarray]:
    coco, evaluation = coco_evaluation()
    images = [{"id": i, "height": size[0], "width": size[1]} for i, (size, _, _) in enumerate(photos, 1)]
    content = {"images": images, "categories": [{"id": label, "name": str(label)} for label in labels]}
    there = annotations(kind, [(size, one) for size, one, _ in photos], labels)
    found = annotations(kind, [(size, one) for size, _, one in photos], labels, counts[-1])
    tables = [coco(content | {"annotations": rows}) for rows in (there, found)]
    run = evaluation(*tables, COCO_NAMES[kind], kpt_oks_sigmas=None if sigmas is None else list(sigmas))
    run.params.catIds = list(labels)  # by default it leaves out classes without poses
    run.params.maxDets = list(counts)
    run.evaluate()
    return run.eval["precision"], run.eval["recall"]


def coco_evaluation() -> tuple[Any, Any]:
    """The classes of faster-coco-eval, or an ImportError that says how to install it."""
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError:
        raise ImportError(f"average precision needs faster-coco-eval; {INSTALL}") from None
    return COCO, COCOeval_faster


def group(labels: Sequence[int], numbers: np.ndarray, most: int) -> list[list[int]]:
    """Labels in groups with at most `most` predictions together, or one label: classes are compared independently."""
    groups: list[list[int]] = [[]]
    for label in labels:
        if groups[-1] and numbers[[*groups[-1], label]].sum() > most:
            groups.append([])
        groups[-1].append(label)
    return groups


def annotations(
    kind: str, images: Sequence[tuple[tuple[int, int], Objects]], labels: Sequence[int], most: int | None = None
) -> list[dict[str, Any]]:
    """Objects of some labels as COCO's annotations; of predictions, the best `most` of each label in an image."""
    rows: list[dict[str, Any]] = []
    for number, (size, objects) in enumerate(images, 1):
        columns = {"category_id": objects["labels"], "bbox": objects["boxes"]}
        if most is None:
            keep = np.flatnonzero(np.isin(objects["labels"], labels))
            columns |= {"area": objects["areas"], "iscrowd": objects["crowds"].astype(int)}
        else:
            keep = first_of_each(objects["labels"], objects["scores"], most)
            keep = keep[np.isin(objects["labels"][keep], labels)]
            columns |= {"area": found_areas(kind, size, objects), "score": objects["scores"]}
        if kind == "keypoint":
            points = objects["keypoints"]
            columns |= {"keypoints": points, "num_keypoints": (points[:, 2::3] > 0).sum(1)}
        lists = {name: values[keep].tolist() for name, values in columns.items()}
        if kind == "mask":
            lists["segmentation"] = [{"size": list(size), "counts": objects["masks"][i]} for i in keep]
        for values in zip(*lists.values(), strict=True):  # ids from 1: COCO's tools take 0 for none
            rows.append(dict(zip(lists, values, strict=True), image_id=number, id=len(rows) + 1))
    return rows


def found_areas(kind: str, size: tuple[int, int], objects: Objects) -> np.ndarray:
    """(N,) areas of predictions, by which COCO sorts them: of the box, the mask, or around the keypoints."""
    if kind == "mask":
        return mask_areas(size, objects["masks"])
    if kind == "box" or not len(objects["labels"]):
        return objects["boxes"][:, 2] * objects["boxes"][:, 3]
    x, y = (objects["keypoints"][:, start::3].astype(np.float64) for start in (0, 1))
    return np.ptp(x, axis=1) * np.ptp(y, axis=1)


def mask_areas(size: tuple[int, int], texts: Sequence[bytes]) -> np.ndarray:
    """Pixels of each of N masks."""
    pixels = coco_masks().area([{"size": list(size), "counts": text} for text in texts])
    return np.asarray(pixels, np.float64).reshape(-1)


def first_of_each(labels: np.ndarray, scores: np.ndarray, most: int) -> np.ndarray:
    """Indices of the `most` highest scores of each label, ascending; of equal scores the first count."""
    if len(labels) <= most:
        return np.arange(len(labels))
    by_score = np.argsort(-scores, kind="stable")
    order = by_score[np.argsort(labels[by_score], kind="stable")]  # by label, then by score
    _, starts, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(starts, sizes)
    return np.sort(order[rank < most])
