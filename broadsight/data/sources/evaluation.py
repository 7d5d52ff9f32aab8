"""Which images of what a user calls DATA validate: a part that is set apart, or else what is held out."""

import os
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..stratify import METHOD, ranks, stratified, turn
from ..view import View, labels_of
from .registry import Options, Source, check_places, open_parts
from .sample_table import Part, noted

Which = Literal["auto", "train", "val", "test", "all"]


@dataclass(frozen=True)
class Found:
    """Images to evaluate on."""

    source: Source
    place: str
    notes: tuple[str, ...]  # what the user should know
    description: dict[str, Any]  # what was found, as plain types


def open_part(
    data: str, part: Which = "auto", *, split: float | None = None, method: int = METHOD, **how: Any
) -> Found:
    """Open one part of DATA, as `resolve` reads it.

    Args:
        part: "auto" is the part set apart for validation, or everything where nothing is ("all").
        split: Where nothing is, the fraction that training would hold out (or, as "train", leave of each class).
        method: Of that hold-out, as the run began with it; see `stratify.METHOD`.
        how: As `Options` has it.
    """
    options = Options(**how)
    check_places([data], options.root, options.download)
    if split is not None and not 0 < split < 1:
        raise ValueError(f"split={split} is not between 0 and 1; 0.1 is a tenth of each class")
    kind, parts = open_parts(data, options)
    if split is not None:
        if "all" not in parts:
            raise ValueError(f"--split {split}, but {data} has parts of its own: {', '.join(parts)}; leave --split out")
        parts = dict(zip(("train", "val"), hold_out(parts["all"], split, options.seed, method), strict=True))
    chosen = next((name for name in (("val", "all", "train") if part == "auto" else (part,)) if name in parts), None)
    if chosen is None:
        there = ", ".join(parts)
        raise ValueError(f"{data} has no part {part!r}; it has {there}; leave --part out to take what there is")
    found = parts[chosen]
    alone = f"{data} has a part to train on alone, so that one is evaluated"
    notes = (*[alone] * (part == "auto" and chosen == "train"), *found.notes)
    about = dict(kind=kind, data=data, part=chosen, place=found.place, images=len(found.source), split=split)
    return Found(found.source, found.place, notes, about | found.about)


def same_data(one: str, other: str) -> bool:
    """Whether two names of data mean the same."""
    return one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other))


def hold_out(part: Part, fraction: float, seed: int, method: int = METHOD) -> tuple[Part, Part]:
    """Two parts of one, to train and to validate on, by a hash of names; crops of one image stay together."""
    source, notes, whole = part.source, [*part.notes], ""
    labels, images = labels_of(source), getattr(source, "images", None)
    if images is None:
        turns = np.array([turn(source.name(row), seed) for row in range(len(source))], np.uint64)
        counts = np.bincount(labels, minlength=len(source.classes))
        quotas = np.minimum(np.maximum(np.rint(fraction * counts), 1), counts - 1)  # at least one, never all
        held = ranks(turns, labels) < quotas[labels]
        images = np.arange(len(source))
    else:
        held = _whole_images(source, labels, images, fraction, seed, method)
        whole = ", none of them from an image that has others in training"
    if not held.any():
        what = f"{part.place} has no image that can be held out without losing a class in training"
        raise ValueError(f"{what}; give the images to validate on (val)")
    numbers = np.bincount(np.unique(np.stack([images, labels]), axis=1)[1], minlength=len(source.classes))
    lonely = [source.classes[label] for label in np.flatnonzero(numbers == 1)]
    notes += noted("classes with a single image keep it for training", lonely)
    what = f"{held.sum():,} of {len(source):,} images of {part.place} are held out to validate"
    notes.append(f"{what} (split {fraction}, seed {seed}){whole}")
    train, val = (View(source, np.flatnonzero(chosen)) for chosen in (~held, held))
    return Part(train, part.place, notes), Part(val, part.place)


def _whole_images(
    source: Source, labels: np.ndarray, images: np.ndarray, fraction: float, seed: int, method: int
) -> np.ndarray:
    """Which crops (N,) to hold out: all those of some images, as long as no class loses its last one in training."""
    order = np.argsort(images, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(images[order])) + 1)  # rows of the crops of each image
    names = [source.name(int(rows[0])) for rows in groups]
    held = np.zeros(len(source), bool)
    if method > 1:
        sizes = np.array([len(rows) for rows in groups])
        chosen = stratified(names, [labels[rows].tolist() for rows in groups], fraction, seed, sizes)
        held[[row for one in np.flatnonzero(chosen) for row in groups[one]]] = True
        return held
    left = np.bincount(labels, minlength=len(source.classes))
    wanted = fraction * len(source)
    for rows in sorted(groups, key=lambda rows: turn(source.name(int(rows[0])), seed)):
        if wanted <= 0:
            break
        classes, lost = np.unique(labels[rows], return_counts=True)
        if (left[classes] > lost).all():
            left[classes] -= lost
            held[rows] = True
            wanted -= len(rows)
    return held
