"""Resizing for a centre crop without large intermediate images.

An image of 1 x 8,000 pixels, resized to a shorter side of 256, has two million on the longer one: 2 GB, of which a
square of 224 pixels is kept. Such images are cropped before they are resized.
"""

from typing import Any

from PIL import Image
from torchvision.transforms.functional import pil_modes_mapping

MOST_PIXELS = 1 << 24  # of a resized image: 64 MB. At 256 pixels that is a longer side of 256 times the shorter one.
MOST_CROPS = 16  # times the pixels that are kept of it, for models of large images


class BoundedResize:
    """Resizes the shorter side before a centre crop.

    Where the result would have too many pixels, the crop alone is computed, from the same pixels and by the same
    filter: a few values differ by one of 255 levels.

    Args:
        resize: torchvision's `Resize` of the shorter side.
        crop: Side of the centre crop in pixels.
    """

    def __init__(self, resize: Any, crop: int):
        self.resize, self.crop = resize, crop
        self.side = resize.size if isinstance(resize.size, int) else resize.size[0]
        self.filter = pil_modes_mapping[resize.interpolation]

    def __call__(self, image: Image.Image) -> Image.Image:
        short, long = sorted(image.size)
        longer = int(self.side * long / short)  # as torchvision rounds
        if self.side * longer <= max(MOST_PIXELS, MOST_CROPS * self.crop**2):
            return self.resize(image)
        size = (self.side, longer) if image.width <= image.height else (longer, self.side)
        (width, left, right), (height, top, bottom) = (
            self._middle(whole, after) for whole, after in zip(image.size, size, strict=True)
        )
        return image.resize((width, height), Image.Resampling(self.filter), (left, top, right, bottom))

    def _middle(self, whole: int, after: int) -> tuple[int, float, float]:
        """Of a side resized to `after`: the pixels that are kept, and from where to where they come."""
        kept = min(after, self.crop)
        start = round((after - kept) / 2.0)  # as torchvision's CenterCrop
        return kept, start * whole / after, min((start + kept) * whole / after, float(whole))
