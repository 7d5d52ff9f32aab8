"""Images below folders, each real folder searched once, wherever links point."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .sample_table import is_hidden, is_image, noted, part_names

FEW = 16  # files of a folder are looked up one by one; of more, the folder is listed


def entries(path: Path | str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as found:
        return list(found)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder that is not hidden, or a link to one."""
    return not is_hidden(entry.name) and is_there(entry.is_dir)


def parts_in(path: Path) -> dict[str, Path]:
    """The folders in a folder that are parts of a data set: train/ and val/, by these or similar names."""
    called = part_names([entry.name for entry in entries(path) if is_folder(entry)], lambda _: True)
    return {key: path / name for key, name in called.items() if name}


def is_there(kind: Callable[[], bool]) -> bool:
    """What an entry says of its kind; a link to itself has none."""
    try:
        return kind()
    except OSError:
        return False


def missing_files(root: Path | str, names: Iterable[str]) -> list[str]:
    """The names that are no files below a folder, each once. Of many in a folder, the folder is listed."""
    folders: dict[str, list[str]] = defaultdict(list)
    given = dict.fromkeys(names)
    for name in given:
        folders[os.path.dirname(name)].append(name)
    missing = set()
    for folder, inner in folders.items():
        place, there = os.path.join(root, folder), set[str]()
        if len(inner) > FEW and os.path.isdir(place):
            there = {entry.name for entry in entries(place) if is_there(entry.is_file)}
        # one by one what the folder lists otherwise: a file system may take A for a
        absent = (name for name in inner if os.path.basename(name) not in there)
        missing |= {name for name in absent if not os.path.isfile(os.path.join(root, name))}
    return [name for name in given if name in missing]


def no_classes(place: str | Path, images: int) -> ValueError:
    """The error for class folders that are missing: there is no image, or so many lie outside of such folders."""
    if not images:
        return ValueError(f"no images in {place}; expected folders named after classes, with images in them")
    hint = "put the images of each class into a folder named after it"
    return ValueError(f"{place} holds {images:,} images but no class folders; {hint}")


class Walk:
    """Finds the images below folders. Links are followed, but nothing is found twice, and first by its own name.

    `again` has the names of links that were not followed: to what was found otherwise, or to a folder around the link.
    `ignored` gets the names of files other than images, and of pipes, sockets and devices.
    """

    def __init__(self, ignored: list[str]):
        self.ignored, self.again = ignored, []
        self._expected: set[str] = set()
        self._tops: set[str] = set()  # where `own` has begun
        self.owners: dict[str, str] = {}  # of real folders, and of real images that links lead to
        self._reached: set[str] = set()  # which of these are there by a link alone
        self._links: dict[str, list[tuple[str, str]]] = defaultdict(list)  # by owner: names and paths, of folders
        self._files: dict[str, list[tuple[str, str]]] = defaultdict(list)  # likewise, of images

    def expect(self, folders: Iterable[Path | str]) -> None:
        """Name folders that will be searched anyway, so that links to them are not followed."""
        self._expected |= {os.path.realpath(folder) for folder in folders}

    def claim(self, folder: Path | str, owner: str) -> None:
        """Give a folder to an owner before the search; a ValueError if a link has given it to another."""
        real = os.path.realpath(folder)
        other = self.owners.setdefault(real, owner)
        if os.path.islink(folder):
            self._reached.add(real)
        if other != owner:
            raise ValueError(f"{folder} is the same folder as that of {other!r}; keep one of the two, or copy it")

    def own(self, folder: Path | str, prefix: str, owner: str = "", by_link: bool = False) -> Iterator[str]:
        """Names of the images below a folder, links aside; a ValueError if another owner claims a folder in it."""
        top = os.path.realpath(folder)
        self.owners.setdefault(top, owner)
        self._tops.add(os.path.join(top, ""))
        by_link = by_link or top in self._reached
        waiting = [(os.fspath(folder), top, prefix)]
        while waiting:
            place, real, prefix = waiting.pop()
            if by_link:
                self._reached.add(real)
            for entry in entries(place):
                name = prefix + entry.name
                if is_folder(entry):
                    if entry.is_symlink():
                        self._links[owner].append((f"{name}/", entry.path))
                        continue
                    inner = os.path.join(real, entry.name)
                    if inner not in self.owners:
                        self.owners[inner] = owner
                        waiting.append((entry.path, inner, f"{name}/"))
                    elif (other := self.owners[inner]) != owner:
                        what = f"{entry.path} belongs to both {owner!r} and, by a link, {other!r}"
                        raise ValueError(f"{what}; remove the link, or copy the folder")
                elif is_image(entry.name) and is_there(entry.is_file):
                    if entry.is_symlink():
                        self._files[owner].append((name, entry.path))
                    else:
                        yield name
                elif not is_hidden(entry.name):
                    self.ignored.append(name)

    def linked(self, owner: str = "") -> Iterator[str]:
        """Names of the images that the owner's links to folders lead to, after `own`; see `_found` for errors."""
        while links := sorted(self._links.pop(owner, [])):
            for name, path in links:
                real = os.path.realpath(path)
                around = any(top.startswith(os.path.join(real, "")) for top in self._tops)
                if self._found(real, name, owner) or around or real in self._expected:
                    self.again.append(name)
                else:
                    yield from self.own(path, name, owner, by_link=True)

    def linked_files(self, owner: str = "") -> Iterator[str]:
        """The same for links to images; after all links to folders."""
        for name, path in sorted(self._files.pop(owner, [])):
            real = os.path.realpath(path)
            folder, base = os.path.split(real)
            counted = folder if folder in self.owners and is_image(base) else real
            if self._found(counted, name, owner):
                self.again.append(name)
            else:
                self.owners[real] = owner
                self._reached.add(real)
                yield name

    def all(self, folder: Path | str, prefix: str, *, files_once: bool = True) -> Iterator[str]:
        """Names of all images below a folder."""
        yield from self.own(folder, prefix)
        yield from self.linked()
        yield from self.linked_files() if files_once else sorted(name for name, _ in self._files.pop("", []))

    def _found(self, real: str, name: str, owner: str) -> bool:
        """Whether a real path was found before; an error if only links of another owner lead to it."""
        other = self.owners.get(real)
        if other not in (None, owner) and real in self._reached:
            raise ValueError(f"links of both {other!r} and {owner!r} lead to {real} ({name}); keep one of them")
        return other is not None

    def notes(self, place: Path | str) -> list[str]:
        """A line on the links that were not followed, if there are any."""
        return noted(f"{place}: links to what is there already, or around it, are not followed", sorted(self.again))


def images_below(folder: Path | str, prefix: str, ignored: list[str], files_once: bool = True) -> Iterator[str]:
    """Names of all images below a folder, each once or, as masks may, under each name that a link gives it."""
    return Walk(ignored).all(folder, prefix, files_once=files_once)


def holds_images(folder: Path) -> bool:
    """Whether there is an image anywhere below a folder."""
    return folder.is_dir() and next(images_below(folder, "", []), None) is not None
