"""What sources of files have in common: names and labels in arrays, which workers share; a list would be copied."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data.readers.img_extensions import get_img_extensions

from ..contents import of_file
from ..decoding import UnreadableImage, decode

# What timm reads, and what photographs come in besides.
EXTENSIONS = frozenset(get_img_extensions()) | {".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif"}

# How timm, and folders found in the wild, call the parts of a data set; the first of them that is there counts.
TRAIN = ("train", "training")
VAL = ("val", "valid", "validation", "eval", "evaluation", "test", "testing")
PARTS = (*TRAIN, *VAL)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is hidden; macOS leaves `._x.jpg`, and `__MACOSX` in archives."""
    return name.startswith(".") or name == "__MACOSX"


def is_image(name: str) -> bool:
    """Whether a file is an image, by the extension of its name or path."""
    return not is_hidden(os.path.basename(name)) and os.path.splitext(name)[1].lower() in EXTENSIONS


def in_order(names: Iterable[str]) -> list[str]:
    """Sorted as timm sorts classes, numbers by value: the same folders give the same labels there and here."""

    def key(name: str) -> tuple[list[int | str], str]:
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name.lower())], name

    return sorted(names, key=key)


def part_names(folders: Sequence[str], is_part: Callable[[str], bool]) -> dict[str, str | None]:
    """The folders that are parts of a data set: "train" and "val", or "all": None if these folders are none."""
    called = {folder.lower(): folder for folder in reversed(folders)}
    train, val = (next((called[name] for name in names if name in called), None) for names in (TRAIN, VAL))
    # beside folders that are no parts, `train` may be a class: it is also a vehicle
    if all(name.lower() in PARTS for name in folders) or (train and is_part(train)):
        return {key: name for key, name in (("train", train), ("val", val)) if name} or {"all": None}
    return {"all": None}


def by_name(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by part of a data set, as a word in their names says, or the name of their folder where folders differ."""
    if len(paths) == 1:
        return {"all": list(paths)}
    groups: dict[str, list[Path]] = {}
    folders_differ = len({path.parent for path in paths}) > 1
    for path in paths:
        words = re.findall("[a-z]+", path.name.lower()) + [path.parent.name.lower()] * folders_differ
        key = next(("train" if word in TRAIN else "val" for word in words if word in PARTS), "all")
        groups.setdefault(key, []).append(path)
    if "all" in groups and len(groups) > 1:
        groups["unused" if "train" in groups else "train"] = groups.pop("all")
    return {"all": groups["val"]} if groups.keys() == {"val"} else groups


def some(names: Sequence[str], most: int = 5) -> str:
    """The first of many names, in a line."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def noted(what: str, names: Sequence[str]) -> list[str]:
    """A note with the first of some names, if there are any."""
    return [f"{what}: {some(names)}"] * bool(names)


class Names(Sequence[str]):
    """Read-only strings in two arrays. Names of files that are not Unicode keep their bytes."""

    def __init__(self, names: Iterable[str]):
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self.text = np.frombuffer(b"".join(encoded), np.uint8)
        self.ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    @classmethod
    def of(cls, text: np.ndarray, ends: np.ndarray) -> "Names":
        """Take the two arrays: the bytes of all names, and a 0 with the end of each name."""
        names = cls(())
        names.text, names.ends = text, ends
        return names

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:  # ty: ignore[incompatible-method-override]
        if not -len(self) <= index < len(self):
            raise IndexError(f"no name {index} among {len(self)}")
        index %= len(self)
        return self.text[self.ends[index] : self.ends[index + 1]].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        text, ends = self.text.tobytes(), self.ends.tolist()
        return (text[start:end].decode("utf-8", "surrogateescape") for start, end in pairwise(ends))


class Listed:
    """Base of the sources whose samples are rows of arrays; a sub-class has `file`, or else `image` and `vouch`."""

    def __init__(self, names: Sequence[str], labels: Any, classes: Sequence[str], channels: int = 3):
        self.names = names if isinstance(names, Names) else Names(names)
        self.labels = np.asarray(labels, np.int32)
        self.classes, self.channels = tuple(classes), channels

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def name(self, index: int) -> str:
        return self.names[index]

    def open(self, index: int) -> Image.Image:
        try:
            return self.image(index)
        except UnreadableImage as error:
            raise UnreadableImage(f"{self.name(index)}: {error}") from None

    def file(self, index: int) -> str | Path:
        raise NotImplementedError

    def image(self, index: int) -> Image.Image:
        return decode(self.file(index), self.channels)

    def vouch(self, index: int, content: bool) -> bytes:
        return of_file(self.file(index), content)


@dataclass
class Part:
    """A part of a data set: training, validation, or all of it."""

    source: Any
    place: str  # for messages
    notes: list[str] = field(default_factory=list)  # what the user should know, a line each
    about: dict[str, Any] = field(default_factory=dict)  # what runs record of the source besides, as plain types


# The parts that were found: "train", "val", or "all" where nothing is set folders_differ for validation.
Parts = dict[str, Part]


def refuse_crowd(groups: Mapping[str, Sequence[Path]]) -> None:
    """Refuse several COCO files for one part."""
    if crowd := next((files for files in groups.values() if len(files) > 1), None):
        what = f"{crowd[0].parent} has several COCO files: {some([file.name for file in crowd])}"
        raise ValueError(f"{what}; give the path of one, and another for val")
