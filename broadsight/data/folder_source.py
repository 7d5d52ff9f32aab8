"""Pictures in class folders.

Not timm's reader: it takes the innermost folder for the class, keeps a list of tuples, and reads hidden files.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from PIL import Image

from .decoding import decode
from .listing import Listed, Part, Parts, in_order, is_hidden, is_image, part_names, some

# How folder pairs for segmentation are called.
IMAGES = {"image", "images", "img", "imgs", "jpegimages"}
MASKS = {"mask", "masks", "labels", "annotations", "segmentation", "segmentationclass", "seg"}


class FolderSource(Listed):
    """Files under a root, by their paths relative to it."""

    def __init__(self, root: Path, names: Sequence[str], labels: Sequence[int], classes: Sequence[str], channels: int):
        super().__init__(names, labels, classes)
        self.root, self.channels = os.path.abspath(root), channels

    def picture(self, index: int) -> Image.Image:
        return decode(os.path.join(self.root, self.names[index]), self.channels)


def open_folder(path: Path, channels: int = 3) -> Parts:
    """The class folders in a folder: those in its `train/` and `val/` (or synonyms), or its own."""
    folders = in_order(entry.name for entry in entries(path) if is_folder(entry))
    refuse_masks(path, folders)
    called = part_names(folders, lambda train: holds_folders_alone(path / train))
    parts = {key: part_of(path / name if name else path, channels) for key, name in called.items()}
    if None not in called.values() and (others := [f"{name}/" for name in folders if name not in called.values()]):
        next(iter(parts.values())).notes.append(f"not used in {path}: {some(others)}")
    return parts


def part_of(path: Path, channels: int) -> Part:
    """The class folders of one part. Pictures count at any depth; classes without any are left out and noted."""
    names, labels, classes, empty, ignored, loose = [], [], [], [], [], []
    folders = []
    for entry in entries(path):
        if is_folder(entry):
            folders.append(entry.name)
        elif not is_hidden(entry.name):
            (loose if is_image(entry.name) else ignored).append(entry.name)
    refuse_masks(path, folders)
    for name in in_order(folders):
        files = sorted(walk(path / name, f"{name}/", ignored))
        if not files:
            empty.append(name)
            continue
        labels += [len(classes)] * len(files)
        names += files
        classes.append(name)
    if not names and loose:
        what = f"{path} holds {len(loose):,} images but no class folders"
        raise ValueError(f"{what}; put the images of each class into a folder named after it")
    if not names:
        raise ValueError(f"no images in {path}; expected folders named after classes, with images in them")
    notes = []
    if empty:
        notes.append(f"{path}: class folders without images are left out: {some(empty)}")
    if loose:
        notes.append(f"{path}: images outside class folders are ignored: {some(sorted(loose))}")
    if ignored:
        notes.append(f"{path}: files that are no images are ignored: {some(sorted(ignored))}")
    return Part(FolderSource(path, names, labels, classes, channels), str(path), notes)


def entries(path: Path | str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as found:
        return list(found)


def is_folder(entry: os.DirEntry[str]) -> bool:
    return not is_hidden(entry.name) and is_there(entry.is_dir)


def is_there(kind: Callable[[], bool]) -> bool:
    """Asks an entry for its kind. One that is a link to itself has none."""
    try:
        return kind()
    except OSError:
        return False


def walk(folder: Path | str, prefix: str, ignored: list[str], above: tuple[str, ...] = ()) -> Iterator[str]:
    """Names of all pictures under a folder, with a prefix. Links are followed, but never back to where they started."""
    real = os.path.realpath(folder)
    if real in above:
        return
    for entry in entries(folder):
        if is_folder(entry):
            yield from walk(entry.path, f"{prefix}{entry.name}/", ignored, (*above, real))
        elif is_image(entry.name) and is_there(entry.is_file):
            yield prefix + entry.name
        elif not is_hidden(entry.name):
            ignored.append(prefix + entry.name)


def holds_folders_alone(path: Path) -> bool:
    found = entries(path)
    return any(map(is_folder, found)) and not any(is_image(entry.name) for entry in found)


def holds_images(path: Path) -> bool:
    """Whether there is a picture anywhere under a folder."""
    return next(walk(path, "", []), None) is not None


def refuse_masks(path: Path, folders: Sequence[str]) -> None:
    called = {name.lower() for name in folders}
    if len(folders) == 2 and called & IMAGES and called & MASKS:
        what = f"{path} pairs images with masks ({', '.join(sorted(folders))}), which gives pictures no class"
        raise ValueError(f"{what}; such data is for segmentation: use --task segment")
