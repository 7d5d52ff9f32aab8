"""Images: only those that were uploaded here are read, within a quota of the disk; and samples to try."""

import os
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from ..data.decoding import KINDS, UnreadableImage, decode, open_image
from ..data.scenes import CLASSES, draw_scene

MOST_PIXELS = 40_000_000  # 120 MB once it is unpacked
EXPECTED = f"expected at most {MOST_PIXELS / 1e6:.0f} million"
SIDE = 1600  # pixels of the longer side that are kept; no model here looks at more
MOST_MEGABYTES = 20.0
MOST_FILES = 2000
SAMPLE = 288  # pixels of the side of a sample


def read_upload(payload: Any, folder: str | Path, megabytes: float = MOST_MEGABYTES) -> Image.Image:
    """Read an upload, a mapping with the path of a file in `folder`: in RGB, upright, its longer side at most SIDE.

    Its header says how many pixels it has before anything is unpacked. Errors show nothing of what is in the file.
    """
    if payload is None:
        raise ValueError("there is no image yet; drop one, or pick a sample")
    path = payload.get("path") if isinstance(payload, dict) else None
    if not isinstance(path, str) or not is_uploaded(path, folder):
        raise ValueError("this image was not uploaded here; drop the file itself onto the page")
    file = Path(path)
    if not file.is_file():
        raise ValueError("the image is no longer here; drop it again")
    size = file.stat().st_size
    if size > megabytes * 2**20:
        raise ValueError(f"the file has {size / 2**20:.1f} MB; expected at most {megabytes:g} MB")
    try:
        with open_image(file) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ValueError(f"the image has {width:,} x {height:,} pixels; {EXPECTED}")
            photo = decode(image)
    except Image.DecompressionBombError:
        raise ValueError(f"the image is far too large; {EXPECTED}") from None
    except UnreadableImage as error:
        raise ValueError(f"the image cannot be read: {error}") from None
    except (Image.UnidentifiedImageError, OSError, SyntaxError):
        raise ValueError(f"the file is not an image that is known here; expected {KINDS}") from None
    photo.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return photo


def is_uploaded(path: str, folder: str | Path) -> bool:
    """Tell whether a path, all links followed, lies in the folder of uploads."""
    try:
        return Path(path).resolve().is_relative_to(Path(folder).resolve()) and "\0" not in path
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, links in a circle
        return False


class Storage:
    """The folder of uploads with its quota of bytes and files: the oldest make room for new ones.

    Files that are in it already belong to the page itself; they are counted and never removed.
    """

    def __init__(self, folder: str | Path, most_bytes: int, most_files: int = MOST_FILES):
        self.folder, self.most_bytes, self.most_files = Path(folder), most_bytes, most_files
        self.lasting = {path for _, path, _ in self.files()}
        self._lock = threading.Lock()

    def files(self) -> list[tuple[float, str, int]]:
        """Time, path and bytes of all files, the oldest first; links are not followed."""
        found = []
        for path in (os.path.join(place, name) for place, _, names in os.walk(self.folder) for name in names):
            with suppress(OSError):  # removed meanwhile
                status = os.lstat(path)
                found.append((status.st_mtime, path, status.st_size))
        return sorted(found)

    def make_room(self, needed: int = 0, files: int = 1) -> bool:
        """Remove the oldest files until these bytes and files fit in; False if they never will."""
        with self._lock:
            found = self.files()
            bytes_left = self.most_bytes - needed - sum(size for _, _, size in found)
            files_left = self.most_files - files - len(found)
            for _, path, size in found:
                if min(bytes_left, files_left) >= 0:
                    break
                if path not in self.lasting:
                    with suppress(OSError):  # in use, on Windows; then its folder is not empty
                        Path(path).unlink(missing_ok=True)
                        bytes_left, files_left = bytes_left + size, files_left + 1
                        if (parent := Path(path).parent) != self.folder:
                            parent.rmdir()
            return min(bytes_left, files_left) >= 0


@cache
def samples() -> tuple[tuple[str, Image.Image], ...]:
    """Names and images of the samples, from the test part, which training never draws."""
    scenes = [draw_scene(index, size=SAMPLE, split="test") for index in range(len(CLASSES))]  # one of each class
    scenes.sort(key=lambda scene: scene.label)
    return tuple((CLASSES[scene.label], Image.fromarray(scene.image)) for scene in scenes)


def sample(index: object) -> Image.Image:
    """The sample of this number; a ValueError for anything else that is sent."""
    if not isinstance(index, int) or not 0 <= index < len(samples()):
        raise ValueError("there is no such sample; pick one of those shown")
    return samples()[index][1]
