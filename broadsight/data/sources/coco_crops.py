"""Boxes of a COCO file as labelled images: the crops of its images, for classification."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..contents import of_arrays
from ..decoding import UnreadableImage
from ..dense.samples import find_images, homes, is_coco, open_labelled
from ..inside import refuse_outside
from .registry import Options, register_source
from .sample_table import Listed, Names, Part, Parts, by_name, noted, refuse_crowd
from .walking import entries, missing_files, parts_in

SMALLEST = 8  # pixels; less is noise


class CocoSource(Listed):
    """Crops of images, `listed` as `Listed` takes them. A hold-out keeps crops of one image together."""

    def __init__(self, files: Sequence[str], sizes: Any, images: Any, boxes: Any, *listed: Any):
        super().__init__(*listed)
        self.files = Names(files)
        self.sizes = np.asarray(sizes, np.int32).reshape(-1, 2)  # width and height of each file
        self.images = np.asarray(images, np.int32)  # of each crop
        self.boxes = np.asarray(boxes, np.int32).reshape(-1, 4)  # left, top, right, bottom in pixels

    def file(self, index: int) -> Path:
        return Path(self.files[int(self.images[index])])

    def image(self, index: int) -> Image.Image:
        file, (width, height) = self.file(index), self.sizes[self.images[index]].tolist()
        try:
            whole = open_labelled(file, (width, height), self.channels, "the COCO file says")
        except ValueError as error:  # unreadable, or of another size than the boxes are for
            raise UnreadableImage(str(error).removeprefix(f"{file}: ")) from None
        return whole.crop(tuple(self.boxes[index].tolist()))

    def vouch(self, index: int, content: bool) -> bytes:
        return super().vouch(index, content) + of_arrays(self.boxes[index])


def cocos_in(folder: Path) -> list[Path]:
    """The COCO files of a folder, or else of its `annotations`."""
    for place in (folder, folder / "annotations"):
        names = sorted(entry.name for entry in entries(place)) if place.is_dir() else []
        paths = [place / name for name in names if name.endswith(".json") and not name.startswith(".")]
        if found := [path for path in paths if is_coco(path)]:
            return found
    return []


@register_source("coco", ".json", claims=lambda path: any(map(cocos_in, [path, *parts_in(path).values()])))
def open_coco(data: str, options: Options) -> Parts:
    """The crops of a COCO file, or of those in a folder or in its train/ and val/."""
    path = Path(data)
    if files := [path] if path.is_file() else cocos_in(path):
        return open_cocos(files, options.channels)
    files = {key: cocos_in(part) for key, part in parts_in(path).items()}
    return {key: next(iter(open_cocos(some, options.channels).values())) for key, some in files.items() if some}


def open_cocos(paths: Sequence[Path], channels: int) -> Parts:
    """One COCO file, or two with train and val in their names."""
    groups = by_name(paths)
    refuse_crowd(groups)
    parts: Parts = {}
    for key, (path, *_) in groups.items():
        try:
            if key != "unused":
                parts[key] = crops(path, find_images(path), json.loads(path.read_bytes()), channels)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a COCO file as expected: {type(error).__name__} {error}") from None
    return parts


def crops(path: Path, root: Path, content: dict[str, list[dict[str, Any]]], channels: int) -> Part:
    """All boxes but crowds and those below 8 pixels a side, labelled by category in the order of its id."""
    images = {image["id"]: image for image in content["images"]}
    called = [str(image["file_name"]) for image in images.values()]
    refuse_outside(path, called, [root, *homes(path)])
    lost = set(missing_files(root, called))
    there = {key for key, image in images.items() if str(image["file_name"]) not in lost}
    number = {key: row for row, key in enumerate(images)}
    categories = {one["id"]: str(one["name"]) for one in sorted(content["categories"], key=itemgetter("id"))}
    out: Counter[str] = Counter()
    names, kinds, rows, boxes = [], [], [], []
    for one in sorted(content["annotations"], key=lambda one: (number.get(one["image_id"], -1), one["id"])):
        if one["image_id"] not in there or one.get("iscrowd"):
            out["of crowds" if one["image_id"] in there else "without an image"] += 1
            continue
        image, (x, y, width, height) = images[one["image_id"]], one.get("bbox") or (0, 0, 0, 0)
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
    notes += noted(f"{path}: categories without boxes are left out", [name for name in known if name not in label])
    files = [os.path.join(os.path.abspath(root), name) for name in called]
    sizes = [(image["width"], image["height"]) for image in images.values()]
    labels = [label[kind] for kind in kinds]
    return Part(CocoSource(files, sizes, rows, boxes, names, labels, classes, channels), str(path), notes)
