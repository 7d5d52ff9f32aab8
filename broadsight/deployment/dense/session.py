"""What an exported dense model finds in images: from PIL to boxes, classes of pixels or keypoints."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ...data.decoding import decode as decode_photo
from ...data.dense.pose_geometry import crop_affine, cut_out, invert_affine
from ..graph import LEAST_SIDE
from ..session import Description, Session
from .decoding import Found, Place, decode

Model = Callable[[np.ndarray], dict[str, np.ndarray]]


def predict_images(session: Session, images: Iterable[Image.Image], boxes: Sequence[Any] | None = None) -> list[Found]:
    """What an opened artefact finds in each image, of any size and mode, in its own pixels, as `decode` has it; of pose
    models, which take boxes (N, 4) for each image or else all of it, also these, and as "scores" how sure they are."""
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


def whole_image(description: Description, photo: Image.Image) -> tuple[np.ndarray, Place]:
    """An image as the model takes it, (C, H, W) of float32 and normalised, and where its pixels are from: resized to
    its one size, or with its aspect and padded by zeros to the canvas that was exported, or if sizes are open a
    multiple."""
    said, image = description.preprocessing, description.image
    pixels = torch.from_numpy(np.array(decode_photo(photo, image["channels"])))
    pixels = pixels.reshape(*pixels.shape[:2], -1).permute(2, 0, 1).float() / 255
    size, canvas = (pixels.shape[-2], pixels.shape[-1]), (image["height"], image["width"])
    seen = canvas
    if said["way"] == "fit":
        factor = said["short_side"] / min(size) if said["short_side"] else 1.0
        if said["long_side"]:
            factor = min(factor, said["long_side"] / max(size))
        if not image["any_size"]:
            factor = min(factor, canvas[0] / size[0], canvas[1] / size[1])
        more = 0.5 if said["rounding"] == "nearest" else 0.0
        seen = max(1, int(size[0] * factor + more)), max(1, int(size[1] * factor + more))
        if image["any_size"]:
            height, width = (max(LEAST_SIDE, -(-side // said["multiple"]) * said["multiple"]) for side in seen)
            canvas = height, width
    elif said["way"] != "exact":
        raise ValueError(f"{description.title} looks at crops of single objects; give their boxes")
    if size != seen:
        options: Any = dict(mode="bilinear", align_corners=False, antialias=said["antialias"])
        pixels = F.interpolate(pixels[None], seen, **options)[0]
    found = F.pad(_normalised(pixels, said), (0, canvas[1] - seen[1], 0, canvas[0] - seen[0]))
    return found.numpy(), Place(size, seen, canvas)


def crops(description: Description, photo: Image.Image, boxes: Any) -> tuple[np.ndarray, list[Place]]:
    """Each box (N, 4) of an image cut out as the model takes it, (N, C, H, W), with some of what is around it."""
    said, image = description.preprocessing, description.image
    if said["way"] != "crops":
        raise ValueError(f"{description.title} finds boxes by itself; give it images alone")
    boxes = [[0, 0, photo.width, photo.height]] if boxes is None else boxes
    boxes = torch.as_tensor(boxes, dtype=torch.float64).reshape(-1, 4)
    photo, size = decode_photo(photo, image["channels"]), (image["height"], image["width"])
    back = invert_affine(crop_affine(boxes, size, padding=said["padding"]))
    cut = [_normalised(cut_out(photo, matrix, size).float() / 255, said) for matrix in back]
    images = torch.stack(cut) if cut else torch.zeros(0, image["channels"], *size)
    return images.numpy(), [Place((photo.height, photo.width), size, size, matrix.numpy()) for matrix in back]


def _normalised(pixels: Tensor, said: dict[str, Any]) -> Tensor:
    mean, std = (torch.tensor(said[key], dtype=torch.float32)[:, None, None] for key in ("mean", "std"))
    return (pixels - mean) / std


def differences(found: Found, expected: Found) -> dict[str, float]:
    """How far two answers about one image are from each other: which part of the objects, keypoints or pixels is
    "differing" (an object has none of its label within a pixel and 0.01 of its score, a keypoint is not within a pixel,
    a pixel has another class), and how many "pixels" the corners or keypoints of the others are apart at most."""
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
