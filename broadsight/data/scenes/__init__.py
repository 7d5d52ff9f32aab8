"""Images to learn from without a download: textured objects made of known parts in front of clutter, the same on every
machine and at every size. The parts of an object and their arrangement tell its class, nothing else does."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image

from ...errors import check_choice
from ..record_file import RecordFile
from .composition import Plan, Thing, checked_classes, compose, main_class
from .drawing import colour, contours
from .objects import CLASSES, KEYPOINT_PAIRS, KEYPOINTS, PARTS

__all__ = ["CLASSES", "KEYPOINTS", "KEYPOINT_PAIRS", "PARTS", "Scene", "Scenes", "draw_scene"]

MEMORY = 256 * 2**20  # bytes of images that a process may keep when there is no folder for them


@dataclass(frozen=True, eq=False)
class Scene:
    """An image and its labels: N objects with K keypoints, the main object first."""

    image: np.ndarray  # (H, W, 3) uint8
    label: int  # the class of the main object: the largest, which only an occluder may cover
    boxes: np.ndarray  # (N, 4) float32, x0 y0 x1 y1 in pixels around the visible mask; x1 - x0 is its width
    labels: np.ndarray  # (N,) int64
    masks: np.ndarray  # (N, H, W) bool, the visible pixels; no pixel belongs to two objects
    parts: np.ndarray  # (N, H, W) uint8, the visible part at each pixel: 0 outside, else 1 + its place in PARTS
    keypoints: np.ndarray  # (N, K, 3) float32, x, y in pixels and 0 (absent or outside), 1 (hidden) or 2 (visible)
    semantic: np.ndarray  # (H, W) uint8, 0 for the background, else 1 + the class


def draw_scene(
    index: int,
    *,
    size: int | tuple[int, int] = 64,
    seed: int = 0,
    without: str | None = None,
    classes: Sequence[str] = CLASSES,
    split: str = "train",
) -> Scene:
    """Draw the scene of a number.

    Args:
        index, seed: From 0 up; others give other scenes.
        size: Side, or height and width. Every size shows the same scene; only the noise of the pixels differs.
        without: Leave out the "salient" part of the main object, or its "other" parts; no other pixel changes.
        classes: The objects that occur. Every len(classes) scenes in a row show each of them once as the main one.
        split: "train", "val" or "test"; they share no scene.
    """
    height, width = checked_size(size, without)
    plan = compose(index, seed, split, checked_classes(classes))
    image, patches = render(plan, height, width, without)
    return annotate(plan, image, patches, without)


def checked_size(size: int | tuple[int, int], without: str | None) -> tuple[int, int]:
    """Height and width, if they and what to leave out can be drawn."""
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < 8:
        raise ValueError(f"size={size}; expected at least 8 pixels, less shows nothing")
    if without is not None:
        check_choice("without", without, ("salient", "other"))
    return height, width


def render(plan: Plan, height: int, width: int, without: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The image (H, W, 3) and the visible patch at each pixel (H, W), both uint8."""
    patches = plan.canvas.paint(height, width)
    rims = contours(patches)
    if without:
        rest = plan.canvas.paint(height, width, [plan.things[0].patches[part] for part in removed(plan, without)])
        # Neighbours of what is gone keep their rims: nothing but the part itself changes.
        rims = np.where(rest == patches, rims, contours(rest))
        patches = rest
    return colour(patches, rims, len(plan.canvas.owners), plan.grounds, plan.rng), patches


def removed(plan: Plan, without: str | None) -> list[int]:
    """The parts of the main object that are not drawn."""
    return [part for part in plan.things[0].patches if without and (part == 0) == (without == "salient")]


def annotate(plan: Plan, image: np.ndarray, patches: np.ndarray, without: str | None) -> Scene:
    height, width = patches.shape
    owners = np.array(plan.canvas.owners, np.uint8)
    owner, part = owners[patches, 0], owners[patches, 1]  # H W
    masks = owner == np.arange(1, len(plan.things) + 1, dtype=np.uint8)[:, None, None]  # N H W
    kept = [number for number, mask in enumerate(masks) if mask.any() or not number]
    masks = masks[kept]
    labels = np.array([plan.things[number].label for number in kept], np.int64)
    gone = removed(plan, without)
    points = [locate(plan.things[n], mask, () if n else gone) for n, mask in zip(kept, masks, strict=True)]
    boxes = [Image.fromarray(mask).getbbox() or (0, 0, 0, 0) for mask in masks]
    of_class = [0, *(thing.label + 1 for thing in plan.things)]
    objects: Any = dict(boxes=np.array(boxes, np.float32), labels=labels, masks=masks, keypoints=np.array(points))
    semantic = np.array(of_class, np.uint8)[owner]
    return Scene(image=image, label=int(labels[0]), parts=part * masks, semantic=semantic, **objects)


