"""A folder of images and a folder of masks whose pixels are classes: semantic segmentation."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from torch.utils.data import Dataset
from torchvision import tv_tensors

from ..contents import of_file
from ..decoding import UnreadableImage, decode, open_image
from ..dense.samples import open_labelled
from .sample_table import Names, in_order
from .walking import images_below

CLASS_FILES = ("classes.yaml", "classes.yml", "classes.txt")

# PIL stretches PNG's grey values of 2 and 4 bits to bytes; indices they are again divided by these.
STRETCHED = {"L;2": 85, "L;4": 17}


class MaskFolder(Dataset):
    """Images and the class of each of their pixels. A mask has its image's name, but for the extension.

    Masks are files of one channel, grey or with a palette, of up to 16 bits, whose values are the classes. An image
    comes the way round in which its mask was drawn (see `open_labelled`). What lacks its partner is left out and noted.

    Args:
        classes: Names of the classes from 0 up, or a file with them: YAML, a list or a mapping from index to name,
            under `classes`, `names` or nothing, or text, a name a line; by default one in the folders or beside them.
        ignore: The value of pixels that belong to no class, which masks keep; None if there is none.
        suffix: The end of the masks' names, before the extension, that images do not have: "_mask".
    """

    def __init__(
        self,
        images: str | Path,
        masks: str | Path,
        *,
        classes: Sequence[str] | str | Path | None = None,
        ignore: int | None = 255,
        suffix: str = "",
        channels: int = 3,
    ):
        self.images, self.masks, self.ignore, self.channels = Path(images), Path(masks), ignore, channels
        names = _read_classes(classes, self.images, self.masks)
        self.classes = tuple(names.get(i, f"unused {i}") for i in range(max(names) + 1))
        listed = [*names, *([ignore] if ignore is not None and ignore >= 0 else [])]
        self._listed = np.isin(np.arange(max(listed) + 1), listed)
        photos, drawn = _list(self.images, ""), _list(self.masks, suffix)
        both = in_order(photos.keys() & drawn.keys())
        if not both:
            one, other = min(photos.values(), default="no image"), min(drawn.values(), default=f"no *{suffix}.png")
            what = f"no mask in {masks} has the name of an image in {images}"
            raise ValueError(f"{what} (there: {other}, {one}); see suffix=")
        if lossy := next((drawn[key] for key in both if drawn[key].lower().endswith((".jpg", ".jpeg"))), None):
            raise ValueError(f"{self.masks / lossy} is a JPEG, which alters values; save masks as PNG")
        lost = [(photos, drawn, "images without a mask"), (drawn, photos, "masks without an image")]
        alone = [(sorted(mine[key] for key in mine.keys() - theirs.keys()), what) for mine, theirs, what in lost]
        self.notes = tuple(f"{what} left out: {len(files)} (first: {files[0]})" for files, what in alone if files)
        self._images, self._masks = Names(photos[key] for key in both), Names(drawn[key] for key in both)
        if len(self.classes) == 2 and ignore == 255:
            # masks of one object are often painted in 0 and 255; ignoring the 255 would leave nothing to learn
            seen = set().union(*(np.unique(read_indices(self.mask(i))) for i in range(min(8, len(self)))))
            if seen == {0, 255}:
                what = f"masks in {self.masks} hold 0 and 255 but never {self.classes[1]} (1), and 255 is ignored"
                hint = "save the object as 1, or give ignore= another value if only the first masks are like this"
                raise ValueError(f"{what}; {hint}")

    def __len__(self) -> int:
        return len(self._images)

    def name(self, i: int) -> str:
        return self._images[i]

    def mask(self, i: int) -> Path:
        return self.masks / self._masks[i]

    def open(self, i: int) -> Image.Image:
        return self[i][0]

    def target(self, i: int) -> tv_tensors.Mask:
        """(H, W) int64: from 0 up to the number of classes, or `ignore`."""
        indices = read_indices(self.mask(i))
        known = (indices >= 0) & (indices < len(self._listed))
        known[known] = self._listed[indices[known]]
        if not known.all():
            ignored = "" if self.ignore is None else f" or {self.ignore} to ignore"
            what = f"{indices[~known][0]}, which is none of the {len(self.classes)} classes{ignored}"
            raise ValueError(f"{self.mask(i)} holds {what}; correct the mask or the list of classes")
        return tv_tensors.Mask(torch.from_numpy(indices))

    def __getitem__(self, index: int) -> tuple[Image.Image, tv_tensors.Mask]:
        mask = self.target(index)
        file, labels = self.images / self._images[index], f"its mask {self._masks[index]}"
        return open_labelled(file, (mask.shape[1], mask.shape[0]), self.channels, labels), mask

    def shown(self, i: int) -> list[int]:
        """Classes that have pixels in a mask, ascending; none of an unreadable one, which `target` reports."""
        try:
            about = self.mask(i).stat()
            values = _values(str(self.mask(i)), about.st_size, about.st_mtime_ns)
        except (OSError, ValueError):
            return []
        return [value for value in values if 0 <= value < len(self.classes) and value != self.ignore]

    def vouch(self, index: int, content: bool) -> bytes:
        return of_file(self.images / self._images[index], content) + of_file(self.mask(index), content)


@lru_cache(1 << 18)
def _values(file: str, size: int, changed: int) -> tuple[int, ...]:
    """The values in a mask; a file is read again if it has changed."""
    indices = read_indices(Path(file))
    if indices.size and 0 <= indices.min() <= indices.max() < 2**16:  # faster than sorting
        return tuple(np.flatnonzero(np.bincount(indices.ravel())).tolist())
    return tuple(np.unique(indices).tolist())


def read_indices(file: Path) -> np.ndarray:
    """The values of a mask as stored, (H, W) int64; those of a palette, not its colours."""
    try:
        with open_image(file) as image:
            stretched = STRETCHED.get(str(image.tile[0][3]), 1) if image.format == "PNG" else 1
            mode, values = image.mode, np.asarray(image)
    except Exception:
        try:
            decode(file)  # has the words for what is wrong
        except UnreadableImage as error:
            raise UnreadableImage(f"{file}: {error}") from None
        raise
    if mode not in ("1", "L", "P", "I") and not mode.startswith("I;16"):
        hint = "save it as grey or palette PNG whose values are classes"
        raise ValueError(f"{file} holds colours (mode {mode}), not classes; {hint}")
    return values.astype(np.int64) // stretched


def _list(folder: Path, suffix: str) -> dict[str, str]:
    """Files of images in a folder, from their path without suffix and extension to that with."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; expected one of images or of masks")
    found: dict[str, str] = {}
    files = map(Path, images_below(folder, "", [], files_once=False))
    for file in (file for file in files if file.stem.endswith(suffix)):
        key = file.with_name(file.stem.removesuffix(suffix) or file.name).as_posix()
        if key in found:
            raise ValueError(f"{folder} holds {found[key]} and {file.as_posix()}, which pair with the same; keep one")
        found[key] = file.as_posix()
    return found


