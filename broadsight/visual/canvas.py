"""What all drawing on images shares: enlarging small images, line widths, blending."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from .colours import Colour


class CaptionedImage(NamedTuple):
    """An image of any size and mode to show on a page or in a gallery."""

    image: Image.Image
    caption: str  # shown below the image; its first line is emphasised
    alt: str  # description of the image for screen readers


def enlarged(image: Image.Image) -> tuple[Image.Image, int]:
    """A copy in RGB, and the factor that it is enlarged by, to about 512 pixels if it has less than 256."""
    image, longer = image.convert("RGB"), max(image.size)
    factor = 1 if longer >= 256 else round(512 / longer)
    if factor == 1:
        return image.copy(), 1
    return image.resize((image.width * factor, image.height * factor), resampling(longer)), factor


def resampling(longer: int) -> Image.Resampling:
    """Up to 64 pixels an image is enlarged with visible pixels."""
    return Image.Resampling.NEAREST if longer <= 64 else Image.Resampling.BICUBIC


def line_width(canvas: Image.Image) -> int:
    return max(2, round((canvas.width * canvas.height) ** 0.5 / 250))


def blend(pixels: np.ndarray, over: np.ndarray | Colour, opacity: float) -> np.ndarray:
    return np.rint((1 - opacity) * pixels.astype(np.float32) + opacity * np.asarray(over, np.float32)).astype(np.uint8)


def array(values: Any) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    return np.asarray(values)


def by(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))


def class_name(class_names: Sequence[str], index: int) -> str:
    return str(class_names[index]) if index < len(class_names) else f"class {index}"
