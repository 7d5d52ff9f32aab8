"""Augmentation for dense tasks: scale, crop, mirroring and colour, drawn from torch's global generator.

Images are resized without smoothing, as detectors do it in evaluation. Targets are dicts of tensors with a row per
object: boxes (N, 4) x1 y1 x2 y2, masks (N, H, W), keypoints (N, K, 3), area (N,). Nothing is changed in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.ops import box_iou
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from ...errors import check_choice
from .layout import TASKS, DenseTask
from .view import IGNORE

BILINEAR, NEAREST = InterpolationMode.BILINEAR, InterpolationMode.NEAREST_EXACT
GROUND = (124, 116, 104)  # what surrounds images: the mean of photographs
TRIES = 10  # of a random crop
# Of image_size: shorter sides that DETR resizes to before it crops, and the range of its crops' sides
BEFORE_CROP, CROPPED = (0.5, 0.625, 0.75), (0.48, 0.75)
SHARES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
SMALLEST = 8  # pixels of a side, below which nothing is cropped

Target = dict[str, Any]
Pairs = Sequence[tuple[int, int]]  # of keypoints that change places when an image is mirrored
Transform = Callable[[Image.Image, Any], tuple[Tensor, Any]]
Window = tuple[int, int, int, int]  # top, left, height, width; may reach out of the image


@dataclass(frozen=True)
class DenseTransforms:
    """How images and targets become what a dense model takes. In evaluation nothing is changed: detectors resize by
    themselves and map results back, and masks are scored at the size at which they were drawn.

    Args:
        image_size: Pixels of the shorter side; for segment and `fixed`, of both.
        long_side: Most pixels of the longer side; None for 4 times the shorter one in segment, else 1333 to 800.
        resize: Smallest and largest factor on `image_size`, drawn uniformly; segment's is on `long_side` too.
        crop: "none"; "random": a window of half to all of each side in which an object's centre lies; "detr": every
            second image, as DETR does; "iou": SSD's. For segment always image_size x image_size, in which no class
            fills more than 75 % if ten tries find one.
        hflip: Probability of mirroring.
        color_jitter: Strength of brightness, contrast, saturation and hue, each changed half of the time: 0.5 is usual.
            With crop "iou" channels are swapped too, as SSD does.
        fixed: Resize to image_size x image_size exactly; the aspect is lost. Segment does not crop then.
    """

    task: DenseTask
    image_size: int
    long_side: int | None = None
    resize: tuple[float, float] = (1.0, 1.0)
    crop: Literal["none", "random", "detr", "iou"] = "none"
    hflip: float = 0.5
    color_jitter: float = 0.0
    fixed: bool = False

    def __post_init__(self) -> None:
        check_choice("task", self.task, TASKS)
        given = f"image_size={self.image_size}, resize={self.resize}"
        if self.image_size < 1 or not 0 < self.resize[0] <= self.resize[1]:
            raise ValueError(f"{given}; expected pixels, and a smaller and larger factor")
        if self.long_side is not None and self.long_side < self.image_size:
            raise ValueError(f"long_side={self.long_side} is below image_size={self.image_size}; it limits the longer")
        known = ("none", "random") if self.task == "segment" else ("none", "random", "detr", "iou")
        if self.crop not in known:
            raise ValueError(f"crop={self.crop!r} is not known for {self.task}; choose one of {', '.join(known)}")
        if not 0 <= self.hflip <= 1 or not 0 <= self.color_jitter <= 1:
            raise ValueError(f"hflip={self.hflip}, color_jitter={self.color_jitter}; expected 0 to 1")

    def build(self, training: bool, flip_pairs: Pairs = ()) -> Transform:
        """(PIL image, target) -> bytes (C, H, W) and the target in plain tensors; in training without crowds and what
        is cut away."""
        if not training:
            return unchanged
        return SegmentTraining(self) if self.task == "segment" else ObjectTraining(self, flip_pairs)

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Height and width to resize an image to, by a random factor."""
        low, high = self.resize
        factor = low + (high - low) * float(torch.rand(()))
        short = self.image_size * factor
        if self.fixed:
            return round(short), round(short)
        long = float(self.long_side or round(self.image_size * (4 if self.task == "segment" else 1333 / 800)))
        if self.task == "segment":
            long *= factor
        scale = min(short / min(height, width), long / max(height, width))
        return max(1, round(height * scale)), max(1, round(width * scale))

    def colours(self) -> Callable[[Tensor], Tensor]:
        """The colour augmentation of an image of bytes (C, H, W)."""
        strength = self.color_jitter
        if not strength:
            return nn.Identity()
        ranges = dict(brightness=strength / 4, contrast=strength, saturation=strength, hue=strength / 10)
        if self.crop == "iou":
            around = {name: (float(name != "hue") - by, float(name != "hue") + by) for name, by in ranges.items()}
            return v2.RandomPhotometricDistort(**around)  # ty: ignore[invalid-argument-type]
        return v2.Compose([v2.RandomApply([v2.ColorJitter(**{name: by})], 0.5) for name, by in ranges.items()])


