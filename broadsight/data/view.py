"""Some images of a source, under other numbers of their classes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from .decoding import decode

if TYPE_CHECKING:
    from .sources import Source


class View:
    """Rows of another source.

    Args:
        rows: Which images, in this order; all if None.
        classes: The classes as somebody else numbers them; the source's own if None.
        places: For each class of the source its number among those; -1 where no image of it may occur.
    """

    def __init__(
        self,
        source: "Source",
        rows: np.ndarray | None = None,
        classes: Sequence[str] | None = None,
        places: np.ndarray | None = None,
    ):
        self.source = source
        self.rows = np.arange(len(source)) if rows is None else np.asarray(rows)
        self.classes = tuple(source.classes if classes is None else classes)
        self.places = None if places is None else np.asarray(places)

    def __len__(self) -> int:
        return len(self.rows)

    def label(self, index: int) -> int:
        own = self.source.label(int(self.rows[index]))
        return own if self.places is None else int(self.places[own])

    def name(self, index: int) -> str:
        return self.source.name(int(self.rows[index]))

    def open(self, index: int) -> Image.Image:
        return self.source.open(int(self.rows[index]))


class Grey(View):
    """A source of RGB images in grey."""

    def __init__(self, source: "Source"):
        super().__init__(source)

    def open(self, index: int) -> Image.Image:
        return decode(super().open(index), 1)


def sample(source: "Source", count: int | None, seed: int = 0) -> "Source":
    """So many of its images, drawn by chance and kept in order; all of them if there are no more."""
    if count is None or count >= len(source):
        return source
    rows = np.random.default_rng(seed).choice(len(source), count, replace=False)
    return View(source, np.sort(rows))


def labels_of(source: "Source") -> np.ndarray:
    """(N,) all labels of a source."""
    known = getattr(source, "labels", None)
    return np.asarray(known) if known is not None else np.array([source.label(row) for row in range(len(source))])
