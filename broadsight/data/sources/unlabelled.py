"""Images without labels: files, folders, patterns and lists of them."""

import copy
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import numpy as np

from ...files import odd_kind, refuse_odd
from .folder import FolderSource
from .list_file import read_paths
from .sample_table import in_order, is_hidden, is_image, noted, some
from .walking import Walk


class Unlabelled(FolderSource):
    """Files by their paths, absolute or relative to the current folder. All have label 0 of no class."""

    def __init__(self, names: Sequence[str], channels: int = 3):
        super().__init__(Path.cwd(), names, np.zeros(len(names), np.int32).tolist(), (), channels)

    def in_channels(self, channels: int) -> "Unlabelled":
        """The same images in grey (1) or in RGB (3)."""
        if channels not in (1, 3):
            raise ValueError(f"a model for images of {channels} channels; expected 1 (grey) or 3 (RGB)")
        same = copy.copy(self)
        same.channels = channels
        return same


def find_images(arguments: Iterable[str | Path], listing: str | Path | None = None) -> tuple[Unlabelled, list[str]]:
    """The images that arguments name, in their order, and notes for the user; or one error with all that is wrong.

    Arguments are files of any name, folders with images at any depth, or patterns such as photos/**/*.jpg, which no
    existing path is. A listing is a text file with a path on every line, relative to its own folder.
    """
    given = [os.fspath(argument) for argument in arguments]
    if not given and listing is None:
        raise ValueError("no images given; expected files, folders, quoted patterns, or a --list of files")
    names, notes = [], []
    wrong: dict[str, list[str]] = {kind: [] for kind in ("missing", "unmatched", "empty", "odd")}
    try:
        walk = Walk([])
        walk.expect(filter(os.path.isdir, given))
        for argument in given:
            names += _named(argument, walk, notes, wrong)
        if listing is not None:
            refuse_odd(listing)
            if not os.path.isfile(listing):
                raise FileNotFoundError(f"there is no list {listing}; expected a text file with a path on every line")
            names += read_paths(Path(listing))
    except PermissionError as error:
        raise ValueError(f"permission denied: {error.filename}; make it readable for this user") from None
    missing, unmatched, empty, odd = wrong.values()
    errors = {
        f"no such file or folder: {some(missing)} ({len(missing)} of {len(given)} given)": missing,
        f"{_count(len(unmatched), 'pattern')} without a matching image: {some(unmatched)}": unmatched,
        f"{_count(len(empty), 'folder')} without images: {some(empty)}": empty,
        f"neither files nor folders: {some(odd)}; give the paths of files": odd,
    }
    if any(errors.values()):
        raise FileNotFoundError("; ".join(error for error, found in errors.items() if found))
    first, twice = dict[str, str](), dict[str, str]()
    for name in names:
        path = os.path.abspath(name)
        (twice if path in first else first)[path] = name
    what = f"{_count(len(twice), 'image')} named more than once, and predicted once"
    notes += noted(what, list(twice.values()))
    return Unlabelled(list(first.values())), notes


def _named(argument: str, walk: Walk, notes: list[str], wrong: dict[str, list[str]]) -> list[str]:
    """The images of one argument, or none and an entry among what is wrong."""
    walk.ignored, walk.again, names = [], [], list[str]()
    if os.path.isfile(argument):
        return [argument]
    if os.path.isdir(argument):
        names, kind = in_order(walk.all(argument, os.path.join(argument, ""))), "empty"
    elif not os.path.exists(argument) and any(sign in argument for sign in "*?["):
        names, kind = in_order(_matching(argument, walk)), "unmatched"
    elif odd := odd_kind(argument):
        argument, kind = f"{argument} ({odd})", "odd"
    else:
        kind = "missing"
    if not names:
        wrong[kind].append(argument)
        return []
    notes += walk.notes(argument) + noted(f"{argument}: files that are no images are ignored", in_order(walk.ignored))
    return names


def _matching(pattern: str, walk: Walk) -> Iterator[str]:
    """Images that a pattern names; below the folders before a ** by a walk, as `glob` would follow links for ever."""
    parts = pattern.split("/")
    if "**" not in parts:
        for name in glob.iglob(pattern):
            hidden = any(is_hidden(part) and part not in pattern for part in Path(name).parts)
            if os.path.isfile(name) and not hidden:
                if is_image(name):
                    yield name
                else:
                    walk.ignored.append(name)
        return
    start, rest = parts[: parts.index("**")], parts[parts.index("**") :]
    first = "/".join([*start, ""])
    folders = in_order(glob.glob(first)) if first else [""]
    walk.expect(folder or "." for folder in folders)
    ignored = walk.ignored
    for folder in folders:
        if os.path.realpath(folder or ".") in walk.owners:
            walk.again.append(folder)
            continue
        walk.ignored = []
        yield from (name for name in walk.all(folder or ".", folder) if _fits(name.removeprefix(folder), rest))
        ignored += [name for name in walk.ignored if _fits(name.removeprefix(folder), rest)]
    walk.ignored = ignored


def _fits(name: str, pattern: list[str]) -> bool:
    """Whether a path fits the parts of a pattern, of which ** stands for any number of folders."""
    parts = name.split("/")

    @cache
    def fits(part: int, place: int) -> bool:  # what is left of both
        if place == len(pattern):
            return part == len(parts)
        if pattern[place] == "**":
            return fits(part, place + 1) or (part < len(parts) and fits(part + 1, place))
        return part < len(parts) and fnmatchcase(parts[part], pattern[place]) and fits(part + 1, place + 1)

    return fits(0, 0)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"
