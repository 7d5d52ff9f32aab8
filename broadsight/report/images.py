"""Images inside the page: shrunk, encoded, laid out in a grid with their captions."""

import base64
import io
from collections.abc import Sequence

from PIL import Image

from ..visual.captioned import CaptionedImage
from ..visual.words import escape

SIDE = 224  # pixels of the longer side at most
LARGE = 960  # pixels of images that show what was found in them
TINY = 64  # up to here an image is kept exactly, and enlarged with its pixels visible


def data_uri(image: Image.Image) -> str:
    """An RGB image as text that a browser shows: exact if it is tiny, as a JPEG otherwise."""
    tiny = max(image.size) <= TINY
    file = io.BytesIO()
    if tiny:
        image.save(file, "PNG", optimize=True)
    else:
        image.save(file, "JPEG", quality=82, optimize=True)
    return f"data:image/{'png' if tiny else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def shrunk(image: Image.Image, side: int = SIDE) -> Image.Image:
    """At most `side` pixels wide and high, in RGB; what is transparent becomes white."""
    if image.mode.startswith("I;16") or image.mode in "IF":
        low, high = (float(value) for value in image.getextrema())  # ty: ignore[invalid-argument-type]
        scale = 255 / (high - low) if high > low else 0
        image = image.convert("F").point(lambda value: value * scale - low * scale).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    image = image.convert("RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image


def gallery(images: Sequence[CaptionedImage], side: int = SIDE) -> str:
    """All images in a grid, or nothing; a side beyond the usual makes a wide grid of large ones."""
    if not images:
        return ""
    kind = "gallery" if side <= SIDE else "gallery wide"
    return f'<div class="{kind}">\n{"".join(_shown(image, side) for image in images)}</div>\n'


def _shown(photo: CaptionedImage, side: int) -> str:
    image = shrunk(photo.image, side)
    width, height = image.size
    kind = ' class="tiny"' if max(image.size) <= TINY else ""
    first, *others = photo.caption.splitlines() or [""]
    lines = (f"<strong>{escape(first)}</strong>" if others else escape(first), *map(escape, others))
    return (
        f'<figure><img{kind} src="{data_uri(image)}" alt="{escape(photo.alt)}" width="{width}" height="{height}">'
        f"<figcaption>{'<br>'.join(lines)}</figcaption></figure>\n"
    )
