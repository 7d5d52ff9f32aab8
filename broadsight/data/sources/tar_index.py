"""The members of a tar by name, place and size, and the labels among them, kept in the cache, at a bounded cost."""

import bz2
import contextlib
import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from ...files import check_regular, whole_file
from .sample_table import EXTENSIONS, Names

# Compression by a file's first bytes, whatever its name.
COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
ZSTANDARD = b"\x28\xb5\x2f\xfd"
VARIABLE = "BROADSIGHT_UNPACK_GB"  # of the environment: the most that a compressed tar may unpack to
TIMES = 50  # the size of a compressed tar, that it unpacks to at most; bitmaps shrink to a tenth, zeros to a thousandth
LEAST = 256 << 20  # bytes that any may have
LEFT = 1 << 30  # bytes of the disk that are not filled
HEADER = 16 << 20  # bytes that are read at once: names and notes of a member, however long

DAMAGES = (EOFError, ValueError, zlib.error, lzma.LZMAError, tarfile.TarError, gzip.BadGzipFile)
# What tarfile also raises for files that are no tars: endless chains of headers, huge numbers, malformed notes.
DAMAGES += (RecursionError, OverflowError, MemoryError, LookupError, TypeError, AttributeError)
FORMAT = 1  # of the cached index; another number makes the old ones stale


class TooMuch(ValueError):
    """A tar is beyond a limit, or the limit that the user gives is not a number."""


class Index:
    """The files in a tar by name, place and size, and their labels (-1: holds none), from what `scanned` gives."""

    def __init__(self, content: Mapping[str, np.ndarray], tar: Path, shown: str):
        self.tar, self.shown = str(tar), shown  # the uncompressed file, and its name in reports
        self.names = Names.of(content["text"], content["ends"])
        self.refused = Names.of(content["refused_text"], content["refused_ends"])
        self.offsets, self.sizes, self.labels = content["offsets"], content["sizes"], content["labels"]

    def samples(self) -> Iterator[tuple[str, dict[str, int]]]:
        """The members as WebDataset groups them: neighbours of one name up to its first dot, by extension."""

        def stem(member: tuple[int, str]) -> str:
            folder, slash, name = member[1].rpartition("/")
            return folder + slash + name.partition(".")[0]

        for key, members in groupby(enumerate(self.names), stem):
            yield key, {name[len(key) :].lower(): row for row, name in members}

    @cached_property
    def is_shard(self) -> bool:
        """Whether images in it have labels beside them."""
        labelled = self.labels.max(initial=-1) >= 0
        return bool(labelled) and any(None not in row_and_label(self, rows) for _, rows in self.samples())


def row_and_label(index: Index, rows: dict[str, int]) -> tuple[int | None, int | None]:
    """Of a sample's members, the row of its image and its label."""
    image = next((row for extension, row in rows.items() if extension in EXTENSIONS), None)
    labels = [int(index.labels[rows[extension]]) for extension in (".cls", ".json") if extension in rows]
    return image, next((label for label in labels if label >= 0), None)


def index_of(path: Path, cache: Path, notes: list[str]) -> Index:
    """The index of a tar, from the cache where it was made before."""
    tar = unpacked(path, cache, notes)
    kept = cache / "indices" / f"{key_of(path)}.npz"
    try:
        with np.load(kept, allow_pickle=False) as content:
            index = Index(content, tar, path.name)
        if index.offsets.size and (index.offsets + index.sizes).max() > tar.stat().st_size:
            raise ValueError("another tar")
        return index
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        pass  # not made yet, or damaged: made again
    content = scanned(path, tar)
    with contextlib.suppress(OSError):  # it is a convenience: without a place to keep it, it is made every time
        kept.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(kept) as unfinished, unfinished.open("wb") as file:
            np.savez(file, allow_pickle=False, **content)
    return Index(content, tar, path.name)


def scanned(path: Path, tar: Path) -> dict[str, np.ndarray]:
    """All regular files in a tar; links, devices and names that lead out of it are refused."""
    files, refused = [], []
    try:
        # tarfile reads a header at a time; a buffer saves the system calls where members are small
        with (
            open(tar, "rb", buffering=1 << 16) as file,
            tarfile.open(fileobj=cast(Any, ShortReads(file)), mode="r:") as members,
        ):
            end = 0
            for member in members:
                if not end <= member.offset < members.offset or not 0 <= member.size < 2**62:
                    raise tarfile.ReadError(f"a header at byte {member.offset:,} points back")
                end = members.offset
                name = member.name.removeprefix("./")
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse() or name.startswith("/") or ".." in name.split("/"):
                    refused.append(member.name)
                    continue
                files.append((name, member.offset_data, member.size, label_in(name, members, member)))
                cast(Any, members).members.clear()  # or tarfile keeps an object for each
            file.seek(members.offset)
            if any(file.read(tarfile.BLOCKSIZE)):  # tarfile takes what it cannot read for the end
                raise tarfile.ReadError(f"no header at byte {members.offset:,}")
    except DAMAGES as error:
        raise ValueError(f"{path} is damaged or no tar: {error}; write or fetch it again") from None
    named, left = Names(name for name, *_ in files), Names(refused)
    offsets, sizes, labels = np.array([numbers for _, *numbers in files], np.int64).reshape(-1, 3).T.copy()
    content = dict(text=named.text, ends=named.ends, refused_text=left.text, refused_ends=left.ends)
    return content | dict(offsets=offsets, sizes=sizes, labels=labels.astype(np.int32))


