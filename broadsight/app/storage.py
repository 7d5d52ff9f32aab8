"""What uploads and answers may take of the disk, all visitors together: the oldest files make room for new ones."""

import os
import threading
from contextlib import suppress
from pathlib import Path

MOST_FILES = 2000


class Storage:
    """A folder with a quota.

    Args:
        folder: What lies in it already belongs to the page itself, is counted and never removed.
        most_bytes, most_files: Of all files in it.
    """

    def __init__(self, folder: str | Path, most_bytes: int, most_files: int = MOST_FILES):
        self.folder, self.most_bytes, self.most_files = Path(folder), most_bytes, most_files
        self.lasting = {path for path, _, _ in self.files()}
        self._lock = threading.Lock()

    def files(self) -> list[tuple[str, int, float]]:
        """Path, bytes and time of all files, the oldest first; links are not followed."""
        found = []
        for place, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(place, name)
                try:
                    status = os.lstat(path)
                except OSError:  # removed meanwhile
                    continue
                found.append((path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda one: one[2])

    def make_room(self, needed: int = 0, files: int = 1) -> bool:
        """Remove the oldest files until so many bytes fit in; False if they never will."""
        with self._lock:
            found = self.files()
            total, count = sum(size for _, size, _ in found), len(found)
            for path, size, _ in found:
                if total + needed <= self.most_bytes and count + files <= self.most_files:
                    break
                if path not in self.lasting and self._remove(path):
                    total, count = total - size, count - 1
            return total + needed <= self.most_bytes and count + files <= self.most_files

    def _remove(self, path: str) -> bool:
        try:
            os.remove(path)
        except FileNotFoundError:
            return True
        except OSError:  # in use, on Windows
            return False
        parent = Path(path).parent
        if parent != self.folder:
            with suppress(OSError):  # others are in there
                parent.rmdir()
        return True
