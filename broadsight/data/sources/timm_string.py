"""Data sets that timm and torchvision know by name, such as torch/cifar10 and hfds/…, by index."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...errors import nearest
from ..contents import of_file
from ..decoding import UnreadableImage, decode, open_image
from .registry import Options, register_source
from .sample_table import Listed, Names, Part, Parts

# As timm.data.create_dataset spells those of torchvision; error messages suggest the first four.
TORCHVISION = ("cifar10", "cifar100", "mnist", "imagenet", "kmnist", "fashion_mnist", "qmnist", "places365")
TORCHVISION += ("inaturalist", "inat")
UNREADABLE = (OSError, ValueError, SyntaxError, MemoryError)


class DatasetSource(Listed):
    """A data set that gives (image, label) by index, the image being PIL's or a file; samples are named title/index."""

    def __init__(self, dataset: Any, title: str, labels: np.ndarray, classes: Sequence[str], channels: int):
        super().__init__(Names(()), labels, classes, channels)
        self.dataset, self.title = dataset, title

    def name(self, index: int) -> str:
        return f"{self.title}/{index}"

    def stored(self, index: int) -> Any:
        """An image, its bytes, or a file: timm's reader of Hugging Face data sets would open a path by itself."""
        if not hasattr(self.dataset, "image_key"):
            return self.dataset[index][0]
        found = self.dataset.dataset[index][self.dataset.image_key]
        return found.get("bytes") or found["path"]

    def image(self, index: int) -> Image.Image:
        try:
            image = self.stored(int(index))
        except UNREADABLE as error:
            raise UnreadableImage((str(error).splitlines() or [type(error).__name__])[0]) from None
        return decode(image, self.channels)

    def vouch(self, index: int, content: bool) -> bytes:
        """What stands for an image, as far as its data set can say; see `contents`."""
        known = getattr(self.dataset, "samples", None)
        if isinstance(known, list) and isinstance(known[index][0], (str, Path)):  # files
            return of_file(known[index][0], content)
        try:
            image = self.stored(int(index)) if content else b""
        except UNREADABLE:
            return b"unreadable"
        if isinstance(image, str):
            return of_file(image, content)
        if isinstance(image, Image.Image):
            return f"{image.mode} {image.size}".encode() + image.tobytes()
        if isinstance(image, bytes):
            return image
        return image.read() if hasattr(image, "read") else repr(type(image)).encode()


@register_source("timm", "torch/", "hfds/", known=[f"torch/{name}" for name in TORCHVISION[:4]], downloads=True)
def open_dataset(name: str, options: Options) -> Parts:
    """Both parts of a data set, through timm; "train" alone if it has none for validation."""
    root = Path(options.root or options.cache / "datasets")
    kind, _, title = name.lower().partition("/")
    if kind == "torch" and title in ("image_folder", "folder"):
        raise ValueError(f"{name}: give the folder itself, without {name}")
    if kind == "torch" and title not in TORCHVISION:
        near = nearest(title, TORCHVISION, alike=0) or [TORCHVISION[0]]
        raise ValueError(f"no such data: {name}; did you mean torch/{near[0]}?")
    parts: Parts = {}
    for key, split in (("train", "train"), ("val", "validation"), *[("val", "test")] * (kind == "hfds")):
        dataset = None if key in parts else created(name, root, split, options.download)
        if dataset is None:
            continue
        reader = getattr(dataset, "reader", dataset)
        if hasattr(reader, "loader"):
            reader.loader = as_stored  # torchvision's own opens whatever PIL knows, and INaturalist has none
        labels = labels_of(reader)
        classes = classes_of(reader) or [str(label) for label in range(int(labels.max()) + 1)]
        source = DatasetSource(reader, f"{name}/{key}", labels, classes, options.channels)
        parts[key] = Part(source, f"{name} {key}")
    return parts


def created(name: str, root: Path, split: str, download: bool) -> Any:
    """The data set that timm makes of a name, or None where there is no such part."""
    from timm.data import create_dataset

    if name.startswith("hfds/") and find_spec("datasets") is None:  # timm would print besides
        raise ValueError(f"{name} needs a package that is not installed: pip install datasets")
    try:
        return create_dataset(name, root=str(root), split=split, download=download)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if name.startswith("hfds/") and split != "train":
            return None
        hint = "see root" if download else "download=True (--download) fetches it, and root says where it is"
        raise ValueError(f"{name} is not in {root} ({reason.rstrip('.')}); {hint}") from None


def as_stored(path: str | Path) -> Image.Image:
    """Load an image of an accepted format, for torchvision's data sets."""
    with open_image(path) as image:
        image.load()
        return image


def labels_of(dataset: Any) -> np.ndarray:
    """All labels, without decoding where the data set lists them."""
    if hasattr(dataset, "label_key"):  # timm's reader of Hugging Face data sets
        return np.asarray(dataset.dataset[dataset.label_key][:], np.int32)
    if isinstance(getattr(dataset, "index", None), list):  # INaturalist
        targets = [label for label, _ in dataset.index]
    elif (targets := getattr(dataset, "targets", None)) is None:
        targets = [dataset[row][1] for row in range(len(dataset))]
    labels = np.asarray(targets, np.int32)
    return labels if labels.ndim == 1 else labels[:, 0]


def classes_of(dataset: Any) -> list[str]:
    """The names of its classes; of synonyms, as ImageNet has, the first."""
    names = getattr(dataset, "classes", None) or getattr(dataset, "all_categories", None)
    numbers = getattr(dataset, "class_to_idx", None) or {}
    names = sorted(numbers, key=numbers.__getitem__) if names is None else names
    return [name if isinstance(name, str) else str(name[0]) for name in names]
