"""Images in class folders; timm's reader takes the innermost for the class, keeps tuples and reads hidden files."""

import os
from collections.abc import Sequence
from pathlib import Path

from .registry import Options, register_source
from .sample_table import Listed, Part, Parts, in_order, is_hidden, is_image, noted, part_names
from .walking import Walk, entries, is_folder, no_classes

# How folder pairs for segmentation are called.
IMAGES = {"image", "images", "img", "imgs", "jpegimages"}
MASKS = {"mask", "masks", "labels", "annotations", "segmentation", "segmentationclass", "seg"}


class FolderSource(Listed):
    """Files under a root, by their paths relative to it."""

    def __init__(self, root: Path, names: Sequence[str], labels: Sequence[int], classes: Sequence[str], channels: int):
        super().__init__(names, labels, classes, channels)
        self.root = os.path.abspath(root)

    def file(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])


@register_source("folder")
def open_folder(data: str, options: Options) -> Parts:
    """The class folders in a folder: those in its `train/` and `val/` (or synonyms), or its own."""
    path = Path(data)
    folders = in_order(entry.name for entry in entries(path) if is_folder(entry))
    refuse_masks(path, folders)

    def is_part(train: str) -> bool:
        found = entries(path / train)
        return any(map(is_folder, found)) and not any(is_image(entry.name) for entry in found)

    called = part_names(folders, is_part)
    parts = {key: part_of(path / (name or ""), options.channels) for key, name in called.items()}
    if None not in called.values():
        others = [f"{name}/" for name in folders if name not in called.values()]
        next(iter(parts.values())).notes.extend(noted(f"not used in {path}", others))
    return parts


def part_of(path: Path, channels: int) -> Part:
    """The class folders of one part, with images at any depth: once, where they lie or else where a link leads."""
    folders, ignored, loose = [], [], []
    for entry in entries(path):
        if is_folder(entry):
            folders.append(entry.name)
        elif not is_hidden(entry.name):
            (loose if is_image(entry.name) else ignored).append(entry.name)
    refuse_masks(path, folders)
    walk, folders = Walk(ignored), in_order(folders)
    for name in folders:
        walk.claim(path / name, name)
    # what lies in one of the folders is that class's, whatever links say
    found = {name: list(walk.own(path / name, f"{name}/", name)) for name in folders}
    for follow in (walk.linked, walk.linked_files):
        for name in folders:
            found[name] += follow(name)
    classes = [name for name, files in found.items() if files]
    names = [file for name in classes for file in sorted(found[name])]
    if not names:
        raise no_classes(path, len(loose))
    labels = [label for label, name in enumerate(classes) for _ in found[name]]
    empty = [name for name, files in found.items() if not files]
    notes = walk.notes(path) + noted(f"{path}: class folders without images are left out", empty)
    notes += noted(f"{path}: images outside class folders are ignored", sorted(loose))
    notes += noted(f"{path}: files that are no images are ignored", sorted(ignored))
    return Part(FolderSource(path, names, labels, classes, channels), str(path), notes)


def refuse_masks(path: Path, folders: Sequence[str]) -> None:
    """Refuse a folder of images beside one of masks."""
    called = {name.lower() for name in folders}
    if len(folders) == 2 and called & IMAGES and called & MASKS:
        what = f"{path} pairs images with masks ({', '.join(sorted(folders))}), which gives images no class"
        raise ValueError(f"{what}; such data is for segmentation: use --task segment")
