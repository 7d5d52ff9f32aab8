"""What a path is: a regular file, or something that looks like one and may never end or never begin."""

import hashlib
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def odd_kind(path: str | Path) -> str | None:
    """What a path is, such as "a pipe", if it is there and no regular file; links are followed.

    To open a pipe waits for somebody who writes into it, and /dev/zero has no end: so whoever reads a file that he was
    given asks this first.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # not there, or no path at all: whoever opens it has the words for that
        return None
    return next((kind for holds, kind in KINDS if holds(mode)), None)


def refuse_odd(path: str | Path) -> None:
    """Refuse data that is neither a file nor a folder: it may never end, or never begin.

    Raises:
        ValueError: It is a pipe, a socket or a device.
    """
    kind = odd_kind(path)
    if kind not in (None, "a folder"):
        raise ValueError(f"{path} is {kind}, not a file or folder; give the path of a file, or write it into one")


def check_regular(path: str | Path, most: int | None = None) -> None:
    """Refuse what is no regular file, or has more bytes than `most`.

    Raises:
        IsADirectoryError: It is a folder.
        ValueError: It is a pipe, a socket or a device, or too long.
        OSError: It is not there, or cannot be asked for.
    """
    found = os.stat(path)
    kind = next((kind for holds, kind in KINDS if holds(found.st_mode)), None)
    if kind == "a folder":
        raise IsADirectoryError(21, "Is a directory", os.fspath(path))
    if kind is not None:
        raise ValueError(f"{kind}, not a file")
    if most is not None and found.st_size > most:
        raise ValueError(f"a file of {found.st_size / 2**30:,.1f} GB; up to {most / 2**30:g} GB are read")


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            found.update(chunk)
    return found.hexdigest()


def write_text(text: str, path: Path) -> None:
    """A text file, whole or as it was. Names of files that are not Unicode keep their bytes."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", errors="surrogateescape")


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """Another name to write to; what is there takes the file's place once it is on the disk.

    It is always the same name: what a killed process leaves under it does not pile up in the folder.
    """
    unfinished = path.with_name(f".{path.name}.part")
    try:
        yield unfinished
        flush(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some file systems cannot do that for folders
        if path.is_file():
            raise
    finally:
        os.close(handle)


@contextmanager
def whole_file(path: Path) -> Generator[Path, None, None]:
    """Another name to write to; the file gets its own once that has succeeded."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
