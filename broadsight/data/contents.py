"""What is stored under the names of images, in short: by it a resumed run notices that files were replaced.

Neither times nor places count, so that data that was moved or copied is the same.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

READ = 4096  # images of a part are read, those of its classes in equal numbers; of all others the size counts
WHOLE = 1 << 17  # bytes of a file that is read as a whole; of a larger one, its beginning and its end


def contents(parts: Mapping[str, Any]) -> dict[str, str]:
    """A digest of what each part of some data holds, whatever its order.

    Args:
        parts: Sources by the name of their part. One without `vouch(index, content)` gives none: it is drawn, or
            somebody else's.
    """
    return {key: _of_part(source) for key, source in parts.items() if hasattr(source, "vouch")}


def same_contents(stored: Mapping[str, Any], found: Mapping[str, Any], parts: Sequence[str] = ("train", "val")) -> bool:
    """Whether two descriptions of data are of the same content, in all parts that both know."""
    old, new = stored.get("contents") or {}, found.get("contents") or {}
    return all(old[part] == new[part] for part in parts if part in old and part in new)


def _of_part(source: Any) -> str:
    names = [source.name(row) for row in range(len(source))]
    turns = [hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest() for name in names]
    read = _chosen(turns, getattr(source, "labels", None))
    lines = sorted(
        (turn, hashlib.blake2b(source.vouch(row, bool(read[row])), digest_size=16).digest())
        for row, turn in enumerate(turns)
    )
    return hashlib.sha256(b"".join(turn + line for turn, line in lines)).hexdigest()[:32]


def _chosen(turns: Sequence[bytes], labels: np.ndarray | None) -> np.ndarray:
    """Which images (N,) are read: all of few, else of each class those whose turn comes first, by their names."""
    count = len(turns)
    if count <= READ:
        return np.ones(count, bool)
    kinds = np.zeros(count, np.int64) if labels is None else np.asarray(labels)
    order = np.lexsort((np.array([int.from_bytes(turn, "big") for turn in turns], np.uint64), kinds))
    counts = np.bincount(kinds)
    rank = np.arange(count) - (np.cumsum(counts) - counts)[kinds[order]]
    chosen = np.zeros(count, bool)
    chosen[order] = rank < max(1, READ // max(1, np.count_nonzero(counts)))
    return chosen


def of_file(path: str | Path, content: bool) -> bytes:
    """What stands for a file: its size and, if asked for, a digest of its content."""
    try:
        if not content:
            return of_bytes(os.stat(path).st_size, lambda start, length: b"", False)
        with open(path, "rb") as file:

            def read(start: int, length: int) -> bytes:
                file.seek(start)
                return file.read(length)

            return of_bytes(os.fstat(file.fileno()).st_size, read, True)
    except OSError:
        return b"unreadable"


def of_bytes(size: int, read: Callable[[int, int], bytes], content: bool) -> bytes:
    """What stands for some bytes that `read` gives from a place on, so many of them."""
    found = hashlib.blake2b(b"%d" % size, digest_size=16)
    if content and size <= WHOLE:
        found.update(read(0, size))
    elif content:
        found.update(read(0, WHOLE // 2) + read(size - WHOLE // 2, WHOLE // 2))
    return found.digest()


def of_arrays(*arrays: Any) -> bytes:
    """What stands for numbers."""
    found = hashlib.blake2b(digest_size=16)
    for array in map(np.ascontiguousarray, arrays):
        found.update(f"{array.dtype} {array.shape};".encode() + array.tobytes())
    return found.digest()
