"""From what a user calls DATA to images with boxes, masks, keypoints or classes of pixels: both parts, or one."""

import copy
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import check_choice
from ..scenes import Scenes
from ..scenes.objects import KEYPOINT_PAIRS, KEYPOINTS
from ..scenes.targets import SKELETON, SceneMasks, SceneObjects
from ..sources import HOLD_OUT, check_split, fingerprint
from ..sources.coco import CocoDataset
from ..sources.mask_folders import MaskFolder, class_file
from ..sources.sample_table import some
from ..sources.scenes import SCENES, scenes_count
from ..stratify import METHOD, missed, stratified, turn
from .layout import TASKS, Dense, DenseTask, find_parts
from .samples import mapped
from .view import IGNORE, CocoPixels, DenseView, labels_are_quick, labels_of_images, without_labels

PIXEL_CENTRE = 0.5  # COCO's keypoints are indices of pixels; its boxes, and all coordinates of ours, are edges

GIVE = "give the images to validate on (val)"
Pairs = tuple[tuple[int, int], ...]
Size = int | tuple[int, int]
Parts = dict[str, DenseView]
NO_POINTS: tuple = (), (), (), 0.0


class DenseSplits(NamedTuple):
    """The images that DATA names; both parts number the classes alike."""

    train: DenseView
    val: DenseView
    classes: tuple[str, ...]  # of objects without the background, the first having label 1; else those that masks hold
    keypoint_names: tuple[str, ...]  # in the order of targets; empty for other tasks, as are the next two
    flip_pairs: Pairs  # keypoints that change places when an image is mirrored
    skeleton: Pairs  # keypoints, counted from 0, to be joined by lines
    keypoint_offset: float  # added to the keypoints of the COCO file; to be taken off from COCO results
    notes: tuple[str, ...]  # what the user should know, a line each
    description: dict[str, Any]  # plain types, with a fingerprint of names and objects; training adds `contents`


class DensePart(NamedTuple):
    """Labelled images to evaluate on, whose classes are numbered as the model's are."""

    images: DenseView
    notes: tuple[str, ...]  # what the user should know
    description: dict[str, Any]  # what was resolved, as plain types


