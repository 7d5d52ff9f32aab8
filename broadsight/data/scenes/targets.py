"""The built-in scenes as data for dense tasks, with the targets of COCO files and of folders of masks."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import tv_tensors

from ..decoding import decode
from ..view import Rows
from . import Scene, Scenes, annotate, compose
from .objects import KEYPOINTS

SKELETON = tuple((0, other) for other in range(1, len(KEYPOINTS)))  # lines from the centre to all others


class _Drawn(Rows, Dataset):
    """Scenes with targets, which a sub-class makes."""

    notes = ()
    target_of: Any  # from the number of a scene and the scene to its target

    def __init__(self, scenes: Scenes, channels: int):
        super().__init__(scenes)
        self.scenes, self.channels = scenes, channels

    def open(self, index: int) -> Image.Image:
        return decode(self.scenes.open(index), self.channels)

    def target(self, i: int) -> Any:
        scenes = self.scenes
        if scenes.without is not None:
            return self.target_of(i, scenes.scene(i))
        # Without an image: outlines take a third of the time that colours do
        plan = compose(scenes.checked(i), scenes.seed, scenes.split, scenes.classes)
        image, patches = np.zeros((*scenes.size, 3), np.uint8), plan.canvas.paint(*scenes.size)
        return self.target_of(i, annotate(plan, image, patches, None))

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
        scene = self.scenes.scene(index)
        return decode(Image.fromarray(scene.image), self.channels), self.target_of(index, scene)


class SceneObjects(_Drawn):
    """Scenes with the targets of `CocoDataset`, without objects that have no visible pixel; areas are those of the
    visible masks, `image_id` is the number of the scene."""

    keypoint_names = KEYPOINTS

    def __init__(self, scenes: Scenes, *, masks: bool = True, keypoints: bool = False, channels: int = 3):
        super().__init__(scenes, channels)
        self.masks, self.keypoints, self.classes = masks, keypoints, tuple(scenes.classes)
        self.category_ids = {label: label for label in range(1, len(self.classes) + 1)}

    def target_of(self, i: int, scene: Scene) -> dict[str, Any]:
        areas = scene.masks.sum((1, 2))
        seen = areas > 0
        boxes = torch.from_numpy(scene.boxes[seen].reshape(-1, 4))
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=scene.image.shape[:2])  # ty: ignore[no-matching-overload]
        target = dict(boxes=boxes, labels=torch.from_numpy(scene.labels[seen]) + 1, image_id=i)
        target |= dict(iscrowd=torch.zeros(len(boxes)).long(), area=torch.from_numpy(areas[seen].astype(np.float32)))
        if self.masks:
            target["masks"] = tv_tensors.Mask(torch.from_numpy(scene.masks[seen].astype(np.uint8)))
        if self.keypoints:
            target["keypoints"] = torch.from_numpy(scene.keypoints[seen])
        return target


class SceneMasks(_Drawn):
    """Scenes with the class of each pixel, (H, W) int64 as `MaskFolder` has them; class 0 is the background."""

    ignore = 255

    def __init__(self, scenes: Scenes, *, channels: int = 3):
        super().__init__(scenes, channels)
        self.classes = ("background", *scenes.classes)

    def target_of(self, i: int, scene: Scene) -> tv_tensors.Mask:
        return tv_tensors.Mask(torch.from_numpy(scene.semantic.astype(np.int64)))
