"""The choice of held-out images, such that every class that can be validated is."""

import hashlib
from collections.abc import Sequence

import numpy as np

# Version of the choice, kept by a run since another one holds out other images.
# 1: images of several classes by their turn alone. 2: the rarest class first.
METHOD = 2
ORDERS, FEW_ORDERS = 32, 4  # tried before a class is given up; few of MANY images, which take seconds
MANY = 10_000


def turn(name: str, seed: int) -> int:
    """A hash of an image's name, by which images are held out; other files do not change it."""
    text = f"{seed}/{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def ranks(turns: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The place (N,) of each sample within its class, by turn."""
    order, counts = np.lexsort((turns, labels)), np.bincount(labels)
    found = np.empty(len(labels), np.int64)
    found[order] = np.arange(len(labels)) - (np.cumsum(counts) - counts)[labels[order]]
    return found


def stratified(
    names: Sequence[str], classes: Sequence[Sequence[int]], fraction: float, seed: int, sizes: np.ndarray | None = None
) -> np.ndarray:
    """Which of N images to hold out, (N,) of booleans, in the order of the hashes of their names.

    Each may show several classes or none, and has a weight in `sizes`. Of every class a fraction is held out, at least
    one image and never the last, the rarest class first; see `missed` for those of which none can be.
    """
    sets, images = _images_of(classes)
    sizes = np.ones(len(names)) if sizes is None else np.asarray(sizes, float)
    best, fewest, numbers = np.zeros(len(names), bool), len(images) + 1, np.array([*map(len, images)], np.int64)
    # some image could be held out for them: none of what it shows is in that image alone
    reachable = {one for shown in sets if (numbers[shown] > 1).all() for one in shown.tolist()}
    for attempt in range(ORDERS if len(names) < MANY else FEW_ORDERS):
        turns = [turn(f"{attempt}/{name}" if attempt else name, seed) for name in names]
        order = np.argsort(np.array(turns, np.uint64), kind="stable")
        held = _held(order, sets, images, fraction, sizes)
        lost = len(reachable - _shown(sets, held))
        if lost < fewest:
            best, fewest = held, lost
        if not fewest:
            break
    return best


def missed(classes: Sequence[Sequence[int]], held: np.ndarray) -> tuple[list[int], list[int]]:
    """The classes that no held-out image shows: those in a single image, and those in several."""
    sets, images = _images_of(classes)
    lost = sorted({one for one, some in enumerate(images) if some} - _shown(sets, held))
    return [one for one in lost if len(images[one]) == 1], [one for one in lost if len(images[one]) > 1]


def _images_of(classes: Sequence[Sequence[int]]) -> tuple[list[np.ndarray], list[list[int]]]:
    """The different classes in each image, and the images that show each class."""
    sets = [np.unique(np.asarray(shown, np.int64)) for shown in classes]
    images = [[] for _ in range(1 + max((int(shown[-1]) for shown in sets if len(shown)), default=-1))]
    for image, shown in enumerate(sets):
        for one in shown.tolist():
            images[one].append(image)
    return sets, images


def _held(
    order: np.ndarray, sets: list[np.ndarray], images: list[list[int]], fraction: float, sizes: np.ndarray
) -> np.ndarray:
    """One way to hold out a fraction, with images in an order."""
    place, left = np.argsort(order), np.array([*map(len, images)], np.int64)
    quotas = np.minimum(np.maximum(np.floor(fraction * left + 1e-9), 1), left - 1)
    held, taken, trained = np.zeros(len(order), bool), np.zeros(len(images), np.int64), len(order)

    def take(image: int) -> bool:
        nonlocal trained
        shown = sets[image]
        free = not held[image] and trained > 1 and (left[shown] > 1).all()
        if free:
            left[shown] -= 1
            taken[shown] += 1
            trained, held[image] = trained - 1, True
        return bool(free)

    for one in np.argsort(left, kind="stable").tolist():  # the rarest first: later it could not be had any more
        for image in sorted(images[one], key=place.__getitem__):
            if taken[one] >= quotas[one]:
                break
            take(image)
    wanted = fraction * sizes.sum() - sizes[held].sum()
    for image in order.tolist():
        if trained == len(order) or wanted >= sizes[image] / 2:
            wanted -= sizes[image] * take(image)
    return held


def _shown(sets: list[np.ndarray], held: np.ndarray) -> set[int]:
    return {one for image in np.flatnonzero(held).tolist() for one in sets[image].tolist()}