def locate(thing: Thing, mask: np.ndarray, gone: Sequence[int]) -> np.ndarray:
    """(K, 3): a keypoint is visible where its object is, give or take a pixel; absent with its part."""
    height, width = mask.shape
    points = np.zeros((len(KEYPOINTS), 3), np.float32)
    points[:, :2] = thing.keypoints * min(height, width) + np.array(thing.centre) * (width, height)
    for number, (x, y, _) in enumerate(points.tolist()):
        if thing.on[number] < 0 or thing.on[number] in gone or not (0 <= x < width and 0 <= y < height):
            points[number] = 0
            continue
        column, row = int(x), int(y)
        near = mask[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2]
        points[number, 2] = 2 if near.any() else 1
    return points


class Scenes:
    """A source of `count` scenes, drawn when first needed and kept: in the folder `cache`, shared by all processes and
    runs, else in the memory of each if all take less than 256 MB. Other arguments are as for `draw_scene`."""

    def __init__(
        self,
        count: int,
        *,
        size: int | tuple[int, int] = 64,
        seed: int = 0,
        split: str = "train",
        without: str | None = None,
        cache: str | Path | None = None,
        classes: Sequence[str] = CLASSES,
    ):
        if count < 0:
            raise ValueError(f"count={count}; expected a number of scenes, 0 or more")
        self.count, self.size, self.seed, self.split = count, checked_size(size, without), seed, split
        self.without, self.classes = without, checked_classes(classes)
        main_class(0, seed, split, len(self.classes))  # complains now, not in a worker
        height, width = self.size
        self.store: RecordFile | None = None
        if cache is not None:
            what = f"{seed}-{without}-{zlib.crc32(','.join(self.classes).encode()):08x}-{drawing_version()}"
            file = Path(cache) / f"scenes-{split}-{count}x{height}x{width}-{what}.npy"
            self.store = RecordFile(file, count, (height, width, 3))
        self.keeps = cache is None and count * height * width * 3 <= MEMORY
        self.kept: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.count

    def __getstate__(self) -> dict:
        return {**self.__dict__, "kept": {}}  # a worker draws what it needs rather than being sent it

    def label(self, i: int) -> int:
        """The class of the main object, without drawing."""
        return main_class(self.checked(i), self.seed, self.split, len(self.classes))

    def name(self, i: int) -> str:
        return f"scenes/{self.split}/{self.checked(i):06d}"

    def open(self, i: int) -> Image.Image:
        """The image in RGB; the caller may change it."""
        return Image.fromarray(self.pixels(self.checked(i)))

    def scene(self, i: int) -> Scene:
        """The image with all its labels, drawn anew."""
        options = dict(size=self.size, seed=self.seed, split=self.split, without=self.without, classes=self.classes)
        return draw_scene(self.checked(i), **options)  # ty: ignore[invalid-argument-type]

    def checked(self, i: int) -> int:
        if not 0 <= i < self.count:
            raise IndexError(f"scene {i} of {self.count}")
        return int(i)

    def pixels(self, i: int) -> np.ndarray:
        """(H, W, 3) uint8, from memory or the folder if it was drawn before."""
        image = self.kept.get(i) if self.store is None else self.store.read(i)
        if image is None:
            image, _ = render(compose(i, self.seed, self.split, self.classes), *self.size, self.without)
            if self.store is not None:
                self.store.write(i, image)
            elif self.keeps:
                self.kept[i] = image
        return image


@cache
def drawing_version() -> str:
    """A checksum of the code that draws, so that a folder never serves images of an older version."""
    names = "__init__.py", "composition.py", "drawing.py", "objects.py", "objects.yaml"
    code = b"".join(Path(__file__).with_name(name).read_bytes() for name in names)
    return f"{zlib.crc32(code + PIL.__version__.encode()):08x}"
