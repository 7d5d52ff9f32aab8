"""One image from a file: upright, in RGB or grey, or one error that says why not."""

import contextlib
import io
import logging
import re
import struct
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageFile

from ..files import check_regular

# Formats by PIL's names; of forty more, some start other programs, as EPS does Ghostscript. MPO is JPEG with further
# images behind it; HEIF needs pillow-heif.
ACCEPTED = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "MPO", "HEIF")
KINDS = "JPEG, PNG, WebP, GIF, BMP, TIFF, PPM or AVIF"
MOST_BYTES = 2 * 2**30  # of a file; the largest image that PIL takes has half of that uncompressed
STRIP = 1 << 22  # pixels that are converted at once where that takes several times the memory of the image

# Where PIL keeps what may hold an orientation. TIFF is not among them: PIL turns it upright by itself.
ORIENTED = frozenset(("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"))

# What makes an image of the EXIF orientations from 2 on upright; 1 is upright already.
TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
UPRIGHT = {orientation: Image.Transpose[name] for orientation, name in enumerate(TURNS, 2)}

# Keeps PIL's remarks about damaged notes and large images from the terminal.
SILENCE = logging.NullHandler()
QUIET = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


class UnreadableImage(ValueError):
    """A file without a whole image in it."""


def decode(file: str | Path | BinaryIO | bytes | Image.Image, channels: int = 3) -> Image.Image:
    """An image in mode RGB (channels 3) or L (channels 1), turned upright, all of it in memory.

    Transparent parts become white; of an animation, the first frame is taken. More than 8 bits a channel are scaled,
    not clipped: 65535 becomes 255. Numbers of 32 bits and floating-point ones are scaled from the first of these ranges
    that holds all values of the image: 0 to 1 (floating-point only), 0 to 255 (likewise), 0 to 65535, or else from
    the smallest to the largest of them; not-a-number becomes black. Whatever is wrong is an UnreadableImage of one
    line, also above 2 GB or twice `PIL.Image.MAX_IMAGE_PIXELS` (179 million), or with too little memory left.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels={channels} is neither 1 (grey) nor 3 (RGB)")
    _keep_quiet()
    try:
        if isinstance(file, Image.Image):
            unread = isinstance(file, ImageFile.StubImageFile) or getattr(file, "tile", None)
            if unread and file.format is not None and file.format not in ACCEPTED:  # reading is what starts programs
                raise UnreadableImage(f"of format {file.format}, which is not accepted; convert it to PNG")
            return _decoded(file, channels)
        with open_image(file) as image:
            return _decoded(image, channels)
    except Exception as error:
        raise UnreadableImage(_reason(error, file)) from None


def open_image(file: str | Path | BinaryIO | bytes) -> ImageFile.ImageFile:
    """A file of an ACCEPTED format as PIL opens it, with only its header read, or OSError, ValueError, SyntaxError."""
    _keep_quiet()
    if isinstance(file, str | Path):
        check_regular(file, MOST_BYTES)
    Image.init()
    formats = [name for name in ACCEPTED if name in Image.OPEN]
    return Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=formats)


def _keep_quiet() -> None:
    """Turn off PIL's warnings, and its log unless a handler was set; once, as it is slow and unsafe for threads."""
    logging.getLogger("PIL").addHandler(SILENCE)
    if QUIET not in warnings.filters:
        warnings.filterwarnings("ignore", module=QUIET[3].pattern)


@contextlib.contextmanager
def within_memory() -> Generator[None, None, None]:
    """Turn MemoryError, OverflowError and torch's words for these into UnreadableImage."""
    try:
        yield
    except (MemoryError, OverflowError, struct.error) as error:
        raise UnreadableImage(_too_much(error)) from None
    except RuntimeError as error:  # torch has an error class for accelerators alone
        words = ("can't allocate memory", "out of memory", "Storage size calculation overflowed", "numel overflow")
        if any(word in str(error) for word in words):
            raise UnreadableImage(_too_much(error)) from None
        raise


def _too_much(error: BaseException) -> str:
    kind = "numbers overflow" if isinstance(error, OverflowError | struct.error) else "out of memory"
    return f"{kind} while it is prepared; make the image smaller"


def _decoded(image: Image.Image, channels: int) -> Image.Image:
    image.load()  # before the orientation is asked for: PNG may have it behind the pixels
    if 0 in image.size:
        raise ValueError("no pixels")
    turn = None
    if not ORIENTED.isdisjoint(image.info):
        with contextlib.suppress(SyntaxError, ValueError, TypeError, OSError, LookupError, struct.error):
            # PIL has many words for a damaged note; the pixels are there all the same
            turn = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation))
    mode = "L" if channels == 1 else "RGB"
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _scaled(image).convert(mode)
    elif image.has_transparency_data:
        whole, image = image, Image.new(mode, image.size)
        for top, bottom in _strips(whole):
            strip = whole.crop((0, top, whole.width, bottom)).convert("RGBA")
            image.paste(Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip).convert(mode), (0, top))
    elif image.mode != mode:
        image = image.convert(mode)
    if turn is not None:
        image = image.transpose(turn)
        for key in ORIENTED:  # or the result is turned again
            image.info.pop(key, None)
    return image


def _strips(image: Image.Image) -> Iterator[tuple[int, int]]:
    """First and last row of the strips of an image."""
    rows = max(1, STRIP // max(1, image.width))
    return ((top, min(top + rows, image.height)) for top in range(0, image.height, rows))


def _scaled(image: Image.Image) -> Image.Image:
    stored, places = np.asarray(image), list(_strips(image))  # H W

    def values(top: int, bottom: int) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # some not-a-numbers complain when they are converted
            return np.nan_to_num(np.asarray(stored[top:bottom], np.float64), posinf=0, neginf=0)

    low, high = min(values(*rows).min() for rows in places), max(values(*rows).max() for rows in places)
    usual = (1, 255, 65535) if image.mode == "F" else (65535,)
    white = next((white for white in usual if low >= 0 and high <= white), None)
    least, white = (low, high - low) if white is None else (0.0, white)
    scaled = np.empty(stored.shape, np.uint8)
    for top, bottom in places:
        scaled[top:bottom] = ((values(top, bottom) - least) * 255 / (white or 1) + 0.5).astype(np.uint8)
    found = Image.fromarray(scaled)
    found.info = {key: image.info[key] for key in ORIENTED if key in image.info}
    return found


def _reason(error: Exception, file: str | Path | BinaryIO | bytes | Image.Image) -> str:
    """Why an image cannot be read, in one line and without the address of a file object."""
    if isinstance(error, Image.UnidentifiedImageError):
        empty = Path(file).stat().st_size == 0 if isinstance(file, str | Path) else file == b""
        return "empty file" if empty else f"not an image, or of a kind that is not read here; expected {KINDS}"
    if isinstance(error, MemoryError):
        return _too_much(error)
    if isinstance(error, OverflowError | struct.error):
        return f"damaged ({error})"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels; see PIL.Image.MAX_IMAGE_PIXELS"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return (str(error).splitlines() or [type(error).__name__])[0]
