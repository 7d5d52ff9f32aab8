"""Resizing, cropping and mirroring an image (C, H, W) together with the boxes, masks and keypoints of its objects.

Targets are dicts of plain tensors with a row per object: boxes (N, 4) x1 y1 x2 y2, masks (N, H, W), keypoints
(N, K, 3), area (N,); anything else stays. x = 0 is the left edge of the image. Nothing is changed in place.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

GROUND = (124, 116, 104)  # what surrounds images: the mean of photographs

Target = dict[str, Any]
Window = tuple[int, int, int, int]  # top, left, height, width; may reach out of the image


def plain(target: Target) -> Target:
    """A target without torchvision's tensor classes, whose methods are slow."""
    return {key: value.as_subclass(Tensor) if isinstance(value, Tensor) else value for key, value in target.items()}


def take(target: Target, rows: Tensor) -> Target:
    """Some of the objects (N,)."""
    return {key: value[rows] if isinstance(value, Tensor) else value for key, value in target.items()}


def resize_image(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear resizing to (H, W), without smoothing."""
    return F.resize(pixels, list(size), InterpolationMode.BILINEAR, antialias=False)


def resize_masks(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks (N, H, W) resized to (H, W) by the nearest pixel, so that values stay what they are."""
    if not len(masks):
        return masks.new_zeros((0, *size))
    return F.resize(masks, list(size), InterpolationMode.NEAREST_EXACT)


def resize(pixels: Tensor, target: Target, size: tuple[int, int]) -> tuple[Tensor, Target]:
    height, width = pixels.shape[1:]
    if size == (height, width):
        return pixels, target
    by = torch.tensor([size[1] / width, size[0] / height])
    target = target | dict(boxes=target["boxes"] * by.repeat(2), area=target["area"] * by.prod())
    if "masks" in target:
        target["masks"] = resize_masks(target["masks"], size)
    if "keypoints" in target:
        points = target["keypoints"]
        target["keypoints"] = torch.cat([points[..., :2] * by, points[..., 2:]], 2)
    return resize_image(pixels, size), target


def crop_planes(planes: Tensor, window: Window, ground: tuple[int, ...] | int = 0) -> Tensor:
    """(N, H, W) -> (N, height, width); outside of the planes the value `ground`, or one for each plane."""
    top, left, height, width = window
    inner = planes[:, max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    if inner.shape[1:] == (height, width):
        return inner
    cropped = planes.new_empty((len(planes), height, width))
    cropped[:] = torch.as_tensor(ground, dtype=planes.dtype).reshape(-1, 1, 1)
    down, right = max(-top, 0), max(-left, 0)
    cropped[:, down : down + inner.shape[1], right : right + inner.shape[2]] = inner
    return cropped


def ground_of(pixels: Tensor) -> tuple[int, ...]:
    """The colour around an image, for each of its channels."""
    return GROUND if len(pixels) == len(GROUND) else (sum(GROUND) // len(GROUND),) * len(pixels)


def crop(pixels: Tensor, target: Target, window: Window) -> tuple[Tensor, Target]:
    """The part in a window; boxes and keypoints may lie outside of it until `left_over`."""
    corner = torch.tensor([window[1], window[0]])
    target = target | dict(boxes=target["boxes"] - corner.repeat(2))
    if "masks" in target:
        target["masks"] = crop_planes(target["masks"], window)
    if "keypoints" in target:
        points = target["keypoints"]
        target["keypoints"] = torch.cat([points[..., :2] - corner, points[..., 2:]], 2)
    return crop_planes(pixels, window, ground_of(pixels)), target


def flip(pixels: Tensor, target: Target, swapped: Mapping[int, int]) -> tuple[Tensor, Target]:
    """Mirror left and right. Keypoint i of the result is keypoint swapped[i], or i if it has no counterpart."""
    width = pixels.shape[2]
    x1, y1, x2, y2 = target["boxes"].unbind(1)
    target = target | dict(boxes=torch.stack([width - x2, y1, width - x1, y2], 1))
    if "masks" in target:
        target["masks"] = target["masks"].flip(2)
    if "keypoints" in target:
        points = target["keypoints"]
        points = points[:, [swapped.get(i, i) for i in range(points.shape[1])]]
        target["keypoints"] = torch.cat([width - points[..., :1], points[..., 1:]], 2)
    return pixels.flip(2), target


def left_over(target: Target, height: int, width: int) -> Target:
    """Clip boxes to the image; drop objects below a pixel or without a visible pixel.

    The area shrinks with the box. Keypoints outside become unlabelled, and all unlabelled ones 0, 0, 0.
    """
    boxes = target["boxes"]
    limits = boxes.new_tensor([width, height, width, height])
    inside = torch.minimum(boxes.clamp(min=0), limits)
    sides, before = inside[:, 2:] - inside[:, :2], boxes[:, 2:] - boxes[:, :2]
    keep = (sides >= 1).all(1)
    target = target | dict(boxes=inside, area=target["area"] * sides.prod(1) / before.prod(1).clamp(min=1e-9))
    if "masks" in target:
        keep &= target["masks"].bool().flatten(1).any(1)
    if "keypoints" in target:
        points = target["keypoints"]
        there = (points[..., :2] >= 0).all(2) & (points[..., :2] <= limits[:2]).all(2) & (points[..., 2] > 0)
        target["keypoints"] = torch.where(there[..., None], points, 0)
    return take(target, keep)
