"""Which images of a source validate where nothing is set apart for that."""

import numpy as np

from ..stratify import METHOD, ranks, stratified, turn
from ..view import View, labels_of
from .registry import Source
from .sample_table import Part, noted


def hold_out(part: Part, fraction: float, seed: int, method: int = METHOD) -> tuple[Part, Part]:
    """Two parts of one: to train on, and to validate on.

    A hash of its name decides when an image is held out, so that added files do not reshuffle the rest. Crops of one
    image stay together. A run keeps the `method` that it began with; see `stratify.METHOD`.
    """
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
        raise ValueError(
            f"{part.place} has no image that can be held out without losing a class in training; "
            "give the images to validate on (val)"
        )
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
