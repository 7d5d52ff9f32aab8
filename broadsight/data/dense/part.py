"""From what a user calls DATA to the labelled images that a dense model is evaluated on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..scenes import Scenes
from ..sources.sample_table import some
from ..sources.scenes import scenes_count
from ..stratify import METHOD
from .layout import DenseTask, find_parts
from .resolve import PIXEL_CENTRE, all_names, class_file_of, held_out, open_found, view_scenes
from .view import DenseView, labels_of_images


@dataclass(frozen=True)
class DensePart:
    """Labelled images to evaluate on, whose classes are numbered as the model's are."""

    images: DenseView
    notes: tuple[str, ...]  # what the user should know
    description: dict[str, Any]  # what was resolved, as plain types


def open_dense_part(
    data: str,
    task: DenseTask,
    part: str = "auto",
    *,
    classes: Sequence[str],
    category_ids: dict[int, int],
    keypoint_names: Sequence[str] = (),
    split: float | None = None,
    seed: int = 0,
    channels: int = 3,
    scenes_size: int = 128,
    method: int = METHOD,
) -> DensePart:
    """One part of DATA; other arguments are as for `resolve_dense`.

    Args:
        part: "auto" is the part set apart for validation, or everything where nothing is; "train", "val" and, of
            scenes, "test" are those parts; "all" is for data without parts.
        classes, category_ids, keypoint_names: Of the model.
        split: Where nothing is set apart, take the images that training with this split and seed would hold out (or,
            as "train", the rest).
    """
    if split is not None and not 0 < split < 1:
        raise ValueError(f"--split {split}; expected a part between 0 and 1, such as 0.1")
    if data == "scenes" or data.startswith("scenes:"):
        if split is not None:
            raise ValueError("scenes validate on scenes of their own; --split is for other data")
        if part == "all":
            raise ValueError("scenes have the parts train, val and test; leave --part out for val")
        count, key = scenes_count(data), "val" if part == "auto" else part
        scenes = Scenes(count if key == "train" else count // 4, size=scenes_size, seed=seed, split=key)
        about = dict(kind="scenes", data=data, part=key, place=f"scenes/{key}", images=len(scenes))
        return DensePart(view_scenes(scenes, task, channels), (), about | dict(size=scenes_size, seed=seed))
    parts = {key: found for key, found in find_parts(data, task).items() if not key.startswith("unused")}
    order = {"auto": ("val", "all", "train"), "val": ("val", "all"), "train": ("train", "all"), "all": ("all",)}
    chosen = next((name for name in order.get(part, ()) if name in parts), None)
    if chosen is None or (chosen == "all" and part in ("train", "val") and split is None):
        raise ValueError(f"{data} has no part {part!r}; it has {', '.join(parts)}; leave --part out, or give --split")
    if split is not None and chosen != "all":
        raise ValueError(f"--split {split}, but {data} has parts of its own: {', '.join(parts)}; leave --split out")
    found = parts[chosen]
    dataset = open_found(found, task, channels, class_file_of(found, Path(data)))
    if extra := [name for name in dataset.classes if name not in classes]:
        raise ValueError(f"{found.labels} has classes that the model has not: {some(extra)}; remove them from it")
    points = tuple(getattr(dataset, "keypoint_names", ()))
    if task == "keypoints" and points != tuple(keypoint_names):
        what = f"{found.labels} has keypoints {some(points)} but the model {some(keypoint_names)}"
        raise ValueError(f"{what}; expected the same")
    rows = None
    if chosen == "all" and split is not None:
        shown = labels_of_images(dataset) if method > 1 else None
        held = held_out(all_names(dataset), split, seed, str(found.labels), shown)
        rows = np.flatnonzero(~held if part == "train" else held)
    offset = PIXEL_CENTRE if task == "keypoints" else 0.0
    view = DenseView(dataset, rows, classes=classes, others_ids=category_ids, points=offset)
    if task == "segment" and found.kind == "coco" and not any(map(any, labels_of_images(view))):
        raise ValueError(f"{found.labels} has no objects to evaluate on; expected annotations with masks in its images")
    notes = [f"{data} has a part to train on alone, so that one is evaluated"] * (part == "auto" and chosen == "train")
    about = dict(kind=found.kind, data=data, part=chosen, place=str(found.labels), images=len(view), split=split)
    return DensePart(view, (*notes, *getattr(dataset, "notes", ())), about)
