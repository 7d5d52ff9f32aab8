"""ImageNet and the sets made to go with it, told apart by the names of their class folders and images."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from textwrap import shorten

import numpy as np

from ..data.sources.folder import FolderSource, part_of
from ..data.sources.registry import Source
from ..data.sources.sample_table import TRAIN, VAL, in_order, is_image, some
from ..data.sources.walking import entries, images_below, is_folder, is_there
from ..data.view import under
from ..files import refuse_odd
from ..runs.names import synsets

V2 = "imagenet-v2"
REAL = "imagenet-real"

VAL_IMAGE = re.compile(r"ILSVRC2012_val_([0-9]{8})(_n[0-9]{8})?\.\w+")  # some archives add the class
VAL_IMAGES = 50_000
SKETCH_IMAGE = re.compile(r"sketch_[0-9]+\.\w+")
MOST_SETS = 100  # a folder with more folders than this in it holds classes, not sets


@dataclass(frozen=True)
class SetInfo:
    """What is known of a set before its folder is seen."""

    title: str  # what reports call it
    images: int  # that the whole set has
    folder: str  # what it is usually called, unpacked
    subset: str | None = None  # "a" or "r", as timm calls those with 200 classes


MATCHED = "imagenetv2-matched-frequency-format-val"
SETS = {
    "imagenet": SetInfo("ImageNet", VAL_IMAGES, "val"),
    REAL: SetInfo("ImageNet ReaL", VAL_IMAGES, "val"),
    V2: SetInfo("ImageNet-V2", 10_000, MATCHED),
    f"{V2}-matched-frequency": SetInfo("ImageNet-V2 matched-frequency", 10_000, MATCHED),
    f"{V2}-threshold-0.7": SetInfo("ImageNet-V2 threshold-0.7", 10_000, "imagenetv2-threshold0.7-format-val"),
    f"{V2}-top-images": SetInfo("ImageNet-V2 top-images", 10_000, "imagenetv2-top-images-format-val"),
    "imagenet-a": SetInfo("ImageNet-A", 7_500, "imagenet-a", "a"),
    "imagenet-r": SetInfo("ImageNet-R", 30_000, "imagenet-r", "r"),
    "imagenet-sketch": SetInfo("ImageNet-Sketch", 50_889, "sketch"),
}
# Letters and digits in the names of folders that tell V2's three sets apart; all three have the same shape.
V2_WORDS = {"matched": "matched-frequency", "threshold": "threshold-0.7", "topimages": "top-images"}


@dataclass(frozen=True, eq=False)
class ImageNetSet:
    """A folder of images, labelled by ImageNet's 1000 classes; of ReaL without class folders by the first accepted."""

    name: str  # a key of SETS
    title: str
    path: Path  # where the class folders, or the images, are
    source: Source
    kept: np.ndarray | None = None  # the 200 classes that compete, ascending; None if all 1000 do
    accepted: dict[int, tuple[int, ...]] | None = None  # by row the classes that are right; None: the label alone
    notes: tuple[str, ...] = ()


def indices_of(classes: Sequence[str]) -> np.ndarray | None:
    """Where class folders (n,) are among the 1000, as synsets or numbers by value; None if any of them is not."""
    places, numbers = _places(classes, numbers=False), _places(classes, numbers=True)
    if None in places and len(set(numbers)) == len(synsets()):  # folders 0 to 9 are more likely to be digits
        places = numbers
    return np.array(places, np.int64) if places and None not in places else None


def find_sets(root: str | Path) -> dict[str, Path]:
    """The sets that a folder holds, in the order of SETS: the folder itself, or else folders in it.

    Of two of a kind it is the one with the usual name, or the first; never `train`. A folder that is called after a set
    counts in any shape: `open_set` says what is wrong. A validation set with its original names serves ReaL too.
    """
    root = _folder(root)
    found = _located(root, 2)
    used = {folder for place in found.values() for folder in (place, *place.parents)}
    for folder in _folders(root):
        name = called_after(folder) if "imagenet" in folder.lower() else None  # other data has a `sketch`
        if name and name not in found and root / folder not in used:
            found[name] = root / folder
    if "imagenet" in found and REAL not in found and VAL_IMAGE.fullmatch(_look(found["imagenet"])[1]):
        found[REAL] = found["imagenet"]
    return {name: found[name] for name in SETS if name in found}


def open_set(path: str | Path, name: str, channels: int = 3, real: str | Path | None = None) -> ImageNetSet:
    """Open a folder, or the one in it, that has the shape of one of SETS; `real` is a file of labels for ReaL."""
    name, path = _fitting(_folder(path), name)
    if name == REAL:
        return _open_real(path, channels, real)
    info, folders = SETS[name], _folders(path)
    source, notes = (part := part_of(path, channels)).source, part.notes
    if empty := in_order(set(folders) - set(source.classes)):
        what = f"{path} has {len(empty):,} of {len(folders):,} class folders without images"
        raise ValueError(f"{what}: {some(empty, 3)}; unpack {info.title} again")
    indices = indices_of(source.classes)
    assert indices is not None, "the shape of the folder was checked"
    source.classes = tuple(synsets()[index] for index in indices)
    source = under(source, synsets())
    if len(source) != info.images:
        notes.append(f"{path} has {len(source):,} images; {info.title} has {info.images:,}")
    return ImageNetSet(name, info.title, path, source, _kept(name).copy() if info.subset else None, notes=tuple(notes))