def resolve_dense(
    data: str | Path | None,
    task: DenseTask,
    *,
    val: str | Path | None = None,
    split: float | None = None,
    seed: int = 0,
    channels: int = 3,
    scenes_size: Size = 128,
    scenes_count: int | None = None,
    method: int = METHOD,
) -> DenseSplits:
    """Open what DATA names for one of the dense tasks.

    Args:
        data: None or "scenes" (also "scenes:COUNT"), or a path as for `find_parts`.
        val, split: Path of the images to validate on, else what DATA sets apart, else this fraction held out (0.1).
        scenes_size, scenes_count: Side, or height and width; and scenes to train on, of which a quarter validates.
        method: Of the hold-out, as a run began with it; see `stratify.METHOD`.
    """
    check_choice("task", task, TASKS)
    check_split(split, val, "the images", channels)
    name = "scenes" if data is None else os.fspath(data)
    if name == "scenes" or name.startswith("scenes:"):
        if val is not None or split is not None:
            raise ValueError("scenes validate on scenes of their own; val and split are for other data")
        return _scenes(name, task, scenes_count, scenes_size, seed, channels)
    try:
        return _files(Path(name), task, None if val is None else Path(val), split, seed, channels, method)
    except PermissionError as error:
        raise ValueError(f"permission denied: {error.filename}; make it readable for this user") from None


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
    """One part of DATA, for a model with these classes, ids and keypoints; other arguments are as for `resolve_dense`.

    Args:
        part: "auto" is the part set apart for validation, or everything where nothing is; "train", "val" and, of
            scenes, "test" are those parts; "all" is for data without parts.
        split: Where nothing is set apart, that of the training that held these images out (or "train", the rest).
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
        both = f"{some(points)} but the model {some(keypoint_names)}"
        raise ValueError(f"{found.labels} has keypoints {both}; expected the same")
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


def view_scenes(scenes: Scenes, task: DenseTask, channels: int) -> DenseView:
    if task == "segment":
        return DenseView(SceneMasks(scenes, channels=channels))
    return DenseView(SceneObjects(scenes, masks=task == "instances", keypoints=task == "keypoints", channels=channels))


def _scenes(data: str, task: DenseTask, count: int | None, size: Size, seed: int, channels: int) -> DenseSplits:
    count = scenes_count(data, SCENES if count is None else count)
    drawn = {key: Scenes(n, size=size, seed=seed, split=key) for key, n in (("train", count), ("val", count // 4))}
    views = {key: view_scenes(scenes, task, channels) for key, scenes in drawn.items()}
    notes = ["./scenes is a folder, but scenes are the built-in images"] * Path("scenes").is_dir()
    about: dict[str, Any] = dict(kind="scenes", task=task, train="scenes", val="scenes", seed=seed)
    about["size"] = list(size) if isinstance(size, tuple) else size  # as it is when it comes back from JSON
    if labels_are_quick(views["val"]):
        notes += without_labels(views["val"], labels_of_images(views["val"]), "validate on", "scenes")
    points = (KEYPOINTS, KEYPOINT_PAIRS, SKELETON, 0.0) if task == "keypoints" else NO_POINTS
    return _splits(views, points, notes, about, {key: all_names(view) for key, view in views.items()})


def _files(
    data: Path, task: DenseTask, val: Path | None, split: float | None, seed: int, channels: int, method: int
) -> DenseSplits:
    parts = find_parts(data, task)
    notes = [f"not used: {found.labels}" for key, found in parts.items() if key.startswith("unused")]
    found = parts.get("train") or parts.get("all")
    if found is None:
        raise ValueError(f"{data} has a part to validate, {parts['val'].labels}, but none to train on; add train/")
    other_part, fraction = parts.get("val"), None
    if val is not None:
        if other_part:
            notes.append(f"not used: {other_part.labels}, since {val} is to validate")
        others = find_parts(val, task)
        other_part = others.get("val") or others.get("all") or others["train"]
    elif other_part and split is not None:
        raise ValueError(f"split={split}, but {other_part.labels} is set apart to validate; leave split out")
    names = class_file_of(found, data)
    dataset = open_found(found, task, channels, names)
    offset = PIXEL_CENTRE if task == "keypoints" else 0.0
    if other_part is None:
        fraction = HOLD_OUT if split is None else split
        shown = labels_of_images(dataset)
        held = held_out(all_names(dataset), fraction, seed, str(found.labels), shown if method > 1 else None)
        what = f"{held.sum():,} of {len(held):,} images of {found.labels} are held out to validate"
        notes += [f"{what} (split {fraction}, seed {seed})", *_kept(dataset, shown, held, method)]
        train, valid = (DenseView(dataset, np.flatnonzero(rows), points=offset) for rows in (~held, held))
    else:
        names = class_file_of(other_part, val or data) or names
        other = dataset if other_part == found else open_found(other_part, task, channels, names)
        _check_alike(dataset, other, found.labels, other_part.labels)
        train = DenseView(dataset, points=offset)
        valid = DenseView(other, classes=train.classes, others_ids=train.category_ids, points=offset)
    views = {"train": train, "val": valid}
    places = {"train": found.labels, "val": (other_part or found).labels}
    own = [f"{places[key].name}: {note}" for key, view in views.items() for note in getattr(view.source, "notes", ())]
    notes += [*dict.fromkeys(own), *_missing(views, places, task, other_part is not None)]
    listed = {key: _listed(view) for key, view in views.items()}
    lines = {key: [f"{view.name(i)}\t{len(listed[key][i])}" for i in range(len(view))] for key, view in views.items()}
    about: dict[str, Any] = dict(kind=found.kind, task=task, split=fraction, seed=seed)
    about |= {key: str(place) for key, place in places.items()}
    about["objects"] = {key: sum(map(len, rows)) for key, rows in listed.items()}
    points, joints = NO_POINTS, train.keypoint_names
    if task == "keypoints":
        with mapped(found.labels) as text:  # the first category that has lines, whose keypoints COCO counts from 1
            drawn = re.search(rb'"skeleton"\s*:\s*(\[(?:\s*\[\s*\d+\s*,\s*\d+\s*\]\s*,?)+\s*\])', text)
            bones: list[list[int]] = json.loads(drawn[1]) if drawn else []
        lines_of = tuple((a - 1, b - 1) for a, b in bones if min(a, b) >= 1 and max(a, b) <= len(joints))
        points = joints, mirrored(joints), lines_of, offset
    return _splits(views, points, notes, about, lines)


def _splits(views: Parts, points: tuple, notes: Sequence[str], about: dict, lines: dict[str, list]) -> DenseSplits:
    """With counts, and a fingerprint of lines that name the images and what they hold, in any order."""
    classes = views["train"].classes
    counts = {key: len(view) for key, view in views.items()}
    about |= dict(counts=counts, classes=len(classes), fingerprint=fingerprint(lines))
    return DenseSplits(views["train"], views["val"], classes, *points, tuple(notes), about)


def open_found(found: Dense, task: DenseTask, channels: int, classes: Path | None) -> Any:
    """The data set that lies there, by the numbers of its own classes; `classes` names those of masks."""
    if found.kind == "masks" and task != "segment":
        raise ValueError(f"{found.labels} holds masks of pixels, which are for segment; {task} needs a COCO file")
    if found.kind == "masks":
        dataset: Any = MaskFolder(found.images, found.labels, classes=classes, ignore=IGNORE, channels=channels)
    else:
        options = dict(masks=task in ("instances", "segment"), keypoints=task == "keypoints")
        dataset = CocoDataset(found.labels, found.images, channels=channels, **options)
        dataset = CocoPixels(dataset) if task == "segment" else dataset
    if task == "segment" and (count := len(dataset.classes)) > IGNORE:
        raise ValueError(f"{found.labels} has {count} classes; segment takes {IGNORE}, since 255 is ignored")
    return dataset


def class_file_of(found: Dense, root: Path) -> Path | None:
    """The file of class names of a folder of masks; that of the whole data set serves all of its parts."""
    return None if found.kind == "coco" else class_file(found.images, found.labels, root.expanduser())


def all_names(dataset: Any) -> list[str]:
    return [dataset.name(i) for i in range(len(dataset))]


def held_out(
    names: Sequence[str], fraction: float, seed: int, place: str, classes: list[list[int]] | None = None
) -> np.ndarray:
    """Which of some images (N,) validate: by what they show, see `stratified`, or by a hash of their names alone."""
    if len(names) < 2:
        raise ValueError(f"{place} has one image, which cannot be divided; {GIVE}")
    if classes is not None:
        held = stratified(names, classes, fraction, seed)
        if not held.any():
            raise ValueError(f"{place} has no image to hold out without losing a class in training; {GIVE}")
        return held
    count = min(max(round(fraction * len(names)), 1), len(names) - 1)
    order = np.argsort([turn(name, seed) for name in names], kind="stable")
    return np.isin(np.arange(len(names)), order[:count])


def _kept(dataset: Any, shown: list[list[int]], held: np.ndarray, method: int) -> list[str]:
    """Which classes the hold-out does not show, and why."""
    if method == 1:
        return ["these are held out as when the run began, without a look at their classes"]
    first = int(bool(getattr(dataset, "category_ids", None)))  # 0 is the background
    single, others = ([dataset.classes[label - first] for label in labels] for labels in missed(shown, held))
    notes = [f"classes in a single image keep it for training: {some(single, 20)}"] * bool(single)
    what = "classes that cannot be held out without losing them or others in training"
    return notes + [f"{what}: {some(others, 20)}"] * bool(others)


def _check_alike(train: Any, valid: Any, place: Path, other: Path) -> None:
    """Refuse classes that validate but do not train, and other keypoints."""
    twice = next((name for name in train.classes if list(train.classes).count(name) > 1), None)
    if twice is not None and tuple(train.classes) != tuple(valid.classes):
        raise ValueError(f"{place} has two classes called {twice!r}, so those of {other} cannot be told; rename one")
    if extra := [name for name in valid.classes if name not in train.classes]:
        raise ValueError(f"{other} has classes that {place} has not: {some(extra)}; add them there or remove them")
    names, others = (tuple(getattr(data, "keypoint_names", ())) for data in (train, valid))
    if names != others:
        raise ValueError(f"{other} has keypoints {some(others)} but {place} {some(names)}; both need the same")


def _listed(view: DenseView) -> list[list[int]]:
    """Labels of the objects of each image, without drawing masks; none for classes of pixels."""
    pixels = isinstance(view.source, CocoPixels)
    coco: Any = view.source.coco if pixels else view.source
    if not isinstance(coco, CocoDataset):
        return [[]] * len(view)
    bare = copy.copy(coco)
    bare.masks = False
    renumbered = DenseView(bare, view.rows, classes=view.classes[pixels:])
    return [renumbered.target(i)["labels"].tolist() for i in range(len(view))]


def _missing(views: Parts, places: dict[str, Path], task: DenseTask, separate: bool) -> list[str]:
    """What cannot be learnt or judged for want of labels; an error if that is everything."""
    notes, names = [], views["train"].classes
    if len(names) < 2 and task == "segment":
        raise ValueError(f"{places['train']} has one class only, {names[0]!r}; segmentation needs two")
    for key, verb in (("train", "train on"), ("val", "validate on")):
        view, place = views[key], str(places[key])
        if key == "train" and separate and isinstance(view.source, MaskFolder):
            continue  # too many to read them all for a note
        shown = labels_of_images(view)
        if isinstance(view.source, CocoPixels) and (key == "train" or separate) and not any(map(any, shown)):
            raise ValueError(f"{place} has no objects to {verb}; expected annotations with masks in its images")
        if key == "val" and not separate and not any(shown):
            what = "too few labelled images to hold some out, since training keeps one of each class"
            raise ValueError(f"{place} has {what}; {GIVE}")
        notes += without_labels(view, shown, verb, place)
    return notes


def mirrored(names: Sequence[str]) -> Pairs:
    """Pairs of keypoints whose names differ in left and right."""
    place = {name.lower(): i for i, name in enumerate(names)}
    others = ((i, name.replace("left", "right")) for name, i in place.items() if "left" in name)
    return tuple((i, place[other]) for i, other in others if other in place)
