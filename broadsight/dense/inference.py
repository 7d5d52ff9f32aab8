"""One prediction from several views of an image: mirrored, scaled or cut into windows."""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import batched_nms

from ..data.dense.transforms import Pairs, mirrored_order

Prediction = dict[str, Tensor]


class Views(NamedTuple):
    """The views of an image that a model predicts on."""

    flip: bool = False  # the mirror image as well
    scales: tuple[float, ...] = (1.0,)
    short_side: int | None = None  # that images for segmentation are resized to; None keeps their size
    long_side: int | None = None
    slide: bool = False  # overlapping windows of short_side x short_side, for segmentation

    def each(self) -> list[tuple[float, bool]]:
        """Scale and whether mirrored."""
        return list(product(self.scales, (False, True) if self.flip else (False,)))


@torch.no_grad()
def detect(model: nn.Module, images: Sequence[Tensor], views: Views, keypoint_pairs: Pairs = ()) -> list[Prediction]:
    """Objects found in views of images (C, H, W) with values 0 to 1, the best first.

    Overlapping boxes of a class from several views are one object, as in the view with the highest score. On a model
    of fixed `image_size`, scales have no effect. `keypoint_pairs` are those that a mirror swaps, such as left and
    right eye.
    """
    _check_evaluating(model, views)
    if views.each() == [(1.0, False)]:
        return model(list(images))
    answers = []
    for scale, mirrored in views.each():
        given = [_scaled(image, scale) for image in images]
        found = model([image.flip(-1) for image in given] if mirrored else given)
        pairs = keypoint_pairs if mirrored else None
        answers.append([_placed(*seen, pairs) for seen in zip(found, given, images, strict=True)])
    return [_merge(found, image.shape[-2:]) for *found, image in zip(*answers, images, strict=True)]


@torch.no_grad()
def segment(model: nn.Module, image: Tensor, views: Views) -> Tensor:
    """Probabilities of the classes in every pixel, averaged over views: (C, H, W), values 0 to 1 -> (K, H, W)."""
    _check_evaluating(model, views)
    size = image.shape[-2:]
    factor, side = resize_factor(size, views.short_side, views.long_side), views.short_side or min(size)
    total: Any = None
    for scale, mirrored in views.each():
        given = _scaled(image, factor * scale)[None]
        given = given.flip(-1) if mirrored else given
        scores = slide(model, given, side, max(1, side * 2 // 3)) if views.slide else model(given)
        scores = scores.flip(-1) if mirrored else scores
        shares = resized(scores[0].float(), size, antialias=False).softmax(0)
        total = shares if total is None else total.add_(shares)
    return total / len(views.each())


def slide(model: nn.Module, image: Tensor, side: int, step: int, window_batch: int = 4) -> Tensor:
    """Scores (1, K, H, W) of an image (1, C, H, W), averaged over the square windows that contain a pixel."""
    size = image.shape[-2:]
    tops, lefts = (window_starts(length, side, step) for length in size)
    windows = [(..., slice(top, top + side), slice(left, left + side)) for top, left in product(tops, lefts)]
    total: Any = None
    covers = image.new_zeros(size)
    for start in range(0, len(windows), window_batch):
        places = windows[start : start + window_batch]
        answers = model(torch.cat([image[place] for place in places])).float()
        if total is None:
            total = answers.new_zeros(1, answers.shape[1], *size)
        for place, scores in zip(places, answers, strict=True):
            total[place] += scores
            covers[place] += 1
    return total.div_(covers)


def window_starts(length: int, window: int, step: int) -> list[int]:
    """First pixels of the windows along a side: every `step`, the last one so that it ends with the side."""
    last = max(length - window, 0)
    return [*range(0, last, step), last]


def resize_factor(size: Sequence[int], short_side: int | None, long_side: int | None) -> float:
    """Factor that makes the shorter side of (H, W) `short_side`, unless the longer one would exceed `long_side`."""
    for name, side in (("short_side", short_side), ("long_side", long_side)):
        if side is not None and side < 1:
            raise ValueError(f"{name}={side}; expected pixels, or None")
    factor = 1.0 if short_side is None else short_side / min(size)
    return factor if long_side is None else min(factor, long_side / max(size))


def _scaled(image: Tensor, factor: float) -> Tensor:
    return resized(image, [max(int(side * factor + 0.5), 1) for side in image.shape[-2:]])


def resized(x: Tensor, size: Sequence[int], antialias: bool = True) -> Tensor:
    """(C, H, W) to another size, bilinear; the same tensor if it has that."""
    if tuple(x.shape[-2:]) == tuple(size):
        return x
    return F.interpolate(x[None], tuple(size), mode="bilinear", align_corners=False, antialias=antialias)[0]


def _placed(found: Prediction, given: Tensor, image: Tensor, pairs: Pairs | None) -> Prediction:
    """What was found in a resized image, mirrored if there are pairs, in pixels of the image; masks stay small."""
    width, found = given.shape[-1], dict(found)
    down, across = (whole / part for whole, part in zip(image.shape[-2:], given.shape[-2:], strict=True))
    if pairs is not None:
        x1, y1, x2, y2 = found["boxes"].unbind(-1)
        found["boxes"] = torch.stack([width - x2, y1, width - x1, y2], -1)
        if "masks" in found:
            found["masks"] = found["masks"].flip(-1)
        for name in found.keys() & {"keypoints", "keypoints_scores"}:
            found[name] = found[name][:, mirrored_order(found[name].shape[1], pairs)]
        if "keypoints" in found:
            x, y, visible = found["keypoints"].unbind(-1)
            found["keypoints"] = torch.stack([width - x, y, visible], -1)  # the centre of a pixel is at 0.5
    found["boxes"] = found["boxes"] * found["boxes"].new_tensor([across, down, across, down])
    if "keypoints" in found:
        found["keypoints"] = found["keypoints"] * found["keypoints"].new_tensor([across, down, 1])
    return found


def _merge(views: Sequence[Prediction], size: Sequence[int]) -> Prediction:
    every = {key: torch.cat([view[key] for view in views]) for key in views[0] if key != "masks"}
    keep = batched_nms(every["boxes"].float(), every["scores"].float(), every["labels"], 0.5)[:100]
    merged = {key: values[keep] for key, values in every.items()}
    if "masks" in views[0]:
        every_mask = [mask for view in views for mask in view["masks"]]
        chosen = [resized(every_mask[row], size, antialias=False) for row in keep]
        merged["masks"] = torch.stack([views[0]["masks"].new_zeros(1, *size), *chosen])[1:]
    return merged


def _check_evaluating(model: nn.Module, views: Views) -> None:
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    if not views.scales or not all(scale > 0 for scale in views.scales):
        raise ValueError(f"scales={list(views.scales)}; expected one or more factors above 0")
