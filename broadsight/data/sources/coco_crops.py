"""Boxes of a COCO file as labelled images: the crops of its images, for classification."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..contents import of_arrays, of_file
from ..decoding import UnreadableImage
from ..dense.samples import find_images, homes, is_coco, open_labelled
from ..inside import refuse_outside
from .sample_table import Listed, Names, Part, Parts, by_name, some
from .walking import entries

SMALLEST = 8  # pixels; less is noise


class CocoSource(Listed):
    """Crops of images.

    Args:
        root: The folder that file names are relative to.
        files: Of the images.
        image_sizes: Of the images (M, 2): width, height.
        images: For each crop, which of the files it is in. A hold-out keeps crops of one image together.
        boxes: For each crop (N, 4): left, top, right, bottom, in pixels.
    """

    rows = ("labels", "images", "boxes")

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        image_sizes: Sequence[tuple[int, int]],
        names: Sequence[str],
        labels: Sequence[int],
        classes: Sequence[str],
        images: Sequence[int],
        boxes: Sequence[Sequence[int]],
        channels: int,
    ):
        super().__init__(names, labels, classes)
        self.root, self.files, self.channels = os.path.abspath(root), Names(files), channels
        self.image_sizes = np.asarray(image_sizes, np.int32).reshape(-1, 2)
        self.images = np.asarray(images, np.int32)
        self.boxes = np.asarray(boxes, np.int32).reshape(-1, 4)

    def image(self, index: int) -> Image.Image:
        image = int(self.images[index])
        file = Path(self.root, self.files[image])
        width, height = (int(side) for side in self.image_sizes[image])
        try:
            whole = open_labelled(file, (width, height), self.channels, "the COCO file says")
        except ValueError as error:  # unreadable, or of another size than the boxes are for
            raise UnreadableImage(str(error).removeprefix(f"{file}: ")) from None
        return whole.crop(tuple(self.boxes[index].tolist()))

    def vouch(self, index: int, content: bool) -> bytes:
        """What stands for a crop: its image's file and its box; see `contents`."""
        file = Path(self.root, self.files[int(self.images[index])])
        return of_file(file, content) + of_arrays(self.boxes[index])


def cocos_in(folder: Path) -> list[Path]:
    """The COCO files of a folder, or else of its `annotations`."""
    for place in (folder, folder / "annotations"):
        names = sorted(entry.name for entry in entries(place)) if place.is_dir() else []
        paths = [place / name for name in names if name.endswith(".json") and not name.startswith(".")]
        if found := [path for path in paths if is_coco(path)]:
            return found
    return []


def open_cocos(paths: Sequence[Path], channels: int = 3) -> Parts:
    """One COCO file, or two with train and val in their names."""
    groups = by_name(paths) if len(paths) > 1 else {"all": list(paths)}
    if crowd := next((files for files in groups.values() if len(files) > 1), None):
        what = f"{crowd[0].parent} has several COCO files: {some([file.name for file in crowd])}"
        raise ValueError(f"{what}; give the path of one, and another for val")
    return {key: part_of(files[0], channels) for key, files in groups.items() if key != "unused"}


def part_of(path: Path, channels: int) -> Part:
    """Crops of all boxes but crowds and those below 8 pixels a side, labelled by category in the order of its id."""
    try:
        root = find_images(path)
        return crops(path, root, json.loads(path.read_bytes()), channels)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a COCO file as expected: {type(error).__name__} {error}") from None


def crops(path: Path, root: Path, content: dict[str, list[dict[str, Any]]], channels: int) -> Part:
    images = {image["id"]: image for image in content["images"]}
    refuse_outside(path, (str(image["file_name"]) for image in images.values()), [root, *homes(path)])
    there = {key for key, image in images.items() if os.path.isfile(root / image["file_name"])}
    number = {key: row for row, key in enumerate(images)}
    categories = {one["id"]: str(one["name"]) for one in sorted(content["categories"], key=lambda one: one["id"])}
    out: Counter[str] = Counter()
    names, kinds, rows, boxes = [], [], [], []
    for one in sorted(content["annotations"], key=lambda one: (number.get(one["image_id"], -1), one["id"])):
        image = images.get(one["image_id"])
        x, y, width, height = one.get("bbox") or (0, 0, 0, 0)
        if image is None or one["image_id"] not in there:
            out["without an image"] += 1
            continue
        if one.get("iscrowd"):
            out["of crowds"] += 1
            continue
        left, top = max(x, 0), max(y, 0)
        right, bottom = min(x + width, image["width"]), min(y + height, image["height"])
        if right - left < SMALLEST or bottom - top < SMALLEST:
            out[f"below {SMALLEST} pixels"] += 1
            continue
        names.append(f"{image['file_name']}#{one['id']}")
        kinds.append(categories[one["category_id"]])
        rows.append(number[one["image_id"]])
        boxes.append((int(left), int(top), int(np.ceil(right)), int(np.ceil(bottom))))
    if not names:
        raise ValueError(f"no boxes of {SMALLEST} pixels or more with images beside {path}")
    known = dict.fromkeys(categories.values())
    classes = [name for name in known if name in set(kinds)]
    label = {name: place for place, name in enumerate(classes)}
    notes = [f"{path}: boxes left out: " + ", ".join(f"{n:,} {why}" for why, n in out.items())] if out else []
    if empty := [name for name in known if name not in label]:
        notes.append(f"{path}: categories without boxes are left out: {some(empty)}")
    files = [str(image["file_name"]) for image in images.values()]
    image_sizes = [(image["width"], image["height"]) for image in images.values()]
    source = CocoSource(
        root, files, image_sizes, names, [label[kind] for kind in kinds], classes, rows, boxes, channels
    )
    return Part(source, str(path), notes)
