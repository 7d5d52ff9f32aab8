"""An image with a caption, for pages and galleries."""

from dataclasses import dataclass

from PIL import Image


@dataclass(frozen=True)
class CaptionedImage:
    """An image to show, of any size and mode.

    Args:
        caption: Shown below the image; its first line is emphasised.
        alt: Description of the image for screen readers.
    """

    image: Image.Image
    caption: str
    alt: str
