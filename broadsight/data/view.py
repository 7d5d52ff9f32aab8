"""Some images of a source, under other numbers of their classes."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

from .decoding import decode

if TYPE_CHECKING:
    from .sources.registry import Source


class Rows:
    """Some images of another source or data set, in the order of `rows`; all if None."""

    def __init__(self, source: Any, rows: Sequence[int] | np.ndarray | None = None):
        self.source, self.rows = source, np.arange(len(source)) if rows is None else np.asarray(rows, np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return self.source.name(int(self.rows[index]))

    def open(self, index: int) -> Image.Image:
        return self.source.open(int(self.rows[index]))

    @property
    def vouch(self) -> Callable[[int, bool], bytes]:
        """What stands for an image, see `contents`; an AttributeError where the source has none, as drawn data."""
        own = self.source.vouch
        return lambda index, content: own(int(self.rows[index]), content)


class View(Rows):
    """Rows of another source, under its classes or, by their `places` (-1 where no image may occur), under others."""

    def __init__(
        self,
        source: "Source",
        rows: np.ndarray | None = None,
        classes: Sequence[str] | None = None,
        places: np.ndarray | None = None,
    ):
        super().__init__(source, rows)
        self.classes = tuple(source.classes if classes is None else classes)
        self.places = places

    def label(self, index: int) -> int:
        own = self.source.label(int(self.rows[index]))
        return own if self.places is None else int(self.places[own])

    @cached_property
    def labels(self) -> np.ndarray:
        own = labels_of(self.source)[self.rows]
        return own if self.places is None else self.places[own]

    @property
    def shuffled(self) -> Callable[..., Tensor]:
        """A better order of the rows than a random one, where the source knows it; see `ShardSource.shuffled`."""
        return partial(self.source.shuffled, rows=self.rows)


class Grey(View):
    """A source of RGB images in grey."""

    def open(self, index: int) -> Image.Image:
        return decode(super().open(index), 1)


def sample(source: "Source", count: int | None, seed: int = 0) -> "Source":
    """Draw `count` images of a source, in their order; all if there are no more."""
    if count is None or count >= len(source):
        return source
    return View(source, np.sort(np.random.default_rng(seed).choice(len(source), count, replace=False)))


def labels_of(source: "Source") -> np.ndarray:
    """(N,) all labels of a source."""
    known = getattr(source, "labels", None)
    return np.asarray(known) if known is not None else np.array([source.label(row) for row in range(len(source))])


def under(source: "Source", classes: Sequence[str]) -> "Source":
    """The same images, labelled as another source numbers the classes; -1 where it has none of that name."""
    if tuple(source.classes) == tuple(classes):
        return source
    place = {name: index for index, name in enumerate(classes)}
    return View(source, None, classes, np.array([place.get(name, -1) for name in source.classes], np.int32))
