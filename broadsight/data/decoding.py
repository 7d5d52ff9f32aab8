"""One picture from a file: upright, in RGB or grey, or one error that says why not."""

import contextlib
import io
import re
import struct
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image

# Where PIL keeps what may hold an orientation. TIFF is not among them: PIL turns it upright by itself.
ORIENTED = frozenset(("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"))

# The eight orientations of EXIF and what makes each upright; 1 is upright already.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Keeps PIL's remarks about damaged notes and large pictures from the terminal.
QUIET = ("ignore", None, Warning, re.compile(r"PIL\."), 0)

# The usual ranges of numbers that are no bytes; a picture is taken to have the first that holds all its values.
WHITE = (1, 255, 65535)


class UnreadableImage(ValueError):
    """A file that holds no picture, or not the whole of it."""


def decode(file: str | Path | BinaryIO | bytes | Image.Image, channels: int = 3) -> Image.Image:
    """A picture in mode RGB (channels 3) or L (channels 1), turned upright, all of it in memory.

    Transparent parts become white. Of an animation, the first frame. More than 8 bits a channel are scaled, not
    clipped: 65535 becomes 255. Numbers of 32 bits and floating-point ones are scaled from the first of these ranges
    that holds all values of the picture: 0 to 1 (floating-point only), 0 to 255 (likewise), 0 to 65535, or else from
    the smallest to the largest of them; not-a-number becomes black.

    From the first call on, PIL's warnings are off in this process: to put them off and on again for each picture takes
    6 % of the time for a small one and is not safe among threads.

    Raises:
        UnreadableImage: Whatever the reason, in one line: not there, not a picture, cut short, damaged, too large.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels={channels} is neither 1 (grey) nor 3 (RGB)")
    if QUIET not in warnings.filters:
        warnings.filterwarnings("ignore", module=QUIET[3].pattern)
    try:
        if isinstance(file, Image.Image):
            return _decoded(file, channels)
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            return _decoded(image, channels)
    except MemoryError:
        raise
    except Exception as error:
        raise UnreadableImage(_reason(error, file)) from None


def _decoded(image: Image.Image, channels: int) -> Image.Image:
    image.load()  # before the orientation is asked for: PNG may have it behind the pixels
    turn = None
    if not ORIENTED.isdisjoint(image.info):
        with contextlib.suppress(SyntaxError, ValueError, TypeError, OSError, LookupError, struct.error):
            # PIL has many words for a damaged note; the pixels are there all the same
            turn = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation))
    image = _bytes_of(image, "L" if channels == 1 else "RGB")
    if turn is not None:
        image = image.transpose(turn)
        for key in ORIENTED:  # or whoever looks at the result turns it again
            image.info.pop(key, None)
    return image


def _bytes_of(image: Image.Image, mode: str) -> Image.Image:
    """The same picture in one byte a channel."""
    if image.mode == mode and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _scaled(image).convert(mode)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert(mode)
    return image.convert(mode)


def _scaled(image: Image.Image) -> Image.Image:
    values = np.nan_to_num(np.asarray(image, np.float64), posinf=0, neginf=0)  # H W
    low, high = values.min(), values.max()
    usual = WHITE if image.mode == "F" else WHITE[-1:]
    white = next((white for white in usual if low >= 0 and high <= white), None)
    if white is None:
        values, white = values - low, high - low
    scaled = Image.fromarray((values * 255 / (white or 1) + 0.5).astype(np.uint8))
    scaled.info = {key: image.info[key] for key in ORIENTED if key in image.info}
    return scaled


def _reason(error: Exception, file: str | Path | BinaryIO | bytes | Image.Image) -> str:
    """Why a picture cannot be read, in one line and without the address of a file object."""
    if isinstance(error, Image.UnidentifiedImageError):
        return "empty file" if _is_empty(file) else "not an image, or of a kind that PIL does not read"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels; see PIL.Image.MAX_IMAGE_PIXELS"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_empty(file: str | Path | BinaryIO | bytes | Image.Image) -> bool:
    if isinstance(file, str | Path):
        return Path(file).stat().st_size == 0
    return isinstance(file, bytes) and not file
