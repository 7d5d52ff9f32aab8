"""Where the images of a COCO file are, and opening an image the way round in which its labels were drawn."""

import json
import mmap
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from ..decoding import ORIENTED, UnreadableImage, decode, open_image

# What the two folders of a pair are called, in the order in which they are looked for.
IMAGES = ("images", "image", "imgs", "img", "JPEGImages")
MASKS = ("masks", "mask", "labels", "annotations", "SegmentationClass", "SegmentationClassRaw")


@contextmanager
def mapped(file: Path) -> Generator[mmap.mmap, None, None]:
    """The content of a file, which may be of a gigabyte, without reading it."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
        yield text


def is_coco(file: Path) -> bool:
    """Whether a file has the three words of every COCO file of objects."""
    if not file.is_file() or not file.stat().st_size:
        return False
    with mapped(file) as text:
        return all(text.find(word) >= 0 for word in (b'"images"', b'"annotations"', b'"categories"'))


def find_images(annotations: Path, name: str | None = None) -> Path:
    """The folder that the file names in a COCO file start from: that of its first image, or of the named one."""
    if name is None:
        if not is_coco(annotations):
            raise ValueError(f"{annotations} is not a COCO file; expected JSON with images, annotations and categories")
        with mapped(annotations) as text:
            found = re.search(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")', text)
            name = json.loads(found[1]) if found else ""
    if not name:
        return annotations.parent
    # Where exporters put images: beside the file, or as COCO does, annotations/instances_val2017.json and val2017/
    split = annotations.stem.rpartition("_")[2]
    usual = dict.fromkeys(("", *IMAGES, "data", annotations.stem, split, f"images/{split}"))
    tried = [folder / inner for folder in (annotations.parent, annotations.parent.parent) for inner in usual]
    places = [place for place in tried if place.is_dir()]
    if found := next((place for place in places if (place / name).is_file()), None):
        return found
    listed = ", ".join(map(str, places))
    raise FileNotFoundError(f"{annotations.name} lists {name}, which is not in {listed}; move them there")


def homes(annotations: Path) -> list[Path]:
    """The folders of a COCO file's data: its own, and the one around where that is called annotations."""
    folder = annotations.absolute().parent
    return [folder, folder.parent] if folder.name.lower() in ("annotations", "labels") else [folder]


def open_labelled(file: Path, size: tuple[int, int], channels: int, labels: str) -> Image.Image:
    """An image in mode RGB or L the way round in which its labels were drawn: cameras store images lying on their side
    with a note (EXIF) to turn them. The size (width, height) of the labels decides: as stored if that fits, as COCO's
    coordinates are, which also settles squares and half turns, else turned, as some labelling programs have it."""
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
