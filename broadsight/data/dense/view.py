"""Data for dense tasks seen in another way: some of the images, other numbers of the classes, objects as pixels."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors

from ..sources.coco import CocoDataset
from ..view import Rows

IGNORE = 255  # pixels of no class
DRAWN = 2000  # images of a COCO file that are drawn to see which classes have pixels


class DenseData(Protocol):
    """Images with targets by index: `CocoDataset`, `MaskFolder`, scenes, and views of them.

    A target is a dict of objects as `CocoDataset.target` has it, or the class of each pixel (H, W).
    """

    @property
    def classes(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def name(self, i: int, /) -> str: ...

    def open(self, i: int, /) -> Image.Image: ...

    def target(self, i: int, /) -> Any: ...

    def __getitem__(self, index: int, /) -> tuple[Image.Image, Any]: ...


class DenseView(Rows, Dataset):
    """Some images of a data set, with their classes as another numbers them.

    Args:
        indices: Of the images, in this order; all if None.
        classes: The classes by the other's numbers, among which all of the data set's own are; None for its own.
        others_ids: The other's `category_ids`, for the classes that the data set does not have.
        points: Added to x and y of labelled keypoints: 0.5 turns indices of pixels, as COCO has them, into
            coordinates like those of boxes, where the first pixel's centre is at 0.5.

    Attributes:
        category_ids: From a label to the id of its category; empty for classes of pixels.
        keypoint_names: Empty for data without keypoints.
    """

    def __init__(
        self,
        dataset: DenseData,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        classes: Sequence[str] | None = None,
        others_ids: dict[int, int] | None = None,
        points: float = 0.0,
    ):
        super().__init__(dataset, indices)
        self.points = points
        own = tuple(dataset.classes)
        self.classes = own if classes is None else tuple(classes)
        self.keypoint_names = tuple(getattr(dataset, "keypoint_names", ()))
        self.category_ids = dict(getattr(dataset, "category_ids", {}))
        self._places: Tensor | None = None
        if self.classes != own:
            places = [self.classes.index(name) for name in own]
            if self.category_ids:  # labels of objects are from 1, 0 is the background
                self._places = torch.tensor([0, *(place + 1 for place in places)])
                ids = {int(self._places[label]): category for label, category in self.category_ids.items()}
                self.category_ids = _filled(ids, others_ids or {}, len(self.classes))
            else:
                self._places = torch.arange(IGNORE + 1)
                self._places[: len(own)] = torch.tensor(places)

    def target(self, i: int) -> Any:
        return self._renumbered(self.source.target(int(self.rows[i])))

    def shown(self, i: int) -> list[int]:
        """Labels of an image that count in a score, ascending; see `CocoDataset.shown`."""
        found = labels_shown(self.source, int(self.rows[i]))
        return found if self._places is None else sorted(self._places[found].tolist())

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
        image, target = self.source[int(self.rows[index])]
        return image, self._renumbered(target)

    def _renumbered(self, target: Any) -> Any:
        if not isinstance(target, dict):
            return target if self._places is None else tv_tensors.Mask(self._places[target.as_subclass(Tensor)])
        if self._places is not None:
            target["labels"] = self._places[target["labels"]]
        if self.points and "keypoints" in target:
            target["keypoints"][..., :2] += self.points * (target["keypoints"][..., 2:] > 0)
        return target


def _filled(ids: dict[int, int], others: dict[int, int], count: int) -> dict[int, int]:
    """An id for every label up to `count`; missing ones take the other's where it is free."""
    for label in range(1, count + 1):
        if label not in ids:
            taken = set(ids.values())
            ids[label] = others[label] if others.get(label, min(taken)) not in taken else max(taken) + 1
    return dict(sorted(ids.items()))


def labels_shown(dataset: Any, i: int) -> list[int]:
    """Labels that an image of any data set shows; from its target where the data set has no `shown`."""
    if hasattr(dataset, "shown"):
        return dataset.shown(i)
    target = dataset.target(i)
    labels = target["labels"] if isinstance(target, dict) else target.as_subclass(Tensor)
    return [label for label in labels.unique().tolist() if isinstance(target, dict) or label != IGNORE]


class CocoPixels(DenseView):
    """A COCO file for semantic segmentation: each pixel has the class of the object there, else "background".

    Where objects overlap, the one that comes later in the file is seen. Crowds are ignored (255) where no object is
    outlined in them.

    Args:
        coco: Opened with masks.
    """

    ignore = IGNORE

    def __init__(self, coco: CocoDataset):
        super().__init__(coco)
        self.coco, self.category_ids, self.keypoint_names = coco, {}, ()
        self._shown: dict[int, list[int]] = {}
        self.classes = ("background", *coco.classes)
        made = "pixels have the class of the last object there; other pixels are background, crowds are ignored"
        self.notes: tuple[str, ...] = (*coco.notes, made)

    def target(self, i: int) -> tv_tensors.Mask:
        """(H, W) int64: from 0 up to the number of classes, or 255."""
        objects = self.coco.target(i)
        masks, crowds = objects["masks"].as_subclass(Tensor).bool(), objects["iscrowd"].bool()
        pixels = torch.zeros(masks.shape[1:], dtype=torch.int64)
        pixels[masks[crowds].any(0)] = IGNORE
        for mask, label in zip(masks[~crowds], objects["labels"][~crowds], strict=True):
            pixels[mask] = label
        return tv_tensors.Mask(pixels)

    def shown(self, i: int) -> list[int]:
        """Classes that have pixels, ascending; of a large file those of its objects, some of which others may hide."""
        if len(self.coco) > DRAWN:
            return [0, *self.coco.shown(i)]
        if i not in self._shown:
            labels = self.target(i).as_subclass(Tensor).unique().tolist()
            self._shown[i] = [label for label in labels if label != IGNORE]
        return self._shown[i]

    def __getitem__(self, index: int) -> tuple[Image.Image, tv_tensors.Mask]:
        return self.open(index), self.target(index)
