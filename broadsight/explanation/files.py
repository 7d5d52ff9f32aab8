"""What is kept of explanations: sheets, single maps and raw numbers of each image, and a record of all."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from ..data.names import printable
from ..data.names import unique_stems as unique
from ..files import whole_file
from ..provenance import header
from ..runs.classifier import Classifier
from .inside import kinds_of
from .maps.map import Look
from .overlay import overlay
from .sheet import overview_sheet

RECORD = "explanation.json"
UNTRAINED = "untrained: the weights are random, so the answers and maps mean little"


@dataclass(frozen=True)
class Wanted:
    """What to look at, and what to write besides the sheets.

    Args:
        kinds: Of looks; all that the model has if empty.
        target: Name or number of the class that Grad-CAM explains; the predicted one if None.
        layers: Paths of modules or patterns of them, such as stages.2.*; all if empty.
        depths: Numbers of layers among those of their kind, from 1; "last" is the last. All if empty.
        singles: Each map over the image in a file of its own.
        raw: The maps' numbers in an .npz file.
    """

    kinds: tuple[str, ...] = ()
    target: str | None = None
    layers: tuple[str, ...] = ()
    depths: tuple[str, ...] = ()
    singles: bool = False
    raw: bool = False


@dataclass(frozen=True)
class Seen:
    """One image, as the model sees it, and what it says of it.

    Args:
        image: Resized and cropped, RGB or grey.
        tensor: (1, C, H, W), normalised, on the model's device.
        places, probabilities: The first classes by their numbers, and how probable they are.
        looks: What there is to see inside.
        explained: The class that Grad-CAM explains.
    """

    image: Image.Image
    tensor: Tensor
    places: tuple[int, ...]
    probabilities: tuple[float, ...]
    looks: tuple[Look, ...]
    explained: int


@dataclass
class Explained:
    """What came out of all images.

    Args:
        entries: For each image that was written, what the record says of it.
        looked: What was seen of each image, by its name, where no files are written.
        errors: Images that could not be read, and why.
        folder, record: Where files were written, and what explanation.json holds.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    looked: dict[str, Seen] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    folder: Path | None = None
    record: dict[str, Any] = field(default_factory=dict)


def unique_stems(names: Sequence[str]) -> list[str]:
    """What the files of each image are called; none has the record's name."""
    return unique(names, [Path(RECORD).stem])


def write_files(
    classifier: Classifier, looked: Seen, wanted: Wanted, out: Path, name: str, stem: str, untrained: bool
) -> dict[str, Any]:
    """The files of one image, the sheet last; its entry in the record."""
    names = classifier.classes
    answers = [(names[place], value) for place, value in zip(looked.places, looked.probabilities, strict=True)]
    keys = _keys(looked.looks)
    out.mkdir(parents=True, exist_ok=True)
    singles = [f"{stem}/{key}.png" for key in keys] if wanted.singles else [None] * len(keys)
    for look, file in zip(looked.looks, singles, strict=True):
        if file is not None:
            _save(overlay(looked.image, look), out / file)
    if wanted.raw:
        arrays = {key: look.values.numpy() for key, look in zip(keys, looked.looks, strict=True)}
        with whole_file(out / f"{stem}.npz") as unfinished, open(unfinished, "wb") as file:
            np.savez_compressed(file, image=np.asarray(looked.image), **arrays)
    width, height = looked.image.size
    facts = [
        printable(Path(name).name),
        f"{width} x {height} pixels",
        f"{classifier.parameters / 1e6:.2f} M parameters",
    ]
    sheet = overview_sheet(
        looked.image,
        looked.looks,
        answers,
        classifier.title,
        subtitle=" · ".join(facts),
        explained=names[looked.explained],
        warning=UNTRAINED if untrained else "",
    )
    _save(sheet, out / f"{stem}.png")
    predictions = [
        {"class": names[place], "index": place, "probability": float(f"{value:.6g}")}
        for place, value in zip(looked.places, looked.probabilities, strict=True)
    ]
    return {
        "file": name,
        "sheet": f"{stem}.png",
        "raw": f"{stem}.npz" if wanted.raw else None,
        "predictions": predictions,
        "explained": {"class": names[looked.explained], "index": looked.explained},
        "looks": [_entry(*parts) for parts in zip(looked.looks, keys, singles, strict=True)],
    }


def _entry(look: Look, key: str, file: str | None) -> dict[str, Any]:
    """What the record says of a look: all but its values."""
    fields = {name: getattr(look, name) for name in ("kind", "title", "layer", "depth", "form", "note")}
    values = look.values.double()
    return {
        **fields,
        "size": list(values.shape),
        "smallest": float(f"{values.min():.6g}"),
        "largest": float(f"{values.max():.6g}"),
        "array": key,
        "file": file,
    }


def _keys(looks: Sequence[Look]) -> list[str]:
    """A name for each look that is good for a file: its kind, its layer's number, what it shows."""
    taken: dict[str, int] = {}
    keys = []
    for look in looks:
        words = re.sub(r"\W+", "-", look.title, flags=re.ASCII).strip("-")[:60]
        key = f"{look.kind}-{look.depth + 1:02d}" + (f"-{words}" if words else "")
        taken[key] = taken.get(key, 0) + 1
        keys.append(key if taken[key] == 1 else f"{key}-{taken[key]}")
    return keys


def _save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as unfinished:
        image.save(unfinished, "PNG")


def record_of(
    classifier: Classifier, found: Explained, wanted: Wanted, *, command: str = "", weights: str = "", data: str = ""
) -> dict[str, Any]:
    """All that explanation.json says.

    Args:
        weights: Where they are from, in a word: of a run, pretrained, random.
        data: Where the images are from.
    """
    transforms = classifier.transforms
    layers: dict[str, dict[str, None]] = {}
    for entry in found.entries:
        for look in entry["looks"]:
            layers.setdefault(look["kind"], {})[look["layer"]] = None
    settings: Mapping[str, Any] = asdict(wanted)
    return {
        "model": {
            "title": classifier.title,
            "source": classifier.source,
            "parameters": classifier.parameters,
            "weights": weights,
            "kinds": list(kinds_of(classifier.model)),
        },
        "image": {"size": transforms.size, "channels": transforms.channels, "crop_pct": transforms.crop_pct},
        "device": classifier.device.type,
        "data": data,
        "settings": dict(settings),
        "layers": {kind: list(paths) for kind, paths in layers.items()},
        "interrupted": found.interrupted,
        "images": found.entries,
        "failed": found.errors,
        **header(command),
    }
