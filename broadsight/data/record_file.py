"""Images of one size in one file that many processes read and fill at once, and that survives their crashes."""

import contextlib
import io
import os
import warnings
import zlib
from pathlib import Path

import numpy as np

from ..files import whole_file


class RecordFile:
    """`count` uint8 arrays of one shape, each with its checksum: a structured .npy that np.load can map.

    A record without the right checksum does not count, so that neither a process that dies halfway, nor two that write
    the same one, nor a damaged disk gives a wrong image. Nothing stays open between calls, for pickling and forks, nor
    mapped: a full disk is then an error to be caught, not a deadly signal.
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
        whole = len(record) == self.record and record[:4] == checksum(record[4:])
        return np.frombuffer(record[4:], np.uint8).reshape(self.shape) if whole else None

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
        """Whether there is a file, or can be: a missing one is made, one of another size or kind replaced."""
        if self.state == "unknown":
            self.state, size = "usable", len(self.header) + self.count * self.record
            try:
                with contextlib.suppress(FileNotFoundError), self.path.open("rb", buffering=0) as file:
                    if os.fstat(file.fileno()).st_size == size and file.read(len(self.header)) == self.header:
                        return True
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(self.path) as unfinished, unfinished.open("wb") as file:  # of two, the later one wins
                    file.write(self.header)
                    file.truncate(size)  # full of holes: takes no room yet
            except OSError as error:
                self.give_up(error)
        return self.state == "usable"

    def give_up(self, error: OSError) -> None:
        self.state = "unusable"
        warnings.warn(f"images are not kept: {error}", RuntimeWarning, stacklevel=2)


def checksum(data: bytes) -> bytes:
    """Four bytes that are never zero, as an unwritten record's are."""
    return (zlib.crc32(data) or 1).to_bytes(4, "little")
