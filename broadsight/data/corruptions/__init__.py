"""The fifteen common corruptions of ImageNet-C, seeded, for images of any size."""

from typing import Any

import numpy as np

from ...errors import unknown
from ..seeds import mixed
from . import effects

SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 8  # pixels of a side

# The settings of each function in `effects` at the five severities: those published for ImageNet-C but for the
# departures that `corrupt` lists.
TABLE: dict[str, tuple[tuple[Any, ...], ...]] = {
    "gaussian_noise": ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,)),
    "shot_noise": ((60,), (25,), (12,), (5,), (3,)),
    "impulse_noise": ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,)),
    "defocus_blur": ((3,), (4,), (6,), (8,), (10,)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": ((11, 0.01), (16, 0.01), (11, 0.02), (13, 0.02), (11, 0.03)),
    "snow": (
        (0.1, 3, 0.5, 10, 4, 0.8),
        (0.2, 2, 0.5, 12, 4, 0.7),
        (0.55, 4, 0.85, 12, 8, 0.7),
        (0.55, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.72), (0.6, 0.75)),
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.75, 1.5), (3, 1.4)),
    "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
    "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
    "elastic_transform": ((0.3, 2.4), (0.55, 3.6), (0.8, 4.9), (1.1, 4.9), (1.9, 4.9)),
    "pixelate": ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,)),
    "jpeg_compression": ((25,), (18,), (15,), (10,), (7,)),
}
CORRUPTIONS = tuple(TABLE)
GROUPS = {"noise": CORRUPTIONS[:3], "blur": CORRUPTIONS[3:7], "weather": CORRUPTIONS[7:11], "digital": CORRUPTIONS[11:]}


def corrupt(image: np.ndarray, name: str, severity: int = 3, *, seed: int = 0) -> np.ndarray:
    """Corrupt an image (H, W, C) of uint8; C is 3 (RGB) or 1 (grey), H and W from 8.

    The corruptions are those of Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions
    and Perturbations" (ICLR 2019), written after their description, with their settings. Differences:

    - Lengths (blurs, trails, flakes, displacements) are theirs for a shorter side of 224 pixels and scale with it, so
      that small images suffer alike. Snowflakes are never below a pixel, and what glass_blur and elastic_transform
      move pixel by pixel is scaled down to a third and no further. Noise, pixelate and jpeg_compression know no scale.
    - frost is a drawn texture of ice needles in place of their photographs, which we do not have.
    - fog is Fourier noise with the decay of their plasma fractal in place of midpoint displacement.
    - Every severity changes more than the one before, on average over images. With their settings it need not, so
      the ice of frost 4 is 0.72 (theirs 0.7), the thickness of fog 4 is 2.75 (2.5), the threshold of snow 3 is 0.85
      (0.9), and elastic_transform at 1 and 2 leads up to 3, where theirs shears the image by far more than at 3 to 5.
    - glass_blur moves all pixels at once, where theirs goes from one to the next.
    - Numbers are rounded, not cut off, when they become bytes again.

    So results compare with each other, not with those published for the downloaded ImageNet-C.

    Args:
        name: One of CORRUPTIONS.
        severity: 1 to 5.
        seed: The result depends on the arguments only. Give every image a seed of its own, as
            `broadsight.data.seeds.mixed(seed, index)`. The severities of one seed share what is drawn: the
            direction of motion, the clouds, the needles of ice.
    """
    if name not in TABLE:
        raise unknown("corruption", name, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise ValueError(f"severity={severity!r} is not in 1..5; choose 1 (mild) to 5 (severe)")
    _check(image)
    rng = np.random.default_rng(mixed(int(seed), CORRUPTIONS.index(name)))
    return effects.as_bytes(getattr(effects, name)(image / 255, rng, *TABLE[name][int(severity) - 1]))


def _check(image: np.ndarray) -> None:
    expected = f"uint8 (H, W, 3) or (H, W, 1), H and W from {SMALLEST}"
    if not isinstance(image, np.ndarray):
        raise ValueError(f"image is a {type(image).__name__}, not an array of {expected}; for PIL: np.asarray(image)")
    what = f"image is {image.dtype} {image.shape}, not {expected}"
    if image.dtype != np.uint8:
        raise ValueError(f"{what}; values from 0 to 1 become bytes by (image * 255).round().astype(np.uint8)")
    if image.ndim == 2:
        raise ValueError(f"{what}; pass image[..., None]")
    if image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(f"{what}; one image at a time, channels last, without transparency")
    if min(image.shape[:2]) < SMALLEST:
        raise ValueError(f"{what}; enlarge it first")
