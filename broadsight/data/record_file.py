"""Images of one size in one file that many processes read and fill at once, and that survives their crashes."""

import io
import os
import warnings
import zlib
from pathlib import Path

import numpy as np

from ..files import whole_file


class RecordFile:
    """`count` uint8 arrays of one shape, each with its checksum: a structured .npy that np.load can map.

    The file is created when first needed; one of another size or kind is replaced. A record without the right checksum
    does not count, so that neither a process that dies halfway, nor two that write the same one, nor a damaged disk
    gives a wrong image. Nothing stays open between calls, for pickling, forks and files that other processes replace.
    Plain reads and writes rather than a memory map: a full disk is then an error to be caught, not a deadly signal.
    """

    def __init__(self, path: Path, count: int, shape: tuple[int, ...]):
        self.path, self.count, self.shape = path, count, shape
        record = np.dtype([("checksum", "<u4"), ("data", "u1", shape)])
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": np.lib.format.dtype_to_descr(record), "fortran_order": False, "shape": (count,)}
        )
        self.header, self.record = header.getvalue(), record.itemsize
        self.state = "unknown"  # of the file: "unknown", "usable", "unusable"

    def __getstate__(self) -> dict:
        return {**self.__dict__, "state": "unknown"}

    def read(self, i: int) -> np.ndarray | None:
        """A copy of record i, or None if it was not written."""
        if not self.usable():
            return None
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(len(self.header) + i * self.record)
                record = file.read(self.record)
        except OSError:
            return None
        data = record[4:]
        whole = len(record) == self.record and record[:4] == checksum(data)
        return np.frombuffer(data, np.uint8).reshape(self.shape) if whole else None

    def write(self, i: int, data: np.ndarray) -> None:
        """Keep an array as record i if possible; a reader sees all of it or nothing."""
        if not self.usable():
            return
        content = np.ascontiguousarray(data, np.uint8).tobytes()
        try:
            with self.path.open("r+b", buffering=0) as file:
                file.seek(len(self.header) + i * self.record)
                file.write(checksum(content) + content)
        except OSError as error:
            self.give_up(error)

    def usable(self) -> bool:
        if self.state == "unknown":
            self.state = "usable"
            try:
                if not self.intact():
                    self.create()
            except OSError as error:
                self.give_up(error)
        return self.state == "usable"

    def intact(self) -> bool:
        try:
            with self.path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                whole = size == len(self.header) + self.count * self.record
                return whole and file.read(len(self.header)) == self.header
        except FileNotFoundError:
            return False

    def create(self) -> None:
        """Put an empty file there; of two processes that do so, the later one wins."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(self.path) as unfinished, unfinished.open("wb") as file:
            file.write(self.header)
            file.truncate(len(self.header) + self.count * self.record)  # full of holes: takes no room yet

    def give_up(self, error: OSError) -> None:
        self.state = "unusable"
        warnings.warn(f"images are not kept: {error}", RuntimeWarning, stacklevel=2)


def checksum(data: bytes) -> bytes:
    """Four bytes that are never zero, as an unwritten record's are."""
    return (zlib.crc32(data) or 1).to_bytes(4, "little")