class ObjectTraining:
    """Augments an image and its objects. The crop is drawn from boxes alone, so pixels are moved twice at most."""

    def __init__(self, settings: DenseTransforms, flip_pairs: Pairs):
        self.settings, self.colours, self.flip_pairs = settings, settings.colours(), flip_pairs

    def __call__(self, image: Image.Image, target: Target) -> tuple[Tensor, Target]:
        pixels = F.pil_to_tensor(image)
        target = take(plain(target), target["iscrowd"] == 0)
        target.pop("labelled_boxes", None)  # for scores alone
        height, width = pixels.shape[1:]
        window, inside = self.window(target["boxes"], height, width)
        if window != (0, 0, height, width):
            pixels, target = crop(pixels, take(target, inside), window)
        pixels, target = resize(pixels, target, self.settings.size_of(*pixels.shape[1:]))
        if torch.rand(()) < self.settings.hflip:
            pixels, target = flip(pixels, target, self.flip_pairs)
        return self.colours(pixels.contiguous()), left_over(target, *pixels.shape[1:])  # of fewer pixels by now

    def window(self, boxes: Tensor, height: int, width: int) -> tuple[Window, Tensor]:
        """The window to crop, and which objects (N,) may be part of it."""
        whole, everything = (0, 0, height, width), torch.ones(len(boxes), dtype=torch.bool)
        if self.settings.crop == "none" or min(height, width) < SMALLEST:
            return whole, everything
        if self.settings.crop == "iou":
            return iou_window(boxes, height, width)
        if self.settings.crop == "detr":
            return detr_window(height, width, self.settings.image_size), everything
        for _ in range(TRIES):
            sides, places = (0.5 + 0.5 * torch.rand(2)).tolist(), torch.rand(2).tolist()
            h, w = (max(1, round(part * side)) for part, side in zip(sides, (height, width), strict=True))
            top, left = round(places[0] * (height - h)), round(places[1] * (width - w))
            x, y = ((boxes[:, :2] + boxes[:, 2:]) / 2).unbind(1)
            if not len(boxes) or ((left < x) & (x < left + w) & (top < y) & (y < top + h)).any():
                return (top, left, h, w), everything
        return whole, everything


def detr_window(height: int, width: int, image_size: int) -> Window:
    """DETR's crop of every second image.

    For an image_size of 800 it would be 384 to 600 pixels of each side of the image resized to a shorter side of 400,
    500 or 600. Objects may be cut off, all of them too.
    """
    if torch.rand(()) < 0.5:
        return 0, 0, height, width
    resized = BEFORE_CROP[int(torch.randint(len(BEFORE_CROP), ()))] * image_size
    least, most = (share * image_size * min(height, width) / resized for share in CROPPED)
    ranges = ((min(side, least), min(side, most)) for side in (height, width))
    h, w = (max(1, round(low + (high - low) * float(torch.rand(())))) for low, high in ranges)
    top, left = (int(torch.randint(room + 1, ())) for room in (height - h, width - w))
    return top, left, h, w


def iou_window(boxes: Tensor, height: int, width: int) -> tuple[Window, Tensor]:
    """SSD's crop of an image, half of the time put on a ground up to four times as large, and the objects (N,) in it.

    A drawn share is how much the window and a box must overlap (as intersection over union); 1 means no crop. The
    rules are those of torchvision's RandomZoomOut and RandomIoUCrop, which try windows one by one: ten times as long.
    """
    top, left, everything = 0, 0, torch.ones(len(boxes), dtype=torch.bool)
    if torch.rand(()) < 0.5:
        factor, down, right = (torch.rand(3) * torch.tensor([3, 1, 1])).tolist()
        factor = min(factor, max(0.0, ((1 << 28) / (height * width)) ** 0.5 - 1))  # a ground of 800 MB at most
        tall, wide = int(height * (1 + factor)), int(width * (1 + factor))
        top, left = -int((tall - height) * down), -int((wide - width) * right)
        height, width = tall, wide
    whole = (top, left, height, width)
    if not len(boxes):
        return whole, everything
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2 - torch.tensor([left, top])
    while (share := SHARES[int(torch.randint(len(SHARES), ()))]) < 1:
        sizes = ((0.3 + 0.7 * torch.rand(40, 2)) * torch.tensor([width, height])).long()  # 40 windows
        corners = (torch.rand(40, 2) * (torch.tensor([width, height]) - sizes)).long()
        windows = torch.cat([corners, corners + sizes], 1)
        inside = ((windows[:, None, :2] < centres) & (centres < windows[:, None, 2:])).all(2)  # 40 N
        overlap = box_iou(windows, boxes - torch.tensor([left, top, left, top])).where(inside, 0).amax(1)
        aspect = sizes[:, 0] / sizes[:, 1]
        good = (inside.any(1) & (overlap >= share) & (aspect >= 0.5) & (aspect <= 2)).nonzero()
        if len(good):
            first = int(good[0])
            (x, y), (w, h) = corners[first].tolist(), sizes[first].tolist()
            return (top + y, left + x, h, w), inside[first]
    return whole, everything


