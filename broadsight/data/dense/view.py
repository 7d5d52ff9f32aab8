"""Data for dense tasks seen in another way, by other images, classes or pixels; and which labels they show."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors

from ..sources.coco import CocoDataset
from ..sources.mask_folders import MaskFolder
from ..sources.sample_table import some
from ..view import Rows

IGNORE = 255  # pixels of no class


class DenseView(Rows, Dataset):
    """Some images of a data set, with their classes as another numbers them.

    Args:
        dataset, indices: `CocoDataset`, `MaskFolder`, scenes, or a view of them; and the images in order, all if None.
        classes, others_ids: The other's classes, among which all of the data set's own are, and their ids; None if own.
        points: Added to x and y of labelled keypoints: 0.5 turns COCO's indices of pixels into coordinates of boxes.
    """

    def __init__(
        self,
        dataset: Any,
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
        self.category_ids = dict(getattr(dataset, "category_ids", {}))  # by labels; empty for classes of pixels
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
    if isinstance(target, dict):
        return target["labels"].unique().tolist()
    return [label for label in target.as_subclass(Tensor).unique().tolist() if label != IGNORE]


class CocoPixels(DenseView):
    """A COCO file, opened with masks, for semantic segmentation: pixels have the class of the last object there, else
    "background"; crowds are ignored (255) where no object is outlined in them."""

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
        if len(self.coco) > 2000:
            return [0, *self.coco.shown(i)]
        if i not in self._shown:
            self._shown[i] = [label for label in self.target(i).unique().tolist() if label != IGNORE]
        return self._shown[i]

    def __getitem__(self, index: int) -> tuple[Image.Image, tv_tensors.Mask]:
        return self.open(index), self.target(index)


def labels_of_images(dataset: Any) -> list[list[int]]:
    """The labels that each image of a data set shows; masks are read for it, images are not."""
    if not isinstance(_innermost(dataset), MaskFolder):
        return [labels_shown(dataset, i) for i in range(len(dataset))]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda i: labels_shown(dataset, i), range(len(dataset))))


def labels_are_quick(view: DenseView) -> bool:
    """Whether the labels of images are known without drawing thousands of scenes."""
    return isinstance(_innermost(view), CocoDataset | MaskFolder) or len(view) <= 200


def _innermost(view: Any) -> Any:
    while isinstance(view, DenseView):
        view = view.source
    return view


def without_labels(view: DenseView, shown: Sequence[Sequence[int]], verb: str, place: str) -> list[str]:
    """What cannot be learnt or scored for want of labels, given those of each image and where they are, a line each; an
    error if that is everything. The verb is "train on", "validate on" or "evaluate on"."""
    objects, present, notes = bool(view.category_ids), set().union(*shown), []
    what = "objects" if objects else "pixels"
    if not present:
        for i in range(0 if objects else min(len(view), 8)):
            view.target(i)  # says what is wrong with a mask that cannot be read or holds other values
        if getattr(_innermost(view), "keypoints", False):
            raise ValueError(f"{place} has no labelled keypoint to {verb}; every visibility is 0")
        why = "expected annotations, other than crowds, in its images" if objects else "every pixel is ignored"
        raise ValueError(f"{place} has no {what if objects else 'pixels of any class'} to {verb}; {why}")
    if lost := [name for label, name in enumerate(view.classes, int(objects)) if label not in present]:
        notes.append(f"classes without {what} to {verb}: {some(lost, 20)} (of {len(view.classes)} classes)")
    if objects and (empty := sum(not labels for labels in shown)):
        notes.append(f"images without objects to {verb}: {empty:,} of {len(shown):,}")
    if not objects and len(present) == 1 and verb != "train on":
        only = view.classes[present.pop()]
        notes.append(f"the images to {verb} show {only} alone, so mIoU and mAcc have no value: they need two classes")
    return notes