def _folder(path: str | Path) -> Path:
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"no such folder: {path}; give the folder of an unpacked set")
    if not path.is_dir():
        raise ValueError(f"{path} is a file; unpack it and give the folder")
    return path


def _folders(path: Path) -> list[str]:
    return in_order(entry.name for entry in entries(path) if is_folder(entry))


def _look(path: Path) -> tuple[list[str], str]:
    """The folders in a folder, and the name of an image in it or else in the first of them; "" if there is none."""
    folders = _folders(path)
    for place in (entries(path), entries(path / folders[0]) if folders else ()):
        if images := [entry.name for entry in place if is_image(entry.name) and is_there(entry.is_file)]:
            return folders, min(images)
    return folders, ""


def _info(name: str) -> str:
    """A file that timm brings along."""
    return (files("timm.data") / "_info" / name).read_text("utf-8")


@cache
def _kept(name: str) -> np.ndarray:
    """The classes that a set has, ascending."""
    subset = SETS[name].subset
    return np.array(_info(f"imagenet_{subset}_indices.txt").split() if subset else range(len(synsets())), np.int64)


def _places(classes: Sequence[str], numbers: bool) -> list[int | None]:
    """For each class folder its index among the 1000, or None."""
    if not numbers:
        place = {name: index for index, name in enumerate(synsets())}
        return [place.get(name) for name in classes]
    values = [int(name) if re.fullmatch("[0-9]{1,9}", name) else len(synsets()) for name in classes]
    return [value if value < len(synsets()) else None for value in values]


def _kind(path: Path) -> str | None:
    """Which of SETS a folder is by its own class folders."""
    folders, image = _look(path)
    of_val = VAL_IMAGE.fullmatch(image) is not None
    if not folders:
        return REAL if of_val else None
    if len(folders) == len(synsets()) and _misfit(folders, "imagenet") is None:  # and Sketch's folders are the same
        sketch = SKETCH_IMAGE.fullmatch(image) or (called_after(path.name) == "imagenet-sketch" and not of_val)
        return "imagenet-sketch" if sketch else "imagenet"
    if of_val:
        return None
    if all(map(str.isdecimal, folders)):
        named = Path(os.path.abspath(path))
        return _which_v2(named.name, named.parent.name) if _misfit(folders, V2) is None else None
    return next((name for name in ("imagenet-a", "imagenet-r") if _misfit(folders, name) is None), None)


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _which_v2(*names: str) -> str:
    """Which of V2's sets the first name says that says one; or any."""
    said = (f"{V2}-{which}" for name in names for word, which in V2_WORDS.items() if word in _letters(name))
    return next(said, V2)


def called_after(name: str) -> str | None:
    """Which of SETS a folder is called after. `val` is not: much other data has it."""
    letters = _letters(name)
    if letters.startswith("imagenetv2"):
        return _which_v2(name)
    known = {"imageneta": "imagenet-a", "imagenetr": "imagenet-r", "imagenetsketch": "imagenet-sketch"}
    return known.get(letters, "imagenet-sketch" if letters == "sketch" else None)


def _located(path: Path, depth: int) -> dict[str, Path]:
    """The sets that a folder holds: itself, or else folders in it, as deep as that. Those in `train` do not count."""
    if kind := _kind(path):
        return {kind: path}
    found: dict[str, Path] = {}
    folders = _folders(path)
    classes = all(map(str.isdecimal, folders)) or any(x is not None for x in _places(folders, numbers=False))
    for folder in folders if depth and len(folders) <= MOST_SETS and not classes else ():
        if folder.lower() in TRAIN:
            continue
        for kind, place in _located(path / folder, depth - 1).items():
            if kind == REAL and len(folders) > 1 and place.name.lower() not in VAL:
                continue  # a class with images of the validation set in it
            if kind not in found or folder == SETS[kind].folder or called_after(folder) == kind:
                found[kind] = place
    return found


def _misfit(folders: Sequence[str], name: str) -> str | None:
    """What is wrong with the class folders of a set, or None."""
    kept, numbers = _kept(name).tolist(), name.startswith(V2)
    places, wanted = _places(folders, numbers), set(kept)
    if len(folders) == len(kept) and set(places) == wanted:
        return None
    known = [place for place in places if place in wanted]
    extra = [folder for folder, place in zip(folders, places, strict=True) if place not in wanted]
    missing = [str(place) if numbers else synsets()[place] for place in kept if place not in set(known)]
    classes = f"{SETS[name].title}'s {len(kept):,}" + (", which are called 0 to 999" if numbers else "")
    text = f"has {len(folders):,} class folders, {len(set(known)):,} of {classes}"
    text += f"; missing {some(missing, 3)}" if missing else ""
    text += f"; not of them {some(extra, 3)}" if extra else ""
    return text + ("; two of one number" if len(known) > len(set(known)) else "")


