"""Three common corruptions that are weather: snow, frost and fog, drawn rather than photographed.

Images are (H, W, C) floating-point here, 0 to 1.
"""

import math

import numpy as np
from PIL import Image

from .blur import convolved, scale_of, trail_kernel

DIRECTIONS = 6  # in which frost grows on one image
ICE = np.array([0.86, 0.94, 1.0])  # white, and a little blue
BETWEEN = 2 / 3  # the standard deviation of noise of 1 when read between its grains, on average over all places
GREY = np.array([0.299, 0.587, 0.114])


def snow(
    x: np.ndarray,
    rng: np.random.Generator,
    level: float,
    spread: float,
    flake: float,
    threshold: float,
    radius: float,
    sigma: float,
    keep: float,
) -> np.ndarray:
    """Flakes that fall, on an image that is bleached to the share 1 - keep.

    Flakes are what exceeds the threshold of a coarse noise (level, spread) and are no smaller than a pixel; each leaves
    a trail within 45 degrees of the vertical. The layer is added twice, the second time upside down.
    """
    height, width, channels = x.shape
    scale = scale_of(x)
    degrees = rng.uniform(-135, -45)
    flake = max(1.0, flake * scale)
    cells = rng.standard_normal((math.ceil(height / flake), math.ceil(width / flake)), np.float32)
    box = 0, 0, width / flake, height / flake
    layer = np.asarray(Image.fromarray(cells).resize((width, height), Image.Resampling.BILINEAR, box))
    layer = level + spread * layer * (BETWEEN / layer.std())
    layer = np.where(layer < threshold, 0, np.minimum(layer, 1))[..., None]
    layer = convolved(layer, trail_kernel(radius * scale, sigma * scale, degrees))
    grey = x @ GREY[:, None] if channels == 3 else x  # H W 1
    return keep * x + (1 - keep) * np.maximum(x, 1.5 * grey + 0.5) + layer + layer[::-1, ::-1]


def frost(x: np.ndarray, rng: np.random.Generator, keep: float, ice: float) -> np.ndarray:
    """A darkened image behind ice. The original lays photographs of frosted panes over it; this ice is drawn."""
    layer = frost_layer(rng, *x.shape[:2])[..., None]  # H W 1
    return keep * x + ice * layer * (ICE if x.shape[2] == 3 else 1)


def fog(x: np.ndarray, rng: np.random.Generator, thickness: float, decay: float) -> np.ndarray:
    """Clouds added, the whole scaled to keep its brightest value. Of noise whose octaves lose by the factor `decay`."""
    height, width, _ = x.shape
    clouds = np.clip(0.5 + filtered_noise(rng, height, width, 1 + math.log2(decay)) / 6, 0, 1)
    return (x + thickness * clouds[..., None]) * (x.max() / (x.max() + thickness))


def frost_layer(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """(H, W), 0 to 1: feathers of ice, bright ridges that grow in a direction of their own at each place and branch at
    60 degrees, dense here and sparse there."""
    turn = rng.uniform(0, math.pi)
    course = 2.5 * filtered_noise(rng, height, width, 2.2)  # which direction leads where, as a phase
    cover = filtered_noise(rng, height, width, 1.8)
    angles = [turn + math.pi * i / DIRECTIONS for i in range(DIRECTIONS)]
    ridges = [np.maximum(1 - np.abs(filtered_noise(rng, height, width, 1.3, angle, 12)), 0) for angle in angles]
    needles, total = np.zeros((height, width)), np.zeros((height, width))
    for i in range(DIRECTIONS):
        lead = (0.5 + 0.5 * np.cos(course - 2 * math.pi * i / DIRECTIONS)) ** 10
        needles += lead * np.maximum(ridges[i], 0.75 * np.maximum(ridges[i - 2], ridges[i - DIRECTIONS + 2]))
        total += lead
    needles /= total
    icy = 1 / (1 + np.exp(-2.5 * cover - 5.5 * (needles - 0.45)))
    return icy * (0.33 + 0.67 * needles**1.5)


def filtered_noise(
    rng: np.random.Generator, height: int, width: int, slope: float, angle: float = 0, stretch: float = 1
) -> np.ndarray:
    """(H, W) noise of mean 0 and variance 1 whose amplitude falls with the frequency, as 1 / frequency ** slope.

    Frequencies are counted per shorter side, so that it looks the same at every size. With `stretch` it is drawn out
    along a direction by that factor. (Fourier synthesis; it takes the place of the original's midpoint displacement.)
    """
    down = np.fft.fftfreq(height)[:, None] * min(height, width)
    right = np.fft.rfftfreq(width) * min(height, width)
    along = down * math.sin(angle) + right * math.cos(angle)
    across = right * math.sin(angle) - down * math.cos(angle)
    frequency = np.hypot(along * stretch, across)
    frequency[0, 0] = np.inf
    noise = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((height, width))) / frequency**slope, (height, width))
    return noise / noise.std()
