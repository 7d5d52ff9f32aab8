"""What is in a tar: its members by name, place and size, and the labels among them, as kept in the cache.

A tar is indexed once, and members are then read in place: nothing is ever written to a path that a tar names. Indices
and unpacked copies of compressed tars are keyed by the tar's path, size and time, and written whole or not at all.
"""

import contextlib
import gzip
import hashlib
import json
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np

from ...files import check_regular, whole_file
from .sample_table import EXTENSIONS, Names
from .tar_limits import ShortReads, TooMuch, opener_of, unpack

DAMAGES = (EOFError, ValueError, zlib.error, lzma.LZMAError, tarfile.TarError, gzip.BadGzipFile)
# What tarfile says besides of what is no tar: a chain of a thousand headers, numbers beyond all, notes of no form.
DAMAGES += (RecursionError, OverflowError, MemoryError, LookupError, TypeError, AttributeError)

FORMAT = 1  # of the cached index; another number makes the old ones stale
LABEL_BYTES = 1 << 20  # a label file is small; a larger one is something else


@dataclass
class Index:
    """What is in a tar: its files by name, place and size, and those files' labels (-1: holds none)."""

    tar: str
    shown: str
    names: Names
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray
    refused: Names

    def samples(self) -> Iterator[tuple[str, dict[str, int]]]:
        """The members as WebDataset groups them: neighbours that share a name up to its first dot, by extension."""

        def stem(member: tuple[int, str]) -> str:
            folder, slash, name = member[1].rpartition("/")
            return folder + slash + name.partition(".")[0]

        for key, members in groupby(enumerate(self.names), stem):
            yield key, {name[len(key) :].lower(): row for row, name in members}

    @cached_property
    def is_shard(self) -> bool:
        """Whether images in it have labels beside them."""
        labelled = len(self.labels) and self.labels.max() >= 0
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
            index = index_from(dict(content), str(tar), path.name)
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
    return index_from(content, str(tar), path.name)


def index_from(content: dict[str, np.ndarray], tar: str, shown: str) -> Index:
    names = Names.of(content["text"], content["ends"])
    refused = Names.of(content["refused_text"], content["refused_ends"])
    return Index(tar, shown, names, content["offsets"], content["sizes"], content["labels"], refused)


def scanned(path: Path, tar: Path) -> dict[str, np.ndarray]:
    """All regular files in a tar; links, devices and names that lead out of it are refused."""
    names, offsets, sizes, labels, refused = [], [], [], [], []
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
                names.append(name)
                offsets.append(member.offset_data)
                sizes.append(member.size)
                labels.append(label_in(name, members, member))
                cast(Any, members).members.clear()  # or tarfile keeps an object for each
            file.seek(members.offset)
            if any(file.read(tarfile.BLOCKSIZE)):  # tarfile takes what it cannot read for the end
                raise tarfile.ReadError(f"no header at byte {members.offset:,}")
    except DAMAGES as error:
        raise ValueError(f"{path} is damaged or no tar: {error}; write or fetch it again") from None
    named, left = Names(names), Names(refused)
    return dict(
        text=named.text,
        ends=named.ends,
        offsets=np.array(offsets, np.int64),
        sizes=np.array(sizes, np.int64),
        labels=np.array(labels, np.int32),
        refused_text=left.text,
        refused_ends=left.ends,
    )


def label_in(name: str, members: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    """The label that a member holds, or -1."""
    kind = os.path.splitext(name)[1].lower()
    if kind not in (".cls", ".json") or member.size > LABEL_BYTES:
        return -1
    file = members.extractfile(member)
    text = file.read() if file else b""
    try:
        value = json.loads(text)
    except ValueError:
        return -1
    if kind == ".json":
        value = next((value[key] for key in ("label", "cls") if key in value), -1) if isinstance(value, dict) else -1
    return value if type(value) is int and 0 <= value < 2**31 else -1


def unpacked(path: Path, cache: Path, notes: list[str]) -> Path:
    """The tar itself, or a copy of a compressed one in the cache: of a compressed file, only the start can be found."""
    try:
        check_regular(path)
    except ValueError as error:
        raise ValueError(f"{path} is {error}; give a .tar file") from None
    opener = opener_of(path)
    if opener is None:
        return path
    copy = cache / "tars" / f"{key_of(path)}.tar"
    if not copy.is_file():
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(copy) as unfinished, unfinished.open("wb") as file:
                unpack(path, opener, file, copy.parent)
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
