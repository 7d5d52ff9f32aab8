"""The sources of labelled images: each is registered where it is written, and DATA says which one is meant."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Protocol, TypeVar

from PIL import Image

from ...errors import nearest
from ...files import refuse_odd
from .sample_table import Parts

STREAMS = ("hfids/", "tfds/")
REMOTE = ("http:", "https:", "pipe:", "s3:", "gs:", "hf:", "ftp:")
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
LISTS = (".csv", ".tsv", ".txt")


class Source(Protocol):
    """Labelled images by index."""

    @property
    def classes(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def label(self, index: int, /) -> int: ...

    def name(self, index: int, /) -> str:
        """For reports: a path relative to the root, tar:member, or dataset/split/index."""

    def open(self, index: int, /) -> Image.Image:
        """The image as `decode` gives it, or UnreadableImage; all else decodes nothing."""


def cache_folder(cache: str | Path | None = None) -> Path:
    """The folder for unpacked tars, indices and drawn scenes."""
    return Path(cache or os.environ.get("BROADSIGHT_CACHE") or Path.home() / ".cache" / "broadsight").expanduser()


@dataclass(frozen=True)
class Options:
    """How a source is opened."""

    channels: int = 3  # 3 for RGB, 1 for grey images
    cache: Any = None  # for unpacked tars, indices and drawn scenes; $BROADSIGHT_CACHE or ~/.cache/broadsight if None
    root: str | None = None  # where a data set of another library lies or is put
    download: bool = False  # whether it may be fetched
    seed: int = 0  # of the hold-out and of the scenes
    scenes_size: int = 64  # their side in pixels
    scenes_count: int | None = None  # scenes to train on, 8000 if None; a quarter of them validates

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache", cache_folder(self.cache))


@dataclass(frozen=True)
class Registered:
    """A source, as `register_source` was told of it."""

    kind: str  # what runs record as the kind of their data
    names: tuple[str, ...]
    open: Callable[[str, Options], Parts]
    claims: Callable[[Path], Any] = lambda _: False  # whether it takes a folder; what nobody claims holds class folders
    known: Sequence[str] = ()  # names that error messages suggest
    downloads: bool = False  # whether the options `root` and `download` are for it

    def is_named(self, data: str) -> bool:
        return any(data == name or (name[-1] in "/:" and data.startswith(name)) for name in self.names)


Opener = TypeVar("Opener", bound=Callable[[str, Options], Parts])
_REGISTERED: dict[str, Registered] = {}


def register_source(kind: str, *names: str, **how: Any) -> Callable[[Opener], Opener]:
    """Register a function of (data, options) that gives the parts of a source: "train" and "val", or "all".

    Args:
        names: What users write: a whole name, the beginning of one before / or :, or the ending of files after a dot.
        how: `claims`, `known` and `downloads`, as `Registered` has them.
    """

    def register(opener: Opener) -> Opener:
        _REGISTERED[kind] = Registered(kind, names, opener, **how)
        return opener

    return register


def registered_sources() -> list[Registered]:
    """All sources: those of users, then those of the modules in this folder."""
    for module in iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    return sorted(_REGISTERED.values(), key=lambda one: (one.open.__module__.startswith(f"{__package__}."), one.kind))


def named_source(data: str) -> Registered | None:
    """The source that goes by this name, if one does."""
    return next((one for one in registered_sources() if one.is_named(data)), None)


def check_places(names: Sequence[str], root: str | None, download: bool) -> None:
    """Refuse a root and a download that no data among these names has a use for."""
    datasets = any(one.downloads for one in map(named_source, names) if one)
    if download and not datasets:
        raise ValueError(f"download is for timm datasets, such as torch/cifar10; {names[0]} is none: leave it out")
    if root is not None and not datasets and not any(name.startswith("wds/") for name in names):
        raise ValueError(f"root is for timm datasets and wds/ shards; {names[0]} is neither: leave it out")


def open_parts(data: str, options: Options, what: str = "data") -> tuple[str, Parts]:
    """The kind of what DATA names, and its parts. `what` is what the user calls this argument."""
    try:
        source, place = _find(data, options.root, what)
        parts = source.open(place, options)
    except PermissionError as error:
        raise ValueError(f"permission denied: {error.filename}; make it readable for this user") from None
    first, name = next(iter(parts.values())), data.partition(":")[0]
    if source.is_named(data) and Path(name).is_dir():
        first.notes.insert(0, f"{name} is the built-in data set; the folder of that name is ./{name}")
    return getattr(first.source, "kind", source.kind), parts


def _find(data: str, root: str | None, what: str) -> tuple[Registered, str]:
    """The source of some data, and the name or path to open there."""
    if source := named_source(data):
        return source, data
    if data.startswith(STREAMS) or data.removeprefix("wds/").startswith(REMOTE):
        raise ValueError(f"{data} is a stream, which cannot be resumed exactly; download it and give the local path")
    path = Path(data.removeprefix("wds/")).expanduser()
    if root and data.startswith("wds/"):
        path = Path(root) / path
    if not path.exists():
        if any(letter in data for letter in "*?{"):
            return _REGISTERED["tar"], str(path)
        hint, near = "give the folder, tar or list to validate on, or leave val out for a hold-out", []
        if what == "data":
            known = sorted(name for one in registered_sources() for name in one.known)
            hint = "give a folder, a tar, a list, a COCO .json, or one of " + ", ".join(known)
            near = nearest(data, known)
        near += nearest_path(path)
        raise FileNotFoundError(f"no such {what}: {data}; " + (f"did you mean {near[0]}?" if near else hint))
    refuse_odd(path)
    for one in registered_sources():
        endings = tuple(name for name in one.names if name[0] == ".")
        if one.claims(path) if path.is_dir() else path.name.lower().endswith(endings):
            return one, str(path)
    if path.is_dir():
        return _REGISTERED["folder"], str(path)
    kinds = f"a folder, a tar ({', '.join(TARS)}), a list ({', '.join(LISTS)}) nor a COCO .json"
    raise ValueError(f"{path} is neither {kinds}")


def nearest_path(path: Path) -> list[str]:
    """The existing path most like one that does not exist, if any is."""
    parent, missing = path.absolute().parent, path.name
    while not parent.is_dir():
        parent, missing = parent.parent, parent.name
    with contextlib.suppress(OSError):
        return [str(parent / name) for name in nearest(missing, [n for n in os.listdir(parent) if n[0] != "."])]
    return []
