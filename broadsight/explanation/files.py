"""What is kept of explanations: sheets, single maps and raw numbers of each image, and a record of all."""

import re
from collections import Counter
from collections.abc import Sequence
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
    """What to look at, all that the model has where nothing is said; and what to write besides the sheets."""

    kinds: tuple[str, ...] = ()
    target: str | None = None  # name or number of the class that Grad-CAM explains; the predicted one if None
    layers: tuple[str, ...] = ()  # paths of modules or patterns of them, such as stages.2.*
    depths: tuple[str, ...] = ()  # numbers of layers among those of their kind, from 1; "last" is the last
    singles: bool = False  # each map over the image in a file of its own
    raw: bool = False  # the maps' numbers in an .npz file


@dataclass(frozen=True)
class Seen:
    """One image, as the model sees it, and what it says of it."""

    image: Image.Image  # resized and cropped, RGB or grey
    tensor: Tensor  # (1, C, H, W), normalised, on the model's device
    places: tuple[int, ...]  # the first classes by their numbers
    probabilities: tuple[float, ...]  # theirs
    looks: tuple[Look, ...]  # what there is to see inside
    explained: int  # the class that Grad-CAM explains


@dataclass
class Explained:
    """What came out of all images."""

    entries: list[dict[str, Any]] = field(default_factory=list)  # of images that were written, what the record says
    looked: dict[str, Seen] = field(default_factory=dict)  # by image, where no files are written
    errors: dict[str, str] = field(default_factory=dict)  # images that could not be read, and why
    interrupted: bool = False
    folder: Path | None = None  # where files were written
    record: dict[str, Any] = field(default_factory=dict)  # what explanation.json holds


def unique_stems(names: Sequence[str]) -> list[str]:
    """What the files of each image are called; none has the record's name."""
    return unique(names, [Path(RECORD).stem])


def write_files(
    classifier: Classifier, looked: Seen, wanted: Wanted, out: Path, name: str, stem: str, untrained: bool
) -> dict[str, Any]:
    """The files of one image, the sheet last; its entry in the record."""
    names, keys = classifier.classes, _keys(looked.looks)
    answers = list(zip(looked.places, looked.probabilities, strict=True))
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
    size = f"{width} x {height} pixels · {classifier.parameters / 1e6:.2f} M parameters"
    words = dict(subtitle=f"{printable(Path(name).name)} · {size}", explained=names[looked.explained])
    named = [(names[place], value) for place, value in answers]
    warning = UNTRAINED if untrained else ""
    sheet = overview_sheet(looked.image, looked.looks, named, classifier.title, **words, warning=warning)
    _save(sheet, out / f"{stem}.png")
    return {
        "file": name,
        "sheet": f"{stem}.png",
        "raw": f"{stem}.npz" if wanted.raw else None,
        "predictions": [
            {"class": names[place], "index": place, "probability": float(f"{value:.6g}")} for place, value in answers
        ],
        "explained": {"class": names[looked.explained], "index": looked.explained},
        "looks": [_entry(*parts) for parts in zip(looked.looks, keys, singles, strict=True)],
    }


def _entry(look: Look, key: str, file: str | None) -> dict[str, Any]:
    """What the record says of a look: all but its values."""
    fields = {name: value for name, value in vars(look).items() if name != "values"}
    values = look.values.double()
    ends = {"smallest": float(f"{values.min():.6g}"), "largest": float(f"{values.max():.6g}")}
    return {**fields, "size": list(values.shape), **ends, "array": key, "file": file}


def _keys(looks: Sequence[Look]) -> list[str]:
    """A name for each look that is good for a file: its kind, its layer's number, what it shows."""
    taken: Counter[str] = Counter()
    keys = []
    for look in looks:
        words = re.sub(r"\W+", "-", look.title, flags=re.ASCII).strip("-")[:60]
        key = f"{look.kind}-{look.depth + 1:02d}" + (f"-{words}" if words else "")
        taken[key] += 1
        keys.append(key if taken[key] == 1 else f"{key}-{taken[key]}")
    return keys


def _save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as unfinished:
        image.save(unfinished, "PNG")


def record_of(
    classifier: Classifier, found: Explained, wanted: Wanted, *, command: str = "", weights: str = "", data: str = ""
) -> dict[str, Any]:
    """All that explanation.json says; `weights` and `data` are where these are from, in words."""
    transforms = classifier.transforms
    layers: dict[str, dict[str, None]] = {}
    for entry in found.entries:
        for look in entry["looks"]:
            layers.setdefault(look["kind"], {})[look["layer"]] = None
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
        "settings": asdict(wanted),
        "layers": {kind: list(paths) for kind, paths in layers.items()},
        "interrupted": found.interrupted,
        "images": found.entries,
        "failed": found.errors,
        **header(command),
    }
