"""Digests of the content of images, wherever and however old, by which a resumed run notices replaced files."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from .stratify import ranks

READ = 4096  # images of a part are read, in equal numbers of each class; of the others only the size counts
WHOLE = 1 << 17  # bytes of a file that is read as a whole; of a larger one, the beginning and the end


def contents(parts: Mapping[str, Any]) -> dict[str, str]:
    """A digest of each part of some data, whatever its order; none of a source without `vouch(index, content)`."""
    return {key: _of_part(source) for key, source in parts.items() if hasattr(source, "vouch")}


def same_contents(stored: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether two descriptions of data have the same content in all parts that both know."""
    old, new = stored.get("contents") or {}, found.get("contents") or {}
    return all(old[part] == new[part] for part in old.keys() & new.keys())


def _of_part(source: Any) -> str:
    names = [source.name(row) for row in range(len(source))]
    turns = [hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest() for name in names]
    read = np.ones(len(turns), bool)
    if len(turns) > READ:  # of each class those that come first by the hash of their names
        labels = np.asarray(getattr(source, "labels", np.zeros(len(turns), np.int64)))
        places = ranks(np.array([int.from_bytes(turn, "big") for turn in turns], np.uint64), labels)
        read = places < max(1, READ // len(np.unique(labels)))
    vouched = (hashlib.blake2b(source.vouch(row, bool(read[row])), digest_size=16) for row in range(len(turns)))
    lines = sorted((turn, found.digest()) for turn, found in zip(turns, vouched, strict=True))
    return hashlib.sha256(b"".join(turn + line for turn, line in lines)).hexdigest()[:32]


def of_file(path: str | Path, content: bool) -> bytes:
    """A digest of a file's size and, if asked for, its content."""
    try:
        if not content:
            return of_bytes(os.stat(path).st_size)
        with open(path, "rb") as file:
            return of_bytes(os.fstat(file.fileno()).st_size, file)
    except OSError:
        return b"unreadable"


def of_bytes(size: int, file: IO[bytes] | None = None, start: int = 0) -> bytes:
    """A digest of so many bytes from a place in a file on, or of their number alone."""
    found = hashlib.blake2b(b"%d" % size, digest_size=16)
    spans = [(0, size)] if size <= WHOLE else [(0, WHOLE // 2), (size - WHOLE // 2, WHOLE // 2)]
    if file:
        for at, length in spans:
            file.seek(start + at)
            found.update(file.read(length))
    return found.digest()


def of_arrays(*arrays: Any) -> bytes:
    """A digest of arrays."""
    found = hashlib.blake2b(digest_size=16)
    for array in map(np.ascontiguousarray, arrays):
        found.update(f"{array.dtype} {array.shape};".encode() + array.tobytes())
    return found.digest()
