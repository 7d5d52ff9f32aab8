"""Images that come from a browser: only what was uploaded here, only images, none too large."""

from pathlib import Path
from typing import Any

from PIL import Image

from ..data.decoding import KINDS, UnreadableImage, decode, open_image

MOST_PIXELS = 40_000_000  # 120 MB once it is unpacked
SIDE = 1600  # pixels of the longer side that are kept; no model here looks at more
MOST_MEGABYTES = 20.0


def read_upload(payload: Any, folder: str | Path, megabytes: float = MOST_MEGABYTES) -> Image.Image:
    """The image in RGB, upright, its longer side at most SIDE pixels.

    Args:
        payload: What the page's image input sends: a mapping with the path of a file in `folder`. Its other entries,
            such as an address, are not looked at.
        folder: Where uploads are put.
        megabytes: The most that a file may have.

    Raises:
        ValueError: In one line, whatever is wrong; it never says what a file elsewhere holds.
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
    return open_upload(file)


def is_uploaded(path: str, folder: str | Path) -> bool:
    """Whether a path, all links followed, lies in the folder of uploads."""
    try:
        return Path(path).resolve().is_relative_to(Path(folder).resolve()) and "\0" not in path
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, links in a circle
        return False


def open_upload(file: Path) -> Image.Image:
    """An image of an accepted format with at most MOST_PIXELS, which its header says before anything is unpacked."""
    try:
        with open_image(file) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ValueError(
                    f"the image has {width:,} x {height:,} pixels; expected at most {MOST_PIXELS / 1e6:.0f} million"
                )
            photo = decode(image)
    except Image.DecompressionBombError:
        raise ValueError(f"the image is far too large; expected at most {MOST_PIXELS / 1e6:.0f} million") from None
    except UnreadableImage as error:
        raise ValueError(f"the image cannot be read: {error}") from None
    except (Image.UnidentifiedImageError, OSError, SyntaxError):
        raise ValueError(f"the file is not an image that is known here; expected {KINDS}") from None
    photo.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return photo
