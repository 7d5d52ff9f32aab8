"""Images that nobody has labelled: files, folders, patterns and lists of them."""

import copy
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from ...files import odd_kind, refuse_odd
from .folder import FolderSource
from .list_file import read_paths
from .sample_table import in_order, is_hidden, is_image, some
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
    """The images that somebody names, in the order of the names, and what he should know about them.

    Args:
        arguments: Files, which count whatever they are called; folders, of which all images count at any depth, in
            natural order; or patterns such as photos/**/*.jpg. What exists is no pattern, whatever its characters.
        listing: Text file with a path on every line, relative to its own folder; they become absolute.

    Raises:
        FileNotFoundError: Arguments are not there or hold no image; the message has all of them.
        ValueError: Nothing is given, or the list names what is not there.
    """
    given = [os.fspath(argument) for argument in arguments]
    if not given and listing is None:
        raise ValueError("no images given; expected files, folders, quoted patterns, or a --list of files")
    names, notes, wrong = [], [], _Wrong()
    try:
        walk = Walk([])
        walk.expect(filter(os.path.isdir, given))
        for argument in given:
            names += _named(argument, walk, notes, wrong)
        if listing is not None:
            names += _listed(os.fspath(listing))
    except PermissionError as error:
        raise ValueError(f"permission denied: {error.filename}; make it readable for this user") from None
    wrong.refuse(len(given))
    names, twice = _once(names)
    if twice:
        notes.append(f"{_count(len(twice), 'image')} named more than once, and predicted once: {some(twice)}")
    return Unlabelled(names), notes


class _Wrong:
    """All that is wrong with some names, for one message."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unmatched: list[str] = []
        self.empty: list[str] = []
        self.odd: list[str] = []

    def refuse(self, given: int) -> None:
        parts = []
        if self.missing:
            parts.append(f"no such file or folder: {some(self.missing)} ({len(self.missing)} of {given} given)")
        if self.unmatched:
            parts.append(f"{_count(len(self.unmatched), 'pattern')} without a matching image: {some(self.unmatched)}")
        if self.empty:
            parts.append(f"{_count(len(self.empty), 'folder')} without images: {some(self.empty)}")
        if self.odd:
            parts.append(f"neither files nor folders: {some(self.odd)}; give the paths of files")
        if parts:
            raise FileNotFoundError("; ".join(parts))


def _named(argument: str, walk: Walk, notes: list[str], wrong: _Wrong) -> list[str]:
    walk.ignored, walk.again = ignored, again = [], []
    if os.path.isfile(argument):
        return [argument]
    if os.path.isdir(argument):
        names = in_order(walk.all(argument, os.path.join(argument, "")))
        if not names:
            wrong.empty.append(argument)
    elif not os.path.exists(argument) and any(sign in argument for sign in "*?["):
        names = in_order(_matching(argument, walk))
        if not names:
            wrong.unmatched.append(argument)
    elif (kind := odd_kind(argument)) is not None:
        wrong.odd.append(f"{argument} ({kind})")
        return []
    else:
        wrong.missing.append(argument)
        return []
    if names and again:
        notes += walk.notes(argument)
    if names and ignored:
        notes.append(f"{argument}: files that are no images are ignored: {some(in_order(ignored))}")
    return names


def _matching(pattern: str, walk: Walk) -> Iterator[str]:
    parts = pattern.split("/")
    if "**" in parts:
        yield from _matching_below(parts[: parts.index("**")], parts[parts.index("**") :], walk)
        return
    for name in glob.iglob(pattern):
        hidden = any(is_hidden(part) and part not in pattern for part in Path(name).parts)
        if os.path.isfile(name) and not hidden:
            if is_image(os.path.basename(name)):
                yield name
            else:
                walk.ignored.append(name)


def _matching_below(start: list[str], rest: list[str], walk: Walk) -> Iterator[str]:
    """Images below all folders that the start of a pattern names; `glob` would follow links for ever."""
    first = "/".join([*start, ""])
    others: list[str] = []
    folders = in_order(glob.glob(first)) if first else [""]
    walk.expect(folder or "." for folder in folders)
    for folder in folders:
        if walk.went_through(folder or "."):
            walk.again.append(folder)
            continue
        walk.ignored, ignored = others, walk.ignored
        yield from (name for name in walk.all(folder or ".", folder) if _fits(name.removeprefix(folder), rest))
        walk.ignored = ignored
        ignored += [name for name in others if _fits(name.removeprefix(folder), rest)]
        others.clear()


def _fits(name: str, pattern: list[str]) -> bool:
    """Whether a path fits the parts of a pattern, of which ** stands for any number of folders."""

    def begun(places: Iterable[int]) -> set[int]:
        """With the places behind each **, which may stand for nothing."""
        found = set(places)
        for place in range(len(pattern)):
            if place in found and pattern[place] == "**":
                found.add(place + 1)
        return found

    places = begun([0])
    for part in name.split("/"):
        stay = {place for place in places if pattern[place : place + 1] == ["**"]}
        go = {place + 1 for place in places - stay if place < len(pattern) and fnmatchcase(part, pattern[place])}
        places = begun(stay | go)
    return len(pattern) in places


def _listed(listing: str) -> list[str]:
    refuse_odd(listing)
    if not os.path.isfile(listing):
        raise FileNotFoundError(f"there is no list {listing}; expected a text file with a path on every line")
    return read_paths(Path(listing))


def _once(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names of different files, and those that name one of them again, each once."""
    seen: set[str] = set()
    first, again = [], {}
    for name in names:
        path = os.path.abspath(name)
        if path in seen:
            again[path] = name
        else:
            seen.add(path)
            first.append(name)
    return first, list(again.values())


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"