def _fits(path: Path, name: str) -> str | None:
    """The name under which a folder is the set called so, which may say more; None if it is not."""
    if name == REAL:
        return name if VAL_IMAGE.fullmatch(_look(path)[1]) else None
    kind = _kind(path) or ""
    if name.startswith(V2) and kind.startswith(V2) and V2 in (name, kind):
        return max(name, kind, key=len)
    return name if kind == name else None


def _fitting(path: Path, name: str) -> tuple[str, Path]:
    """The folder, or the only one in it, that has the shape of a set, with the set's name."""
    if fit := _fits(path, name):
        return fit, path
    folders = _folders(path)
    places = [path / folder for folder in folders] if len(folders) <= MOST_SETS else []
    inner = [(fit, place) for place in places if (fit := _fits(place, name))]
    if len(inner) > 1:
        inner = [(fit, place) for fit, place in inner if place.name.lower() in VAL] or inner
    if len(inner) == 1:
        return inner[0]
    title, give = SETS[name].title, f"give the unpacked {SETS[name].folder} folder"
    if inner:
        names = some([f"{place.name}/" for _, place in inner])
        what = f"has several folders of the shape of {title}: {names}; give one of them"
    elif name == REAL:
        _, image = _look(path)
        what = f"has no images called ILSVRC2012_val_00000001.JPEG and so on{f', but {image}' if image else ''}"
        what += f"; {title} goes by these names: give the original validation images"
    elif not folders:
        called = "0 to 999" if name.startswith(V2) else f"{synsets()[_kept(name)[0]]}, …"
        what = f"has no class folders; {title} has {len(_kept(name)):,}, called {called}; {give}"
    elif kind := _kind(path):
        what = f"is {SETS[kind].title} by its names, not {title}; {give}, or name it {kind}"
    else:
        misfit = _misfit(folders, name) or f"has {title}'s class folders, but images of the validation set"
        what = f"{misfit}; {give}"
    raise ValueError(f"{path} {what}")


def _open_real(path: Path, channels: int, file: str | Path | None) -> ImageNetSet:
    info, ignored = SETS[REAL], []
    names = sorted(images_below(path, "", ignored))
    numbers = [int(x[1]) if (x := VAL_IMAGE.fullmatch(os.path.basename(name))) else 0 for name in names]
    if wrong := [name for name, number in zip(names, numbers, strict=True) if not 1 <= number <= VAL_IMAGES]:
        what = f"{len(wrong):,} of {len(names):,} images in {path} are not called ILSVRC2012_val_00000001.JPEG to"
        raise ValueError(f"{what} …{VAL_IMAGES:08}.JPEG: {some(wrong, 3)}; ReaL goes by these names")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{path} has {len(numbers) - len(set(numbers)):,} images twice; leave one of each")
    labels = _real_labels(file)
    right = {name: tuple(labels[number - 1]) for name, number in zip(names, numbers, strict=True) if labels[number - 1]}
    if not right:
        raise ValueError(f"none of the {len(names):,} images in {path} has labels in {info.title}; give more of them")
    index = {name: index for index, name in enumerate(synsets())}
    given = [index.get(name.partition("/")[0], classes[0]) for name, classes in right.items()]
    source, accepted = FolderSource(path, list(right), given, synsets(), channels), dict(enumerate(right.values()))
    notes = []
    if len(names) < info.images:
        notes.append(f"{path} has {len(names):,} images; {info.title} has {info.images:,}")
    if len(right) < len(names):
        notes.append(f"{len(names) - len(right):,} images without labels in {info.title} are left out")
    if ignored:
        notes.append(f"{path}: files that are no images are ignored: {some(sorted(ignored))}")
    return ImageNetSet(REAL, info.title, path, source, accepted=accepted, notes=tuple(notes))


def _real_labels(file: str | Path | None) -> list[list[int]]:
    """For each image of the validation set, by its number, the classes that are right; none if nobody agreed."""
    if file is None:
        return json.loads(_info("imagenet_real_labels.json"))
    expected = f"expected {VAL_IMAGES:,} lists of classes from 0 to {len(synsets()) - 1}, as in ReaL's real.json"
    path = Path(file).expanduser()
    refuse_odd(path)
    try:
        labels = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {(error.strerror or str(error)).lower()}; {expected}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{file} is no JSON; {expected}") from None
    if not isinstance(labels, list) or len(labels) != VAL_IMAGES:
        what = f"{len(labels):,} entries" if isinstance(labels, list) else f"a {type(labels).__name__}"
        raise ValueError(f"{file} has {what}; {expected}")
    for number, row in enumerate(labels, 1):
        if not isinstance(row, list) or any(type(label) is not int or not 0 <= label < len(synsets()) for label in row):
            raise ValueError(f"{file}: entry {number:,} is {shorten(json.dumps(row), 40)}; {expected}")
    return labels
