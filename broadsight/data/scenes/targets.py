"""The built-in scenes as data for dense tasks: what COCO files and folders of masks give, without a download."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import tv_tensors

from ..decoding import decode
from . import Scene, Scenes, annotate, compose
from .objects import KEYPOINT_PAIRS, KEYPOINTS

SKELETON = tuple((0, other) for other in range(1, len(KEYPOINTS)))  # the centre and what surrounds it


class SceneObjects(Dataset):
    """Scenes and the objects in them, with the targets of `CocoDataset`. Objects of which nothing is seen are left out.

    Args:
        scenes: Which.
        masks, keypoints: Whether targets have them.
        channels: 3 for RGB, 1 for grey images.

    Attributes:
        classes: Their names; the label of the first is 1, 0 being the background.
        category_ids: From a label to itself: scenes have no file with ids of its own.
        keypoint_names: In the order in which targets have them.
        keypoint_pairs: Those that change places when an image is mirrored.
        notes: None.
    """

    keypoint_names = KEYPOINTS
    keypoint_pairs = KEYPOINT_PAIRS
    notes = ()

    def __init__(self, scenes: Scenes, *, masks: bool = True, keypoints: bool = False, channels: int = 3):
        self.scenes, self.masks, self.keypoints, self.channels = scenes, masks, keypoints, channels
        self.classes = tuple(scenes.classes)
        self.category_ids = {label: label for label in range(1, len(self.classes) + 1)}

    def __len__(self) -> int:
        return len(self.scenes)

    def name(self, i: int) -> str:
        return self.scenes.name(i)

    def open(self, i: int) -> Image.Image:
        """The image in mode RGB or L."""
        return decode(self.scenes.open(i), self.channels)

    def target(self, i: int) -> dict[str, Any]:
        """As `CocoDataset.target`; the area is that of the visible mask, the image's id its number."""
        return self._target(i, _uncoloured(self.scenes, i))

    def __getitem__(self, index: int) -> tuple[Image.Image, dict[str, Any]]:
        scene = self.scenes.scene(index)
        return decode(Image.fromarray(scene.image), self.channels), self._target(index, scene)

    def _target(self, i: int, scene: Scene) -> dict[str, Any]:
        areas = scene.masks.sum((1, 2))
        seen = areas > 0
        boxes = torch.from_numpy(scene.boxes[seen].reshape(-1, 4))
        target = dict(
            boxes=tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=scene.image.shape[:2]),  # ty: ignore[no-matching-overload]
            labels=torch.from_numpy(scene.labels[seen]) + 1,
            iscrowd=torch.zeros(len(boxes), dtype=torch.int64),
            area=torch.from_numpy(areas[seen].astype(np.float32)),
            image_id=i,
        )
        if self.masks:
            target["masks"] = tv_tensors.Mask(torch.from_numpy(scene.masks[seen].astype(np.uint8)))
        if self.keypoints:
            target["keypoints"] = torch.from_numpy(scene.keypoints[seen])
        return target


class SceneMasks(Dataset):
    """Scenes and the class of each of their pixels, as `MaskFolder` has them; class 0 is the background.

    Args:
        scenes: Which.
        channels: 3 for RGB, 1 for grey images.
    """

    ignore = 255
    notes = ()

    def __init__(self, scenes: Scenes, *, channels: int = 3):
        self.scenes, self.channels = scenes, channels
        self.classes = ("background", *scenes.classes)

    def __len__(self) -> int:
        return len(self.scenes)

    def name(self, i: int) -> str:
        return self.scenes.name(i)

    def open(self, i: int) -> Image.Image:
        """The image in mode RGB or L."""
        return decode(self.scenes.open(i), self.channels)

    def target(self, i: int) -> tv_tensors.Mask:
        """(H, W) int64, from 0 up to the number of classes."""
        return _classes_of(_uncoloured(self.scenes, i))

    def __getitem__(self, index: int) -> tuple[Image.Image, tv_tensors.Mask]:
        scene = self.scenes.scene(index)
        return decode(Image.fromarray(scene.image), self.channels), _classes_of(scene)


def _uncoloured(scenes: Scenes, i: int) -> Scene:
    """A scene whose image is empty: outlines take a third of the time that colours do."""
    if scenes.without is not None:
        return scenes.scene(i)
    plan = compose(scenes.checked(i), scenes.seed, scenes.split, scenes.classes)
    return annotate(plan, np.zeros((*scenes.size, 3), np.uint8), plan.canvas.paint(*scenes.size), None)


def _classes_of(scene: Scene) -> tv_tensors.Mask:
    return tv_tensors.Mask(torch.from_numpy(scene.semantic.astype(np.int64)))