class SegmentTraining:
    """Augments an image and the classes of its pixels; what lies outside of the image is ignored."""

    def __init__(self, settings: DenseTransforms):
        self.settings, self.colours = settings, settings.colours()

    def __call__(self, image: Image.Image, target: Tensor) -> tuple[Tensor, Tensor]:
        pixels = F.pil_to_tensor(image)
        mask = target.as_subclass(Tensor)[None].to(torch.uint8)  # 255 classes at most, and fast to resize
        size = self.settings.size_of(*pixels.shape[1:])
        pixels, mask = resize_planes(pixels, size), resize_planes(mask, size, NEAREST)
        if not self.settings.fixed:
            window = self.window(mask[0])
            pixels, mask = crop_planes(pixels, window, ground_of(pixels)), crop_planes(mask, window, IGNORE)
        if torch.rand(()) < self.settings.hflip:
            pixels, mask = pixels.flip(2), mask.flip(2)
        return self.colours(pixels.contiguous()), mask[0].long()

    def window(self, mask: Tensor) -> Window:
        """A square of the image, or all of it and some ground where it is smaller."""
        side = self.settings.image_size
        room = [max(n - side, 0) + 1 for n in mask.shape]
        for _ in range(TRIES):
            top, left = (int(torch.randint(n, ())) for n in room)
            counts = torch.bincount(mask[top : top + side, left : left + side].flatten(), minlength=IGNORE + 1)[:IGNORE]
            if counts.max() <= 0.75 * counts.sum() and counts.any():
                break
        return top, left, side, side


def unchanged(image: Image.Image, target: Any) -> tuple[Tensor, Any]:
    return F.pil_to_tensor(image), plain(target)


def plain(target: Any) -> Any:
    """A target without torchvision's tensor classes, whose methods are slow."""
    if isinstance(target, Tensor):
        return target.as_subclass(Tensor)
    return {key: value.as_subclass(Tensor) if isinstance(value, Tensor) else value for key, value in target.items()}


def take(target: Target, rows: Tensor) -> Target:
    """Some of the objects (N,)."""
    return {key: value[rows] if isinstance(value, Tensor) else value for key, value in target.items()}


def resize_planes(planes: Tensor, size: tuple[int, int], how: InterpolationMode = BILINEAR) -> Tensor:
    """Planes (N, H, W) resized to (H, W); masks by the nearest pixel, so that values stay what they are."""
    if not len(planes):
        return planes.new_zeros((0, *size))
    return F.resize(planes, list(size), how, antialias=False)


def moved(target: Target, move: Callable[[Tensor], Tensor], masks: Callable[[Tensor], Tensor]) -> Target:
    """A target with x and y of boxes and keypoints (..., 2) moved by a function, and masks (N, H, W) by another."""
    target = target | dict(boxes=move(target["boxes"].unflatten(1, (2, 2))).flatten(1))
    if "masks" in target:
        target["masks"] = masks(target["masks"])
    if "keypoints" in target:
        points = target["keypoints"]
        target["keypoints"] = torch.cat([move(points[..., :2]), points[..., 2:]], 2)
    return target


def resize(pixels: Tensor, target: Target, size: tuple[int, int]) -> tuple[Tensor, Target]:
    height, width = pixels.shape[1:]
    if size == (height, width):
        return pixels, target
    by = torch.tensor([size[1] / width, size[0] / height])
    target = moved(target, lambda places: places * by, lambda masks: resize_planes(masks, size, NEAREST))
    return resize_planes(pixels, size), target | dict(area=target["area"] * by.prod())


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
    return GROUND if len(pixels) == len(GROUND) else (sum(GROUND) // len(GROUND),) * len(pixels)


def crop(pixels: Tensor, target: Target, window: Window) -> tuple[Tensor, Target]:
    """The part in a window; boxes and keypoints may lie outside of it until `left_over`."""
    corner = torch.tensor([window[1], window[0]])
    target = moved(target, lambda places: places - corner, lambda masks: crop_planes(masks, window))
    return crop_planes(pixels, window, ground_of(pixels)), target


def mirrored_order(count: int, pairs: Pairs) -> list[int]:
    """Indices of keypoints with those of each pair swapped."""
    swapped = dict([*pairs, *((right, left) for left, right in pairs)])
    return [swapped.get(i, i) for i in range(count)]


def flip(pixels: Tensor, target: Target, pairs: Pairs) -> tuple[Tensor, Target]:
    """Mirror left and right; keypoints of a pair change places."""
    width = pixels.shape[2]
    target = moved(target, lambda xy: torch.stack([width - xy[..., 0], xy[..., 1]], -1), lambda masks: masks.flip(2))
    target["boxes"] = target["boxes"][:, [2, 1, 0, 3]]
    if "keypoints" in target:
        target["keypoints"] = target["keypoints"][:, mirrored_order(target["keypoints"].shape[1], pairs)]
    return pixels.flip(2), target


def left_over(target: Target, height: int, width: int) -> Target:
    """Clip boxes to the image, and areas with them; drop objects below a pixel or without a visible pixel.

    Keypoints outside become unlabelled, and all unlabelled ones 0, 0, 0.
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
