"""Where a data set for dense tasks has its parts: COCO files and pairs of folders, in the layouts that are in use."""

from pathlib import Path
from typing import Literal, NamedTuple, get_args

from ...errors import nearest
from ...files import refuse_odd
from ..sources.coco_crops import cocos_in
from ..sources.registry import nearest_path
from ..sources.sample_table import by_name, refuse_crowd, some
from ..sources.walking import holds_images, parts_in
from .samples import IMAGES, MASKS, find_images

DenseTask = Literal["detect", "instances", "segment", "keypoints"]
TASKS: tuple[str, ...] = get_args(DenseTask)


class Dense(NamedTuple):
    """Where the images are, and their labels: a COCO file for kind "coco", a folder of masks for kind "masks"."""

    kind: Literal["coco", "masks"]
    images: Path
    labels: Path


def find_parts(path: str | Path, task: DenseTask) -> dict[str, Dense]:
    """What lies at a path for a task: "train" and "val", or "all" where nothing is set by_part for validation.

    A COCO file; or a folder with one, or with two by train and val in their names, in it or in its `annotations` (of
    COCO's own, instances_* or person_keypoints_*); for segmentation also folders of images and masks, which may both be
    divided; or a folder with any of these in its train/ and val/. Files that are not used come as "unused 1" and so on.
    """
    path = Path(path).expanduser()
    if not path.exists():
        near = nearest(path, ["scenes"]) + nearest_path(path)
        hint = f"did you mean {near[0]}?" if near else "give a COCO .json, a folder with images and labels, or scenes"
        raise FileNotFoundError(f"no such data: {path}; {hint}")
    refuse_odd(path)
    if path.is_file():
        return {"all": Dense("coco", find_images(path), path)}
    if parts := _here(path, task):
        return parts
    folders = parts_in(path)
    by_part = {key: _here(folder, task) for key, folder in folders.items()}
    for key, parts in by_part.items():
        if len(parts) > 1:
            files = some([str(found.labels.relative_to(path)) for found in parts.values()])
            raise ValueError(f"{folders[key]} holds {files}; keep one of them there")
    if found := {key: next(iter(parts.values())) for key, parts in by_part.items() if parts}:
        return found
    if _pairs(path):
        raise ValueError(f"{path} holds masks of pixels, which are for segment; {task} needs a COCO file")
    pair = f"a folder {'|'.join(IMAGES[:2])} and one of {'|'.join(MASKS[:3])} with PNG masks of the same names"
    raise ValueError(f"{path} holds no labelled images; expected a COCO JSON file beside its images, or {pair}")


def _here(folder: Path, task: DenseTask) -> dict[str, Dense]:
    """The parts that a folder itself has; none if it has no labels."""
    if task == "segment" and (pairs := _pairs(folder)):
        return pairs
    files = cocos_in(folder)
    prefix = "person_keypoints" if task == "keypoints" else "instances"
    groups = by_name([file for file in files if file.name.startswith(prefix)] or files)  # COCO's own has six kinds
    unused = groups.pop("unused", [])
    refuse_crowd(groups)
    parts = {key: Dense("coco", find_images(file), file) for key, (file,) in groups.items()}
    return parts | {f"unused {n}": Dense("coco", folder, file) for n, file in enumerate(unused, 1)}


def _pairs(folder: Path) -> dict[str, Dense]:
    images = [folder / name for name in IMAGES if (folder / name).is_dir()]
    masks = [folder / name for name in MASKS if holds_images(folder / name)]
    if not images or not masks:
        return {}
    if len(images) > 1 or len(masks) > 1:
        names = ", ".join(place.name for place in images + masks)
        raise ValueError(f"{folder} holds more than one pair of images and masks: {names}; rename those not to be used")
    photos, drawn = parts_in(images[0]), parts_in(masks[0])
    both = {key: Dense("masks", photos[key], drawn[key]) for key in photos if key in drawn}
    used = {key: pair for key, pair in both.items() if all(map(holds_images, pair[1:]))}
    return used if "train" in used else {"all": Dense("masks", images[0], masks[0])}
