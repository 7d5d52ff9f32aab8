"""Images as an exported dense model sees them: what its model was shown in training, from the description alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ...data.decoding import decode
from ...data.dense.pose_crops import cut_out
from ...data.dense.pose_geometry import crop_affine, invert_affine
from ..description import Description
from ..graph import LEAST_SIDE
from .decoding import Place


def whole_image(description: Description, photo: Image.Image) -> tuple[np.ndarray, Place]:
    """An image as the model takes it, (C, H, W) of float32 and normalised, and where its pixels are from.

    Resized to the model's one size, or with its aspect and padded by zeros below and at the right: to the canvas that
    was exported, or where sizes are open to a multiple that the model is used to.
    """
    said, image = description.preprocessing, description.image
    pixels = torch.from_numpy(np.array(decode(photo, image["channels"])))
    pixels = pixels.reshape(*pixels.shape[:2], -1).permute(2, 0, 1).float() / 255
    size, canvas = (pixels.shape[-2], pixels.shape[-1]), (image["height"], image["width"])
    seen = canvas
    if said["way"] == "fit":
        seen = fitted_size(size, said, None if image["any_size"] else canvas)
        if image["any_size"]:
            height, width = (max(LEAST_SIDE, -(-side // said["multiple"]) * said["multiple"]) for side in seen)
            canvas = height, width
    elif said["way"] != "exact":
        raise ValueError(f"{description.title} looks at crops of single objects; give their boxes")
    found = _normalised(_resized(pixels, seen, said["antialias"]), said)
    found = F.pad(found, (0, canvas[1] - seen[1], 0, canvas[0] - seen[0]))
    return found.numpy(), Place(size, seen, canvas)


def crops(description: Description, photo: Image.Image, boxes: Any) -> tuple[np.ndarray, list[Place]]:
    """Each box (N, 4) of an image cut out as the model takes it, (N, C, H, W), with some of what is around it."""
    said, image = description.preprocessing, description.image
    if said["way"] != "crops":
        raise ValueError(f"{description.title} finds boxes by itself; give it images alone")
    boxes = torch.as_tensor(boxes, dtype=torch.float64).reshape(-1, 4)
    photo, size = decode(photo, image["channels"]), (image["height"], image["width"])
    back = invert_affine(crop_affine(boxes, size, padding=said["padding"]))
    cut = [_normalised(cut_out(photo, matrix, size).float() / 255, said) for matrix in back]
    images = torch.stack(cut) if cut else torch.zeros(0, image["channels"], *size)
    places = [Place((photo.height, photo.width), size, size, matrix.numpy()) for matrix in back]
    return images.numpy(), places


def fitted_size(size: tuple[int, int], said: dict[str, Any], canvas: Sequence[int] | None) -> tuple[int, int]:
    """(H, W) that an image of another size is resized to with its aspect: by its sides, and into the canvas."""
    factor = said["short_side"] / min(size) if said["short_side"] else 1.0
    if said["long_side"]:
        factor = min(factor, said["long_side"] / max(size))
    if canvas is not None:
        factor = min(factor, *(whole / side for whole, side in zip(canvas, size, strict=True)))
    more = 0.5 if said["rounding"] == "nearest" else 0.0
    height, width = (max(1, int(side * factor + more)) for side in size)
    return height, width


def _resized(pixels: Tensor, size: tuple[int, int], antialias: bool) -> Tensor:
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    return F.interpolate(pixels[None], size, mode="bilinear", align_corners=False, antialias=antialias)[0]


def _normalised(pixels: Tensor, said: dict[str, Any]) -> Tensor:
    mean, std = (torch.tensor(said[key], dtype=torch.float32)[:, None, None] for key in ("mean", "std"))
    return (pixels - mean) / std
