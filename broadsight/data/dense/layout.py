"""Where a data set for dense tasks has its parts: COCO files and pairs of folders, in the layouts that are in use."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from ...errors import nearest
from ...files import refuse_odd
from ..sources.coco_crops import cocos_in
from ..sources.sample_table import by_name, part_names, some
from .samples import IMAGES, MASKS, Dense, find_dense, find_images, has_images

DenseTask = Literal["detect", "instances", "segment", "keypoints"]
TASKS: tuple[str, ...] = get_args(DenseTask)


def find_parts(path: str | Path, task: DenseTask) -> dict[str, Dense]:
    """What lies at a path for a task: "train" and "val", or "all" where nothing is set apart for validation.

    A COCO file; or a folder with one or with two that have train and val in their names, in it or in its
    `annotations` (of COCO's own, instances_* or for keypoints person_keypoints_*); for segmentation also a pair of
    folders of images and masks, which may both be divided (images/train, masks/train); or a folder with any of
    these in its train/ and val/. Files that are not used come as "unused 1" and so on.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(_nowhere(path))
    refuse_odd(path)
    if path.is_file():
        return {"all": find_dense(path)}
    if parts := _here(path, task):
        return parts
    called = part_names([folder.name for folder in path.iterdir() if folder.is_dir()], lambda _: True)
    apart = {key: _here(path / name, task) for key, name in called.items() if name}
    for key, parts in apart.items():
        if len(parts) > 1:
            files = some([str(found.labels.relative_to(path)) for found in parts.values()])
            raise ValueError(f"{path / str(called[key])} holds {files}; keep one of them there")
    if found := {key: next(iter(parts.values())) for key, parts in apart.items() if parts}:
        return found
    dense = find_dense(path)  # has the words for what is missing
    if dense.kind == "masks" and task != "segment":
        raise ValueError(f"{path} holds masks of pixels, which are for segment; {task} needs a COCO file")
    return {"all": dense}


def _here(folder: Path, task: DenseTask) -> dict[str, Dense]:
    """The parts that a folder itself has; none if it has no labels."""
    return (_pairs(folder) if task == "segment" else {}) or _cocos(folder, task)


def _cocos(folder: Path, task: DenseTask) -> dict[str, Dense]:
    files = cocos_in(folder)
    if not files:
        return {}
    prefix = "person_keypoints" if task == "keypoints" else "instances"
    files = [file for file in files if file.name.startswith(prefix)] or files  # COCO's own has six kinds
    groups = by_name(files) if len(files) > 1 else {"all": files}
    unused = groups.pop("unused", [])
    if crowd := next((files for files in groups.values() if len(files) > 1), None):
        what = f"{crowd[0].parent} has several COCO files: {some([file.name for file in crowd])}"
        raise ValueError(f"{what}; give the path of one, and another for val")
    parts = {key: Dense("coco", find_images(file), file) for key, (file,) in groups.items()}
    return parts | {f"unused {n}": Dense("coco", folder, file) for n, file in enumerate(unused, 1)}


def _pairs(folder: Path) -> dict[str, Dense]:
    images = [folder / name for name in IMAGES if (folder / name).is_dir()]
    masks = [folder / name for name in MASKS if has_images(folder / name)]
    if not images or not masks:
        return {}
    if len(images) > 1 or len(masks) > 1:
        names = ", ".join(place.name for place in images + masks)
        raise ValueError(f"{folder} holds more than one pair of images and masks: {names}; rename those not to be used")
    divided = [dict(_divided(place)) for place in (images[0], masks[0])]
    common = {key: tuple(parts[key] for parts in divided) for key in divided[0] if key in divided[1]}
    if "train" in common:
        return {key: Dense("masks", *places) for key, places in common.items()}
    return {"all": Dense("masks", images[0], masks[0])}


def _divided(folder: Path) -> Iterator[tuple[str, Path]]:
    called = part_names([one.name for one in folder.iterdir() if one.is_dir()], lambda _: True)
    return ((key, folder / name) for key, name in called.items() if name and has_images(folder / name))


def _nowhere(path: Path) -> str:
    """What to say about a path that does not exist: the nearest name that does."""
    parent = path.absolute().parent
    beside = [one.name for one in parent.iterdir()] if parent.is_dir() else []
    near = nearest(path, ["scenes"])
    near += [str(path.with_name(name)) for name in nearest(path.name, beside)]
    kinds = "give a COCO .json, a folder with images and labels, or scenes"
    return f"no such data: {path}; " + (f"did you mean {near[0]}?" if near else kinds)
