"""What a user asks of `explain` and `gallery`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..options import ALLOW_OUTSIDE, CLASSIFIERS, RUN, TIMM_NAMES, Computing, ModelOptions, option

GRADCAM, QUERY = "the kind gradcam", "the kind query"


@dataclass(frozen=True, kw_only=True)
class _Looking(Computing):
    """Which maps are made, and how."""

    kinds: tuple[str, ...] = option(
        (),
        "joined by commas: gradcam, attention, map-tokens, super-tokens, abstract-tokens, fusion, foreground, c-mhsa; "
        "without it all that the model has",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if "query" in self.kinds and not getattr(self, "query", ()):
            raise UsageError("--kinds query asks for places; expected broadsight explain --query X,Y beside it")


def _places(given: Any) -> list[tuple[int, int]]:
    """Places (x, y) from a text such as 120,80;30,40, from several, or from a pair of numbers."""
    parts = given.split(";") if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    parts = [given] if parts and all(isinstance(part, int) for part in parts) else parts
    found = []
    for part in parts:
        words = part.split(",") if isinstance(part, str) else list(part) if isinstance(part, Iterable) else [part]
        if len(words) != 2 or not all(re.fullmatch(r"\s*[0-9]{1,9}\s*", str(word)) for word in words):
            what = "expected X,Y, pixels from the image's top left, such as 120,80 or 120,80;30,40"
            raise UsageError(f"--query {part if isinstance(part, str) else repr(part)}: {what}")
        found.append((int(words[0]), int(words[1])))
    return list(dict.fromkeys(found))


PLACES: dict[str, Any] = dict(metavar="X,Y", read=_places, join=";", of=(QUERY,))


@dataclass(frozen=True)
class Request(_Looking, ModelOptions):
    """Show what a model looks at: a sheet for every image with Grad-CAM, attention and the maps of its tokens."""

    verb = "explain"

    run: Any = option(..., **RUN)
    images: tuple[str, ...] = option(
        (), "files, folders, quoted patterns, or scenes:N, drawn; none: a few scenes", positional=True, metavar="IMAGE"
    )
    list: str | None = option(None, "text file with the path of an image on every line", metavar="FILE")
    allow_outside: bool = option(False, ALLOW_OUTSIDE)
    class_: str | None = option(
        None, "class that Grad-CAM explains; without it the predicted one", metavar="NAME|NUMBER", of=(GRADCAM,)
    )
    query: tuple[Any, ...] = option(
        (), "show where these places look too: pixels from the image's top left, joined by ; or named again", **PLACES
    )
    layers: tuple[str, ...] = option(
        (), "only these, joined by commas: paths such as layer4, or patterns such as 'stages.2.*'"
    )
    depth: tuple[str, ...] = option((), "only these layers of each kind, joined by commas: numbers from 1, or last")
    out: str | None = option(None, "new folder; without it the next in explanations/", metavar="DIR")
    singles: bool = option(False, "write every map over its image as a file too")
    raw: bool = option(False, "write the maps' numbers too, NAME.npz for each image")
    json: str | None = option(
        None, "print what explanation.json says, or write it to FILE too; comes last", metavar="FILE", bare="-"
    )
    light: bool = option(False, "let a 'map' pool classify with its averaged tokens alone", of=(CLASSIFIERS,))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(re.fullmatch(r"last|0*[1-9][0-9]*", word) for word in self.depth):
            raise UsageError(f"--depth {','.join(self.depth)}; expected numbers from 1, or last, joined by commas")


@dataclass(frozen=True)
class GalleryRequest(_Looking):
    """Make a page of what models look at in images of your choice: a sheet for each model and image."""

    verb = "gallery"

    models: tuple[str, ...] = option(
        (), "runs, timm names, NAME@FILE with its weights; none: those in runs/", positional=True, metavar="RUN|MODEL"
    )
    images: tuple[str, ...] = option(
        ("scenes:2",), "files, folders and quoted patterns, joined by commas, or scenes:N, which are drawn"
    )
    out: str = option("gallery.md", "the page; its images go into a folder of that name beside it", metavar="FILE.md")
    pretrained: bool = option(
        True, "timm's own weights for timm names; without them random ones, for a trial", of=(TIMM_NAMES,)
    )
    size: int | None = option(None, "image side in pixels; without it what the model was trained for", least=1)