def label_in(name: str, members: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    """The label that a member holds, or -1."""
    kind = os.path.splitext(name)[1].lower()
    if kind not in (".cls", ".json") or member.size > 1 << 20:  # a larger one is something else
        return -1
    try:
        value = json.loads(cast(IO[bytes], members.extractfile(member)).read())
    except ValueError:
        return -1
    if kind == ".json":
        value = next((value[key] for key in ("label", "cls") if key in value), -1) if isinstance(value, dict) else -1
    return value if type(value) is int and 0 <= value < 2**31 else -1


def unpacked(path: Path, cache: Path, notes: list[str]) -> Path:
    """The tar itself, or an unpacked copy in the cache: in a compressed file no member can be found by its place."""
    try:
        check_regular(path)
    except ValueError as error:
        raise ValueError(f"{path} is {error}; give a .tar file") from None
    with open(path, "rb") as file:
        start = file.read(6)
    if start.startswith(ZSTANDARD):
        raise ValueError(f"{path} is compressed by zstd, which is not read here; unpack it, or use gzip, bzip2 or xz")
    opener = next((opener for magic, opener in COMPRESSED.items() if start.startswith(magic)), None)
    if opener is None:
        return path
    copy = cache / "tars" / f"{key_of(path)}.tar"
    if not copy.is_file():
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(copy) as unfinished, unfinished.open("wb") as file:
                _unpack(path, opener, file, copy.parent)
        except TooMuch:
            raise
        except DAMAGES as error:
            raise ValueError(f"{path} is damaged: {error}; write or fetch it again") from None
        except OSError as error:
            what = f"{path} cannot be unpacked into {copy.parent}: {error.strerror or error}"
            raise ValueError(f"{what}; set BROADSIGHT_CACHE to a folder with room, or unpack it yourself") from None
    notes.append(f"{path.name} is read from an unpacked copy, {copy} ({copy.stat().st_size / 1e6:,.0f} MB)")
    return copy


def key_of(path: Path) -> str:
    """A file name for what is kept about a file, as it is now."""
    now = path.stat()
    text = json.dumps([FORMAT, os.path.realpath(path), now.st_size, now.st_mtime_ns])
    stem = re.sub(r"[^\w.-]", "_", path.name.partition(".")[0], flags=re.ASCII)[:40]
    return f"{stem}-{hashlib.blake2b(text.encode('utf-8', 'surrogateescape'), digest_size=8).hexdigest()}"


def _unpack(path: Path, opener: Callable[..., Any], file: IO[bytes], folder: Path) -> None:
    """Write what a compressed file holds into another, in `folder`; TooMuch if it would fill the disk."""
    most, why = max(LEAST, TIMES * path.stat().st_size), f"{TIMES} times its size, {LEAST >> 20} MB at least"
    if given := os.environ.get(VARIABLE):
        most, why = 0, f"{VARIABLE}={given}"
        with contextlib.suppress(ValueError, OverflowError):
            most = int(float(given) * 2**30)
        if most < 1:
            raise TooMuch(f"{why}; expected gigabytes, such as 20")
    limit, hint = f"{_size(most)} ({why})", f"if that is meant, set {VARIABLE} to gigabytes that suffice"
    if (room := shutil.disk_usage(folder).free - LEFT) < most:
        limit = f"{folder} has room for ({_size(max(room, 0))} beside the last {_size(LEFT)})"
        hint = "set BROADSIGHT_CACHE to a folder with room"
    left = min(most, room)
    with opener(path, "rb") as packed:
        while block := cast(IO[bytes], packed).read(1 << 20):
            left -= len(block)
            if left < 0:
                raise TooMuch(f"{path} unpacks to more than {limit}; {hint}, or unpack it yourself")
            file.write(block)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.0f} MB"


class ShortReads:
    """A file that refuses to read much at once: `tarfile` would ask for as much as a header claims."""

    def __init__(self, file: IO[bytes]):
        self.file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, count: int = -1) -> bytes:
        if not 0 <= count <= HEADER:
            raise TooMuch(f"a header of {count:,} bytes; up to {HEADER:,} are read")
        return self.file.read(count)
