"""What an exported dense model finds in images: from PIL to boxes, classes of pixels or keypoints."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from ..description import Description
from ..session import Session
from .decoding import Found, decode
from .images import crops, whole_image

Model = Callable[[np.ndarray], dict[str, np.ndarray]]


def predict_images(session: Session, images: Iterable[Image.Image], boxes: Sequence[Any] | None = None) -> list[Found]:
    """What an opened artefact finds in each image, of any size and mode, in its own pixels.

    Args:
        boxes: For pose models, (N, 4) for each image; without them one that is all of the image.

    Returns:
        Of detectors "boxes" (N, 4), "labels" (N,) from 1 and "scores" (N,), the best first; of segmenters
        "probabilities" (K, H, W) and "classes" (H, W); of pose models the boxes that were given with "keypoints"
        (N, K, 3), x, y and how sure, and their mean as "scores".
    """
    images = list(images)
    if boxes is not None and len(boxes) != len(images):
        raise ValueError(f"boxes of {len(boxes)} images for {len(images)}; expected one (N, 4) for each")
    given = [None] * len(images) if boxes is None else boxes
    return [find(session, session.description, image, one) for image, one in zip(images, given, strict=True)]


def find(model: Model, description: Description, image: Image.Image, boxes: Any = None) -> Found:
    """What a model of this description finds in one image; the model may be torch's, to compare with."""
    decoding = description.decoding
    if decoding is None:
        raise ValueError(f"{description.title} says nothing of its decoding; expected an exported dense model")
    if description.preprocessing["way"] != "crops":
        if boxes is not None:
            raise ValueError(f"boxes were given to {description.title}, which finds them by itself; leave them out")
        seen, place = whole_image(description, image)
        return decode(decoding, model(seen[None]), [place])[0]
    whole = [[0, 0, image.width, image.height]]
    boxes = np.asarray(whole if boxes is None else boxes, np.float32).reshape(-1, 4)
    points = np.zeros((0, len(decoding["names"]), 3), np.float32)
    if len(boxes):
        images, places = crops(description, image, boxes)
        points = np.stack([one["keypoints"] for one in decode(decoding, model(images), places)])
    scores = points[..., 2].mean(1).clip(0, 1)
    return {"boxes": boxes, "labels": np.ones(len(boxes), np.int64), "scores": scores, "keypoints": points}


def apart(found: Found, expected: Found) -> dict[str, float]:
    """How far two answers about one image are from each other.

    Returns:
        "differing": which part of the objects, keypoints or pixels is not the same: an object is if the other answer
        has one of its label within a pixel and 0.01 of its score, a keypoint if it is within a pixel, a pixel if its
        class is equal. "pixels": how far corners of boxes or keypoints are apart at most among those that are the same.
    """
    if "classes" in expected:
        return {"differing": float((found["classes"] != expected["classes"]).mean()), "pixels": 0.0}
    if "keypoints" in expected:
        far = np.abs(found["keypoints"] - expected["keypoints"])[..., :2].max(-1)
    else:
        far = np.array([*_far(found, expected), *_far(expected, found)])
    same = far <= 1
    return {"differing": float(1 - same.mean()) if far.size else 0.0, "pixels": float(far[same].max(initial=0))}


def _far(some: Found, others: Found) -> list[float]:
    """For each object the distance of its box to the nearest of its kind in the other answer."""
    found = []
    for box, label, score in zip(some["boxes"], some["labels"], some["scores"], strict=True):
        alike = (others["labels"] == label) & (np.abs(others["scores"] - score) <= 0.01)
        found.append(float(np.abs(others["boxes"][alike] - box).max(1).min(initial=np.inf)))
    return found
