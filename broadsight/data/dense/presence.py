"""Which classes labelled images show: what can be held out, what a score can say, and what it cannot."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..sources.coco import CocoDataset
from ..sources.mask_folders import MaskFolder
from ..sources.sample_table import some
from .view import DenseView, labels_shown

DRAWN = 200  # images that are drawn to see what they show; more of them show everything


def labels_of_images(dataset: Any) -> list[list[int]]:
    """The labels that each image of a data set shows; masks are read for it, images are not."""
    if not isinstance(_innermost(dataset), MaskFolder):
        return [labels_shown(dataset, i) for i in range(len(dataset))]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda i: labels_shown(dataset, i), range(len(dataset))))


def told_quickly(view: DenseView) -> bool:
    """Whether the labels of images are known without drawing thousands of scenes."""
    return isinstance(_innermost(view), CocoDataset | MaskFolder) or len(view) <= DRAWN


def _innermost(view: Any) -> Any:
    while isinstance(view, DenseView):
        view = view.source
    return view


def without_labels(view: DenseView, shown: Sequence[Sequence[int]], verb: str, place: str) -> list[str]:
    """What cannot be learnt or scored for want of labels, a line each; an error if that is everything.

    Args:
        shown: The labels of each image.
        verb: "train on", "validate on" or "evaluate on".
        place: Where the labels are.
    """
    objects = bool(view.category_ids)
    present = {label for labels in shown for label in labels}
    if not present:
        for i in range(0 if objects else min(len(view), 8)):
            view.target(i)  # says what is wrong with a mask that cannot be read or holds other values
        if getattr(_innermost(view), "keypoints", False):
            raise ValueError(f"{place} has no labelled keypoint to {verb}; every visibility is 0")
        what = "objects" if objects else "pixels of any class"
        expected = "expected annotations, other than crowds, in its images" if objects else "every pixel is ignored"
        raise ValueError(f"{place} has no {what} to {verb}; {expected}")
    what = "objects" if objects else "pixels"
    notes = []
    if lost := [name for label, name in enumerate(view.classes, int(objects)) if label not in present]:
        notes.append(f"classes without {what} to {verb}: {some(lost, 20)} (of {len(view.classes)} classes)")
    if objects and (empty := sum(not labels for labels in shown)):
        notes.append(f"images without objects to {verb}: {empty:,} of {len(shown):,}")
    if not objects and len(present) == 1 and verb != "train on":
        (only,) = (view.classes[label] for label in present)
        notes.append(f"the images to {verb} show {only} alone, so mIoU and mAcc have no value: they need two classes")
    return notes
