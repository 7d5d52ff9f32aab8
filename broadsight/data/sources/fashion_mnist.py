"""Fashion-MNIST from the Debian package that carries it: 60,000 + 10,000 grey images of 28x28 pixels, 10 classes."""

import gzip
import shutil
import zlib
from pathlib import Path

import numpy as np
from torchvision.datasets import FashionMNIST

from ...files import whole_file
from .registry import Options, register_source
from .sample_table import Part, Parts
from .timm_string import DatasetSource

PACKAGE = Path("/usr/share/datasets/fashion-mnist")
FILES = tuple(f"{part}-{what}" for part in ("train", "t10k") for what in ("images-idx3-ubyte", "labels-idx1-ubyte"))


@register_source("fashion-mnist", "fashion-mnist", known=["fashion-mnist"])
def open_fashion_mnist(data: str, options: Options) -> Parts:
    """The images to train on, and those to test on, which validate."""
    unpack(options.cache / "FashionMNIST" / "raw")
    parts = {}
    for key in ("train", "val"):
        dataset = FashionMNIST(str(options.cache), train=key == "train", download=False)
        labels = np.asarray(dataset.targets, np.int32)
        source = DatasetSource(dataset, f"fashion-mnist/{key}", labels, dataset.classes, options.channels)
        parts[key] = Part(source, f"fashion-mnist {key}")
    return parts


def unpack(folder: Path) -> None:
    """Put the package's files where torchvision looks; its own check refuses Debian's archives."""
    for name in FILES:
        if (folder / name).is_file():
            continue
        packed = PACKAGE / f"{name}.gz"
        if not packed.is_file():
            what = f"fashion-mnist is not installed ({packed} is missing)"
            raise FileNotFoundError(f"{what}; on Debian: apt-get install dataset-fashion-mnist")
        try:
            with gzip.open(packed, "rb") as content:
                folder.mkdir(parents=True, exist_ok=True)
                with whole_file(folder / name) as unfinished, unfinished.open("wb") as file:
                    shutil.copyfileobj(content, file)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{packed} cannot be unpacked into {folder}: {error}") from None
