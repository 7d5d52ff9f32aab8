"""An image with a caption, for pages and galleries."""

from dataclasses import dataclass

from PIL import Image


@dataclass(frozen=True)
class CaptionedImage:
    """An image to show.

    Args:
        image: Of any size and mode.
        caption: Shown below it; the first of its lines stands out.
        alt: What the image shows, for those who do not see it.
    """

    image: Image.Image
    caption: str
    alt: str