def class_file(images: Path, masks: Path, *others: Path) -> Path | None:
    """The file of class names in or beside the folders of masks or of images, or in other folders."""
    places = (folder / name for folder in (masks, masks.parent, images, images.parent, *others) for name in CLASS_FILES)
    return next((place for place in places if place.is_file()), None)


def _read_classes(classes: Sequence[str] | str | Path | None, images: Path, masks: Path) -> dict[int, str]:
    """Names by index."""
    classes = class_file(images, masks) if classes is None else classes
    if classes is None:
        raise ValueError(f"no {' or '.join(CLASS_FILES[::2])} in or beside {masks}; write one, or give classes=[…]")
    names: Any
    if not isinstance(classes, str | Path):
        names, where = list(classes), "classes"
    else:
        file, where = Path(classes), str(classes)
        if not file.is_file():
            raise FileNotFoundError(f"{file} is not a file; expected class names, or give them as a list")
        text = file.read_text("utf-8-sig")
        names = [line.strip() for line in text.rstrip().splitlines()]
        if file.suffix.lower() in (".yaml", ".yml", ".json"):
            try:
                names = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(f"{file} is not YAML: {str(error).splitlines()[0]}") from None
            if isinstance(names, Mapping):
                names = next((names[key] for key in ("classes", "names") if key in names), names)
    names = dict(enumerate(names)) if isinstance(names, list) else names
    if not isinstance(names, Mapping) or not names:
        raise ValueError(f"{where} has no class names; expected a list, or a mapping from index to name")
    for index, name in names.items():
        if not isinstance(index, int) or not 0 <= index < 2**16 or name in (None, ""):
            raise ValueError(f"{where} has class {index!r}: {name!r}; expected an index from 0 up and a name")
    return {index: str(name) for index, name in names.items()}
