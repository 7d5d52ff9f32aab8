"""Images for tests of sources, and what those are asked."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from broadsight.data.decoding import decode
from broadsight.data.sources import Source, Splits


def shared(path: str) -> Path:
    """Data beside the repository; a test is skipped where they are not."""
    place = Path(__file__).parents[3] / "shared" / "data" / path
    if not place.exists():
        pytest.skip(f"{path} is not beside the repository")
    return place


def put(path: Path, shade: int = 0, size: tuple[int, int] = (4, 3)) -> Path:
    """An image of one brightness, in folders that are made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade,) * 3).save(path, "PNG")
    return path


def fill(folder: Path, **counts: int) -> Path:
    """Class folders with so many images each, all of different brightness."""
    for place, (name, count) in enumerate(counts.items()):
        for number in range(count):
            put(folder / name / f"{number}.png", 10 * place + number)
    return folder


class Shades:
    """Images whose brightness is their number; those in `broken` are no images."""

    classes = ("even", "odd")

    def __init__(self, count: int, broken: tuple[int, ...] = ()):
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def label(self, index: int) -> int:
        return index % 2

    def name(self, index: int) -> str:
        return f"{index}.png"

    def open(self, index: int) -> Image.Image:
        return decode(b"no image" if index in self.broken else png(index))


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (shade,) * 3).save(file, "PNG")
    return file.getvalue()


def raw_png(width: int, height: int, bits: int, kind: int, rows: bytes) -> bytes:
    """A PNG such as PIL does not write, of a colour type, from its packed rows."""
    lines = np.frombuffer(rows, np.uint8).reshape(height, -1)
    header, written = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0), b"\x89PNG\r\n\x1a\n"
    data = zlib.compress(np.pad(lines, ((0, 0), (1, 0))).tobytes())  # each behind a filter of 0
    for name, body in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b"")):
        written += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return written


def everything(splits: Splits) -> dict[str, str]:
    """Names with their classes, of both parts."""
    return rows(splits.train) | rows(splits.val)


def rows(source: Source) -> dict[str, str]:
    """Names with their classes."""
    return {source.name(row): source.classes[source.label(row)] for row in range(len(source))}


def grey(source: Source, row: int) -> int:
    """The brightness of an image that has one."""
    return source.open(row).getpixel((0, 0))[0]


def greys(source: Source) -> list[int]:
    return [grey(source, row) for row in range(len(source))]


def counts(splits: Splits) -> tuple[int, int]:
    """How many images train and validate."""
    return len(splits.train), len(splits.val)


def said(splits: Splits, *words: str) -> bool:
    """Whether a note has all these words."""
    return any(all(word in note for word in words) for note in splits.notes)
