"""From what a user calls DATA to two sources of labelled images: one to train on, one to validate on."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from ...errors import nearest
from ...files import refuse_odd
from ..stratify import METHOD, stratified, turn
from ..view import Grey
from .sample_table import Listed, Part, Parts, part_names, some

SCENES = 8000
HOLD_OUT = 0.1
DATASETS = ("torch/", "hfds/")
STREAMS = ("hfids/", "tfds/")
REMOTE = ("http:", "https:", "pipe:", "s3:", "gs:", "hf:", "ftp:")
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
LISTS = (".csv", ".tsv", ".txt")
KNOWN = ("scenes", "fashion-mnist", "elpv", "torch/cifar10", "torch/cifar100", "torch/mnist", "torch/imagenet")


class Source(Protocol):
    """Labelled images by index. Cheap to look into: only `open` decodes."""

    @property
    def classes(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def label(self, index: int, /) -> int:
        """An index into classes."""
        ...

    def name(self, index: int, /) -> str:
        """For reports: a path relative to the root, tar:member, or dataset/split/index."""
        ...

    def open(self, index: int, /) -> Image.Image:
        """The image as `decode` gives it. Raises UnreadableImage."""
        ...


@dataclass(frozen=True)
class Splits:
    """What DATA was resolved to.

    Attributes:
        train, val: The two sources; both number the classes alike.
        classes: Their names.
        notes: What the user should know, a line each: empty classes, files ignored, images held out.
        description: What was resolved, as plain types for JSON: kind, places, counts, hold-out, and a fingerprint of
            all names and classes, by which a resumed run notices other data. Training adds `contents`.
    """

    train: Source
    val: Source
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    description: dict[str, Any]


def resolve(
    data: str | Path | None,
    *,
    val: str | Path | None = None,
    split: float | None = None,
    seed: int = 0,
    channels: int = 3,
    scenes_size: int = 64,
    scenes_count: int | None = None,
    root: str | None = None,
    download: bool = False,
    cache: str | Path | None = None,
    method: int = METHOD,
) -> Splits:
    """Opens what DATA names.

    What a path holds is told by its content, in this order: a .json file, or a folder with one COCO .json in it or in
    each of its train/ and val/, gives the crops of its boxes; a tar in which images share their names with `.cls` or
    `.json` files is a WebDataset shard, any other a tar of class folders; a folder with .tar files in it, or in its
    train/ and val/, and no images in its folders holds those; any other folder holds class folders.

    Args:
        data: None or "scenes" (also "scenes:COUNT"), "fashion-mnist", "elpv", a timm dataset string such as
            torch/cifar10, or a path: a folder of class folders, a tar of them, WebDataset shards (a folder, a tar, a
            glob or brace pattern, or any of these behind wds/), a COCO .json or the folder that holds it, or a list
            (.csv, .tsv, .txt) of images with their classes.
        val: A path with the images to validate on; without it, those that DATA sets apart or else a hold-out.
        split: The fraction of each class to hold out where nothing is set apart for validation; 0.1 if None. Refused
            where something is.
        seed: Of the hold-out and of the scenes.
        channels: 3 for RGB, 1 for grey.
        scenes_size: Side of the scenes in pixels.
        scenes_count: Scenes to train on, 8000 if None; a quarter of them validates.
        root: Where a timm dataset lies or is put.
        download: Whether a timm dataset may be fetched.
        cache: For unpacked tars, indices and drawn scenes; $BROADSIGHT_CACHE or ~/.cache/broadsight if None.
        method: Of the hold-out, as a run began with it.
    """
    data, val = (None if path is None else os.fspath(path) for path in (data, val))
    if split is not None and not 0 < split < 1:
        raise ValueError(f"split={split} is not between 0 and 1; 0.1 holds out a tenth of each class for validation")
    if split is not None and val is not None:
        raise ValueError(f"split={split} and val={val} are two ways to validate; give one of them")
    if channels not in (1, 3):
        raise ValueError(f"channels={channels} is neither 1 (grey) nor 3 (RGB)")
    check_places([data or "scenes", *([val] if val else [])], root, download)
    cache = cache_folder(cache)
    if data is None or data == "scenes" or data.startswith("scenes:"):
        if val is not None or split is not None:
            raise ValueError("scenes validate on scenes of their own; val and split are for other data")
        return _scenes(data or "scenes", scenes_count, scenes_size, seed, channels, cache)

    kind, parts = open_parts(data, channels, cache, root, download)
    notes = []
    if data in ("fashion-mnist", "elpv") and Path(data).is_dir():
        notes.append(f"{data} is the built-in data set; the folder of that name is ./{data}")
    train = parts.get("train") or parts.get("all")
    if train is None:
        raise ValueError(f"{data} has a part to validate, {parts['val'].place}, but none to train on; add train/")
    fraction = None
    if val is not None:
        if "val" in parts:
            notes.append(f"not used: {parts['val'].place}, since {val} is to validate")
        _, parts = open_parts(val, channels, cache, root, download, what="val")
        valid = parts.get("val") or parts.get("all") or parts["train"]
    elif "val" in parts:
        valid = parts["val"]
        if split is not None:
            raise ValueError(f"split={split}, but {valid.place} is set apart to validate; leave split out")
    else:
        fraction = HOLD_OUT if split is None else split
        train, valid = hold_out(train, fraction, seed, method)

    _check(train, valid)
    classes = tuple(train.source.classes)
    notes += [*train.notes, *(note for note in valid.notes if note not in train.notes)]
    for part, verb in ((train, "train"), (valid, "validate")):
        present = {part.source.classes[label] for label in np.unique(part.source.labels)}
        if missing := [name for name in classes if name not in present]:
            notes.append(f"classes without images to {verb}: {some(missing)} (of {len(classes)} classes)")
    sources: dict[str, Source] = {"train": train.source, "val": valid.source.under(classes)}
    description = dict(kind=kind, train=train.place, val=valid.place, split=fraction, seed=seed)
    return Splits(**sources, classes=classes, notes=tuple(notes), description=description | _measured(sources))


def check_places(names: Sequence[str], root: str | None, download: bool) -> None:
    """Refuse a root and a download where none of the data that is named has use for them."""
    datasets = any(name.startswith(DATASETS) for name in names)
    if download and not datasets:
        raise ValueError(f"download is for timm datasets, such as torch/cifar10; {names[0]} is none: leave it out")
    if root is not None and not datasets and not any(name.startswith("wds/") for name in names):
        raise ValueError(f"root is for timm datasets and wds/ shards; {names[0]} is neither: leave it out")


def _scenes(data: str, count: int | None, size: int, seed: int, channels: int, cache: str | Path | None) -> Splits:
    from ..scenes import Scenes

    count = scenes_count(data, SCENES if count is None else count)
    sources: dict[str, Source] = {
        "train": Scenes(count, size=size, seed=seed, split="train", cache=cache),
        "val": Scenes(count // 4, size=size, seed=seed, split="val", cache=cache),
    }
    if channels == 1:
        sources = {key: Grey(source) for key, source in sources.items()}
    notes = ("./scenes is a folder, but scenes are the built-in images",) if Path("scenes").is_dir() else ()
    classes = tuple(sources["train"].classes)
    description = dict(kind="scenes", train="scenes", val="scenes", size=size, seed=seed)
    return Splits(**sources, classes=classes, notes=notes, description=description | _measured(sources))


def cache_folder(cache: str | Path | None = None) -> Path:
    """Where unpacked tars, indices and drawn scenes are kept."""
    return Path(cache or os.environ.get("BROADSIGHT_CACHE") or Path.home() / ".cache" / "broadsight").expanduser()


def scenes_count(data: str, otherwise: int = SCENES) -> int:
    """How many scenes "scenes:COUNT" asks for, or so many if it does not say."""
    _, colon, number = data.partition(":")
    if colon and not number.isdecimal():
        raise ValueError(f"{data!r}: {number!r} is not a count; write for example scenes:2000")
    count = int(number) if colon else otherwise
    if count < 4:
        raise ValueError(f"{count} scenes are too few; a quarter of them validates, so give 4 or more")
    return count


def open_parts(
    data: str, channels: int, cache: Path, root: str | None, download: bool, what: str = "data"
) -> tuple[str, Parts]:
    """Which kind of data DATA is, and its parts."""
    try:
        return _opened(data, channels, cache, root, download, what)
    except PermissionError as error:
        raise ValueError(f"permission denied: {error.filename}; make it readable for this user") from None


def _opened(data: str, channels: int, cache: Path, root: str | None, download: bool, what: str) -> tuple[str, Parts]:
    if data == "fashion-mnist":
        from .fashion_mnist import open_fashion_mnist

        return "fashion-mnist", open_fashion_mnist(cache, channels)
    if data == "elpv":
        from .elpv import open_elpv

        return "elpv", open_elpv(cache, channels)
    if data.startswith(STREAMS) or data.removeprefix("wds/").startswith(REMOTE):
        raise ValueError(f"{data} is a stream, which cannot be resumed exactly; download it and give the local path")
    if data.startswith(DATASETS):
        from .timm_string import open_dataset

        return "timm", open_dataset(data, Path(root or cache / "datasets"), download, channels)
    path = Path(data.removeprefix("wds/")).expanduser()
    if root and data.startswith("wds/"):
        path = Path(root) / path
    if any(letter in data for letter in "*?{") and not path.exists():
        from .tar import matching, open_tars

        return open_tars(matching(str(path)), channels, cache)
    if not path.exists():
        raise FileNotFoundError(_nowhere(data, path, what))
    refuse_odd(path)
    if path.is_dir():
        return _open_folder(path, channels, cache)
    if path.name.lower().endswith(".json"):
        from .coco_crops import open_cocos

        return "coco", open_cocos([path], channels)
    if path.name.lower().endswith(TARS):
        from .tar import open_tars

        return open_tars([path], channels, cache)
    if path.name.lower().endswith(LISTS):
        from .list_file import open_list

        return "list", open_list(path, channels)
    raise ValueError(
        f"{path} is neither a folder, a tar ({', '.join(TARS)}), a list ({', '.join(LISTS)}) nor a COCO .json"
    )


def _open_folder(path: Path, channels: int, cache: Path) -> tuple[str, Parts]:
    from .coco_crops import cocos_in, open_cocos
    from .folder import holds_images, open_folder
    from .tar import open_tars, tars_in
    from .walking import entries, is_folder

    if cocos := cocos_in(path):
        return "coco", open_cocos(cocos, channels)
    folders = [Path(entry.path) for entry in entries(path) if is_folder(entry)]
    if tars_in(path) and not any(map(holds_images, folders)):
        return open_tars(tars_in(path), channels, cache)
    called = part_names([folder.name for folder in folders], lambda _: True)
    apart = {key: path / name for key, name in called.items() if name}
    if any(cocos_in(part) for part in apart.values()):
        found = {key: open_cocos(cocos_in(part), channels) for key, part in apart.items() if cocos_in(part)}
        return "coco", {key: next(iter(parts.values())) for key, parts in found.items()}
    tars = [tar for part in apart.values() for tar in tars_in(part)]
    if tars and not any(map(holds_images, apart.values())):
        return open_tars(tars, channels, cache)
    return "folder", open_folder(path, channels)


def _nowhere(data: str, path: Path, what: str) -> str:
    """What to say about a path that does not exist: the nearest name that does."""
    parent = path.absolute().parent
    missing = path.name
    while not parent.is_dir():
        parent, missing = parent.parent, parent.name
    try:
        beside = [name for name in os.listdir(parent) if not name.startswith(".")]
    except OSError:
        beside = []
    near = [str(parent / name) for name in nearest(missing, beside)]
    if what == "data":
        near = nearest(data, KNOWN) + near
        kinds = "give a folder, a tar, a list, a COCO .json, or one of " + ", ".join(KNOWN)
    else:
        kinds = "give the folder, tar or list to validate on, or leave val out for a hold-out"
    return f"no such {what}: {data}; " + (f"did you mean {near[0]}?" if near else kinds)


def hold_out(part: Part, fraction: float, seed: int, method: int = METHOD) -> tuple[Part, Part]:
    """Two parts of one: to train on, and to validate on.

    An image's turn to be held out comes by a hash of its name: it depends neither on the order of the files nor, where
    each shows one class, on which others there are, so that added files do not reshuffle the rest.

    Args:
        method: As a run began with it; see `stratify.METHOD`.
    """
    source = part.source
    notes = [*part.notes]
    groups = getattr(source, "images", None)
    shown = [[label] for label in source.labels.tolist()]
    if groups is None:
        held = _of_each_class(source, fraction, seed)
    else:
        held = _whole_images(source, groups, fraction, seed, method)
        shown = [source.labels[rows].tolist() for rows in _by_image(groups)]
    if not held.any():
        raise ValueError(
            f"{part.place} has no image that can be held out without losing a class in training; "
            "give the images to validate on (val)"
        )
    numbers = Counter(label for labels in shown for label in set(labels))
    if lonely := [name for label, name in enumerate(source.classes) if numbers[label] == 1]:
        notes.append(f"classes with a single image keep it for training: {some(lonely)}")
    whole = "" if groups is None else ", none of them from an image that has others in training"
    what = f"{held.sum():,} of {len(source):,} images of {part.place} are held out to validate"
    notes.append(f"{what} (split {fraction}, seed {seed}){whole}")
    return (
        Part(source.take(np.flatnonzero(~held)), part.place, notes),
        Part(source.take(np.flatnonzero(held)), part.place),
    )


def _of_each_class(source: Listed, fraction: float, seed: int) -> np.ndarray:
    """Which samples (N,) to hold out: a fraction of each class, at least one, never all."""
    turns = np.array([turn(source.name(row), seed) for row in range(len(source))], np.uint64)
    counts = np.bincount(source.labels, minlength=len(source.classes))
    quotas = np.minimum(np.maximum(np.rint(fraction * counts), 1), counts - 1)
    order = np.lexsort((turns, source.labels))
    labels = source.labels[order]
    rank = np.arange(len(source)) - (np.cumsum(counts) - counts)[labels]  # within its class
    held = np.zeros(len(source), bool)
    held[order] = rank < quotas[labels]
    return held


def _whole_images(source: Listed, images: np.ndarray, fraction: float, seed: int, method: int) -> np.ndarray:
    """Which crops (N,) to hold out: all those of some images, as long as no class loses its last one in training."""
    groups = _by_image(images)
    names = [source.name(int(rows[0])) for rows in groups]
    if method > 1:
        sizes = np.array([len(rows) for rows in groups])
        chosen = stratified(names, [source.labels[rows] for rows in groups], fraction, seed, sizes)
        held = np.zeros(len(source), bool)
        held[np.concatenate([np.zeros(0, np.int64), *(groups[one] for one in np.flatnonzero(chosen))])] = True
        return held
    held = np.zeros(len(source), bool)
    left = np.bincount(source.labels, minlength=len(source.classes))
    wanted = fraction * len(source)
    for rows in sorted(groups, key=lambda rows: turn(source.name(int(rows[0])), seed)):
        if wanted <= 0:
            break
        classes, lost = np.unique(source.labels[rows], return_counts=True)
        if (left[classes] > lost).all():
            left[classes] -= lost
            held[rows] = True
            wanted -= len(rows)
    return held


def _by_image(images: np.ndarray) -> list[np.ndarray]:
    """Rows of the crops of each image."""
    order = np.argsort(images, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(images[order])) + 1)


def _check(train: Part, valid: Part) -> None:
    classes = train.source.classes
    trained = np.unique(train.source.labels)
    if len(trained) == 1:
        raise ValueError(f"{train.place} has one class only, {classes[trained[0]]!r}; a classifier needs two")
    known = set(classes)
    present = [valid.source.classes[label] for label in np.unique(valid.source.labels)]
    if extra := [name for name in present if name not in known]:
        what = f"{valid.place} has classes that {train.place} has not: {some(extra)}"
        raise ValueError(f"{what}; add images of them to the training part or remove them")


def _measured(sources: dict[str, Source]) -> dict[str, Any]:
    """Counts, and a fingerprint that depends on names and classes, not on their order or on where they lie."""
    digest = hashlib.sha256()
    for key, source in sources.items():
        names = sorted(f"{source.name(row)}\t{source.classes[source.label(row)]}" for row in range(len(source)))
        digest.update("\n".join([key, *names, ""]).encode("utf-8", "surrogateescape"))
    counts = {key: len(source) for key, source in sources.items()}
    return dict(counts=counts, classes=len(sources["train"].classes), fingerprint=digest.hexdigest()[:32])
