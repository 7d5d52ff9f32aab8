"""Predictions in COCO's result format, which all tools read."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import box_convert

from ..files import write_text

INSTALL = 'run: pip install "broadsight[det]"'


def to_results(
    image_id: int | str, prediction: Mapping[str, Tensor], category_ids: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Predictions for an image, in pixels of it, as entries of a result file; see `AveragePrecision.update`."""
    labels = known_labels(prediction["labels"], category_ids)
    columns: dict[str, list] = {
        "category_id": [category_ids[label] for label in labels.tolist()],
        "score": prediction["scores"].detach().double().cpu().numpy().round(6).tolist(),
        "bbox": as_coco(prediction["boxes"]).round(3).tolist(),
    }
    if "masks" in prediction:
        size, texts = encode_masks(prediction["masks"])
        columns["segmentation"] = [{"size": list(size), "counts": text.decode()} for text in texts]
    if "keypoints" in prediction:
        columns["keypoints"] = prediction["keypoints"].detach().double().cpu().flatten(1).numpy().round(3).tolist()
    rows = zip(*columns.values(), strict=True)
    return [{"image_id": image_id, **dict(zip(columns, row, strict=True))} for row in rows]


def as_coco(boxes: Tensor) -> np.ndarray:
    """Boxes (N, 4), x1 y1 x2 y2, as x y w h."""
    return box_convert(boxes.detach().double().cpu().reshape(-1, 4), "xyxy", "xywh").numpy()


def write_results(entries: Iterable[dict[str, Any]], path: str | Path) -> None:
    """Write a result file; it appears complete or not at all."""
    write_text(json.dumps(list(entries), allow_nan=False), path)


def encode_masks(masks: Tensor) -> tuple[tuple[int, int], list[bytes]]:
    """Height and width of masks (M, 1, H, W) or (M, H, W), and their pixels above 0.5 as COCO's run lengths."""
    height, width = masks.shape[-2:]
    inside = (masks.detach().reshape(-1, height, width) > 0.5).view(torch.uint8)
    columns = inside.mT.contiguous().cpu().numpy()  # runs go down the columns
    return (height, width), [run["counts"] for run in coco_masks().encode(columns.transpose(2, 1, 0))]


def coco_masks() -> ModuleType:
    """pycocotools' functions of run lengths."""
    try:
        from pycocotools import mask  # its encoder takes a fifth of the other package's time
    except ImportError:
        raise ImportError(f"masks as run lengths need pycocotools; {INSTALL}") from None
    return mask


def known_labels(labels: Tensor, category_ids: Mapping[int, int]) -> np.ndarray:
    """(N,) labels, after a check that each has a category."""
    listed = labels.detach().cpu().numpy().astype(np.int64).reshape(-1)
    if unknown := set(listed.tolist()) - category_ids.keys():
        raise ValueError(
            f"label {min(unknown)} has no category; expected labels {min(category_ids)} to {max(category_ids)}"
        )
    return listed
