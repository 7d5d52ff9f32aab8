"""Files: what a path is, and whole files and folders, which appear complete or not at all."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
KINDS |= dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device")


def odd_kind(path: str | Path) -> str | None:
    """What a path is, such as "a pipe", which may never end or begin, if it is there and no regular file."""
    with suppress(OSError, ValueError):  # not there, or no path at all: whoever opens it has the words for that
        return KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    return None


def refuse_odd(path: str | Path) -> None:
    """Refuse data that is neither a file nor a folder, but a pipe or the like: it may never end, or never begin."""
    if (kind := odd_kind(path)) not in (None, "a folder"):
        raise ValueError(f"{path} is {kind}, not a file or folder; give the path of a file, or write it into one")


def check_regular(path: str | Path, most: int | None = None) -> None:
    """Refuse what is no regular file, or has more bytes than `most`: OSErrors as of opening it, or a ValueError."""
    found = os.stat(path)
    kind = KINDS.get(stat.S_IFMT(found.st_mode))
    if kind == "a folder":
        raise IsADirectoryError(errno.EISDIR, "Is a directory", os.fspath(path))
    if kind is not None:
        raise ValueError(f"{kind}, not a file")
    if most is not None and found.st_size > most:
        raise ValueError(f"a file of {found.st_size / 2**30:,.1f} GB; up to {most / 2**30:g} GB are read")


@contextmanager
def whole_file(path: str | Path, *, durable: bool = False) -> Generator[Path, None, None]:
    """Another name to write to; the file gets its own once that has succeeded, and if `durable` is on the disk."""
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield unfinished
        if durable:
            flush(unfinished)
        unfinished.replace(path)
        if durable:
            flush(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: str | Path, *, replace: bool = False, durable: bool = False) -> Generator[Path, None, None]:
    """Another folder to write to; it becomes `folder`, which has to be new or empty or may go with `replace`."""
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part"))
    unfinished, before = scratch / folder.name, scratch / "before"
    unfinished.mkdir()
    try:
        yield unfinished
        if durable:
            for path in (*unfinished.rglob("*"), unfinished):
                flush(path)
        if not replace and folder.is_dir():
            folder.rmdir()
        elif folder.exists():
            folder.rename(before)
        try:
            unfinished.rename(folder)
        except OSError:
            if before.exists():
                before.rename(folder)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_writable(*paths: str | Path | None) -> None:
    """Refuse output files before the work, not after it; None and "-", the standard output, are fine."""
    for path in (Path(path) for path in paths if path is not None and path != "-"):
        cannot, folder = f"cannot write {str(path)!r}", path.resolve().parent
        if not folder.is_dir():
            raise FileNotFoundError(f"{cannot}: there is no folder {str(folder)!r}; create it first")
        if path.is_dir():
            raise ValueError(f"{cannot}: it is a folder; give the name of a file in it")
        if not os.access(path if path.exists() else folder, os.W_OK) or not os.access(folder, os.W_OK):
            raise ValueError(f"{cannot}: permission denied; choose another folder")


def check_creatable(folder: str | Path) -> None:
    """Refuse a folder that cannot be made, before the work."""
    folder = Path(folder).absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "permission denied" if there.is_dir() else f"{there} is a file"
        raise ValueError(f"cannot write to {folder}: {what}; choose another --out")


def check_new_folder(out: str | None, usual: str) -> Path | None:
    """The folder named for a result, after a check that it, or else one in `usual`, can be made: before the work."""
    folder = Path(out) if out else None
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out {out} exists and is not an empty folder; choose another, nothing was changed")
    check_creatable(folder or usual)
    return folder


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes have left of whole files; nobody else may be writing there."""
    for path in filter(Path.is_file, folder.glob(".*.part")):
        path.unlink(missing_ok=True)


def write_text(text: str, path: str | Path, *, durable: bool = False) -> None:
    """Write a text file, whole or not at all. Names of files that are not Unicode keep their bytes."""
    with whole_file(path, durable=durable) as unfinished:
        unfinished.write_text(text, encoding="utf-8", errors="surrogateescape")


def write_json(value: Any, path: str | Path, *, durable: bool = False) -> None:
    """Write what JSON can hold, whole or not at all; NaN and infinity are refused."""
    write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", path, durable=durable)


def numbers_taken(folder: Path, stem: str) -> list[int]:
    """Of all that is called STEM-NUMBER in a folder, the numbers."""
    found = [re.fullmatch(re.escape(stem) + r"-([0-9]+)", path.name) for path in folder.glob("*")]
    return [int(number[1]) for number in found if number]


def next_folder(folder: str | Path, *words: object) -> Path:
    """The next free FOLDER/WORD-WORD-NUMBER, for a result that nobody has named; only its name is made."""
    folder, stem = Path(folder), "-".join(re.sub(r"[^\w.-]+", "-", str(word)).strip("-") for word in words)
    return folder / f"{stem}-{max(numbers_taken(folder, stem), default=0) + 1}"


def move_together(source: Path, target: Path, suffixes: Sequence[str]) -> None:
    """Give the files of one artefact, which differ in their suffixes, other names; the first suffix comes last."""
    for suffix in reversed(suffixes):
        source.with_suffix(suffix).replace(target.with_suffix(suffix))


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            found.update(chunk)
    return found.hexdigest()


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
