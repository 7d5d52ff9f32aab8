"""From what a user calls DATA to two sources of labelled images: one to train on, one to validate on."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..stratify import METHOD
from ..view import labels_of, under
from .evaluation import hold_out
from .registry import LISTS as LISTS
from .registry import Options, Source, check_places, open_parts
from .registry import cache_folder as cache_folder
from .registry import register_source as register_source
from .sample_table import Part, some
from .sample_table import Parts as Parts

HOLD_OUT = 0.1


@dataclass(frozen=True)
class Splits:
    """The images that DATA names: two sources that number the classes alike."""

    train: Source
    val: Source
    classes: tuple[str, ...]
    notes: tuple[str, ...]  # what the user should know, a line each
    description: dict[str, Any]  # of plain types, with a `fingerprint` by which a resumed run notices other data


def resolve(
    data: str | Path | None,
    *,
    val: str | Path | None = None,
    split: float | None = None,
    method: int = METHOD,
    **how: Any,
) -> Splits:
    """Open what DATA names.

    Args:
        data: The name of a registered source, such as "scenes" (also for None; "scenes:COUNT"), "fashion-mnist",
            "elpv", or a timm dataset string such as torch/cifar10; or a path, tried in this order: a COCO .json or a
            folder with one in it or in its train/ and val/, for the crops of its boxes; tars, alone, in a folder or by
            a glob or brace pattern (also behind wds/), of class folders or, where images share their names with `.cls`
            or `.json` files, WebDataset shards; a list (.csv, .tsv, .txt) of images with their classes; class folders.
        val: Path of the images to validate on; without it, those that DATA sets apart, or else a hold-out.
        split: Fraction of each class to hold out, 0.1 if None; refused where something is set apart to validate.
        method: Of the hold-out, as a run began with it.
        how: As `Options` has it.
    """
    data, val = ("scenes" if data is None else os.fspath(data)), (None if val is None else os.fspath(val))
    options = Options(**how)
    check_split(split, val, "each class", options.channels)
    check_places([data, *([val] if val else [])], options.root, options.download)
    kind, parts = open_parts(data, options)
    if kind == "scenes" and (val is not None or split is not None):
        raise ValueError("scenes validate on scenes of their own; val and split are for other data")
    train = parts.get("train") or parts.get("all")
    if train is None:
        raise ValueError(f"{data} has a part to validate, {parts['val'].place}, but none to train on; add train/")
    notes, valid, fraction = [], parts.get("val"), None
    if val is not None:
        if valid:
            notes.append(f"not used: {valid.place}, since {val} is to validate")
        _, others = open_parts(val, options, what="val")
        valid = others.get("val") or others.get("all") or others["train"]
    elif valid is None:
        fraction = HOLD_OUT if split is None else split
        train, valid = hold_out(train, fraction, options.seed, method)
    elif split is not None:
        raise ValueError(f"split={split}, but {valid.place} is set apart to validate; leave split out")
    classes = tuple(train.source.classes)
    sources: dict[str, Source] = {"train": train.source, "val": under(valid.source, classes)}
    notes += [*train.notes, *(note for note in valid.notes if note not in train.notes)]
    notes += _check(train, valid)
    about = dict(kind=kind, train=train.place, val=valid.place, split=fraction, seed=options.seed) | train.about
    lines = {
        key: [f"{source.name(row)}\t{source.classes[label]}" for row, label in enumerate(labels_of(source).tolist())]
        for key, source in sources.items()
    }
    counts = {key: len(names) for key, names in lines.items()}
    about |= dict(counts=counts, classes=len(classes), fingerprint=fingerprint(lines))
    return Splits(**sources, classes=classes, notes=tuple(notes), description=about)


def check_split(split: float | None, val: str | Path | None, of: str, channels: int) -> None:
    """Refuse a hold-out that is no fraction or beside images to validate on, and channels other than grey or RGB."""
    if split is not None and not 0 < split < 1:
        raise ValueError(f"split={split} is not between 0 and 1; 0.1 holds out a tenth of {of} for validation")
    if split is not None and val is not None:
        raise ValueError(f"split={split} and val={val} are two ways to validate; give one of them")
    if channels not in (1, 3):
        raise ValueError(f"channels={channels} is neither 1 (grey) nor 3 (RGB)")


def _check(train: Part, valid: Part) -> list[str]:
    """Refuse classes that cannot be learned, and note those without images, a line each."""
    classes = train.source.classes
    seen_by = {
        verb: {part.source.classes[label] for label in np.unique(labels_of(part.source))}
        for verb, part in (("train", train), ("validate", valid))
    }
    if len(seen_by["train"]) == 1:
        raise ValueError(f"{train.place} has one class only, {min(seen_by['train'])!r}; a classifier needs two")
    if extra := [name for name in valid.source.classes if name in seen_by["validate"].difference(classes)]:
        what = f"{valid.place} has classes that {train.place} has not: {some(extra)}"
        raise ValueError(f"{what}; add images of them to the training part or remove them")
    shown = [(verb, [name for name in classes if name not in seen]) for verb, seen in seen_by.items()]
    how = f"(of {len(classes)} classes)"
    return [f"classes without images to {verb}: {some(missing)} {how}" for verb, missing in shown if missing]


def fingerprint(lines: Mapping[str, list[str]]) -> str:
    """A digest of the lines about each part, whatever their order."""
    digest = hashlib.sha256()
    for key, names in lines.items():
        digest.update("\n".join([key, *sorted(names), ""]).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]
