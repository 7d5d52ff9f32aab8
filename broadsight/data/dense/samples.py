"""Finds labelled images for dense tasks, and opens an image the way round in which its labels were drawn."""

import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import Image

from ..decoding import ORIENTED, UnreadableImage, decode, open_image
from ..sources.walking import images_below

# What the two folders of a pair are called, in the order in which they are looked for.
IMAGES = ("images", "image", "imgs", "img", "JPEGImages")
MASKS = ("masks", "mask", "labels", "annotations", "SegmentationClass", "SegmentationClassRaw")


class Dense(NamedTuple):
    """Where the images are, and their labels: a COCO file for kind "coco", a folder of masks for kind "masks"."""

    kind: Literal["coco", "masks"]
    images: Path
    labels: Path


def find_dense(path: str | Path) -> Dense:
    """What lies in a folder: one COCO file (in it or in its `annotations`) and its images, or a pair of folders.

    Takes the COCO file itself too. Looks at names and at a few words of a JSON file, and reads none of it; an error of
    one line if nothing is found, or more than one thing.
    """
    path = Path(path)
    if path.is_file():
        return Dense("coco", find_images(path), path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; expected a COCO file or a folder with images and labels")
    files = [file for place in (path, path / "annotations") for file in sorted(place.glob("*.json")) if is_coco(file)]
    images = [path / name for name in IMAGES if (path / name).is_dir()]
    masks = [path / name for name in MASKS if has_images(path / name)]
    pair = bool(images and masks)
    if len(files) + pair > 1:
        also = f" and the masks in {masks[0].name}" if pair else ""
        names = ", ".join(str(file.relative_to(path)) for file in files[:5])
        raise ValueError(f"{path} holds {names}{' …' * (len(files) > 5)}{also}; give the path of the COCO file to use")
    if files:
        return Dense("coco", find_images(files[0]), files[0])
    if not pair:
        raise ValueError(
            f"{path} holds no labelled images; expected a COCO JSON file beside its images, "
            f"or a folder {'|'.join(IMAGES[:2])} and one of {'|'.join(MASKS[:3])} with PNG masks of the same names"
        )
    if len(images) > 1 or len(masks) > 1:
        names = ", ".join(folder.name for folder in images + masks)
        raise ValueError(f"{path} holds more than one pair of images and masks: {names}; rename those not to be used")
    return Dense("masks", images[0], masks[0])


def is_coco(file: Path) -> bool:
    """Whether the three words that every COCO file of objects has are in a file, which may be of a gigabyte."""
    if not file.is_file() or not file.stat().st_size:
        return False
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return all(text.find(word) >= 0 for word in (b'"images"', b'"annotations"', b'"categories"'))


def find_images(annotations: Path, name: str | None = None) -> Path:
    """The folder that the file names in a COCO file start from: where its first image, or the one of a name, is."""
    if name is None:
        if not is_coco(annotations):
            raise ValueError(f"{annotations} is not a COCO file; expected JSON with images, annotations and categories")
        with annotations.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
            found = re.search(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")', text)
            name = json.loads(found[1]) if found else ""
    places = [place for place in _places(annotations) if place.is_dir()]
    for place in places:
        if (place / name).is_file():
            return place
    if not name:
        return annotations.parent
    raise FileNotFoundError(
        f"{annotations.name} lists {name}, which is not in {', '.join(map(str, places))}; move them there"
    )


def _places(annotations: Path) -> Iterator[Path]:
    """Where exporters put images: beside the file, or as COCO does, annotations/instances_val2017.json and val2017/."""
    split = annotations.stem.rpartition("_")[2]
    for folder in (annotations.parent, annotations.parent.parent):
        yield folder
        for name in dict.fromkeys((*IMAGES, "data", annotations.stem, split)):
            yield folder / name
        yield folder / "images" / split


def homes(annotations: Path) -> list[Path]:
    """The folders that the data of a COCO file is: its own, and the one around where that is called annotations."""
    folder = annotations.absolute().parent
    return [folder, folder.parent] if folder.name.lower() in ("annotations", "labels") else [folder]


def has_images(folder: Path) -> bool:
    """Whether a folder holds an image, at any depth."""
    return folder.is_dir() and next(images_below(folder, "", []), None) is not None


def open_labelled(file: Path, size: tuple[int, int], channels: int, labels: str) -> Image.Image:
    """An image in mode RGB or L the way round in which its labels were drawn.

    Cameras store images lying on their side with a note (EXIF) to turn them. COCO's coordinates are those of the
    pixels as stored, some labelling programs' those of the turned image. The size that the labels were made for
    tells: stored if that fits, which also settles squares and half turns, else turned.

    Args:
        file: The image.
        size: Width and height of what was labelled.
        channels: 3 or 1, as for `decode`.
        labels: What has that size, for the error if the image has another.
    """
    try:
        with open_image(file) as image:
            image.load()  # PNG may have the note behind the pixels
            if image.size == size and any(key in image.info for key in ORIENTED):
                image = image.copy()  # PIL remembers the note with the file, so that others would turn the image
                for key in ORIENTED:
                    image.info.pop(key, None)
            photo = decode(image, channels)
    except Exception:
        try:
            photo = decode(file, channels)  # has the words for what is wrong
        except UnreadableImage as error:
            raise UnreadableImage(f"{file}: {error}") from None
    if photo.size != size:
        has, wants = ("{}x{}".format(*pair) for pair in (photo.size, size))
        raise ValueError(f"{file} has {has} pixels but {labels} {wants} (width x height); one of them was resized")
    return photo
