"""Bounds on what a tar may cost: its unpacked size, the length of a header, the bytes of an image.

A megabyte of compressed zeros unpacks to a gigabyte, and a header of 512 bytes may claim any length. Images are
compressed already, so that an honest archive of them hardly grows.
"""

import bz2
import gzip
import lzma
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

# By its first bytes, whatever its name.
COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
ZSTANDARD = b"\x28\xb5\x2f\xfd"

VARIABLE = "BROADSIGHT_UNPACK_GB"  # of the environment: the most that a compressed tar may unpack to
TIMES = 50  # the size of a compressed tar, that it unpacks to at most; bitmaps shrink to a tenth
LEAST = 256 << 20  # bytes that any may have
LEFT = 1 << 30  # bytes of the disk that are not filled
HEADER = 16 << 20  # bytes that are read at once: names and notes of a member, however long


class TooMuch(ValueError):
    """A tar is beyond a limit, or the limit that the user gives is not a number."""


def opener_of(path: Path) -> Callable[..., Any] | None:
    """The function that opens a compressed file; None for one that is not compressed."""
    with open(path, "rb") as file:
        start = file.read(6)
    if start.startswith(ZSTANDARD):
        raise ValueError(f"{path} is compressed by zstd, which is not read here; unpack it, or use gzip, bzip2 or xz")
    return next((opener for magic, opener in COMPRESSED.items() if start.startswith(magic)), None)


def most_unpacked(packed: int) -> tuple[int, str]:
    """The most bytes that a compressed file of `packed` bytes may unpack to, and why."""
    given = os.environ.get(VARIABLE)
    if not given:
        return max(LEAST, TIMES * packed), f"{TIMES} times its size, {LEAST >> 20} MB at least"
    try:
        most = int(float(given) * 2**30)
    except (ValueError, OverflowError):
        most = 0
    if most < 1:
        raise TooMuch(f"{VARIABLE}={given}; expected gigabytes, such as 20")
    return most, f"{VARIABLE}={given}"


def unpack(path: Path, opener: Callable[..., Any], file: IO[bytes], folder: Path) -> None:
    """Write what a compressed file holds into another, in `folder`; TooMuch if it would fill the disk."""
    most, why = most_unpacked(path.stat().st_size)
    room = shutil.disk_usage(folder).free - LEFT
    written = 0
    with opener(path, "rb") as packed:
        while block := cast(IO[bytes], packed).read(1 << 20):
            written += len(block)
            if written > most:
                raise TooMuch(
                    f"{path} unpacks to more than {_size(most)} ({why}); if that is meant, set {VARIABLE} "
                    "to gigabytes that suffice, or unpack it yourself"
                )
            if written > room:
                raise TooMuch(
                    f"{path} unpacks to more than {folder} has room for ({_size(max(room, 0))} beside the last "
                    f"{_size(LEFT)}); set BROADSIGHT_CACHE to a folder with room, or unpack it yourself"
                )
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
