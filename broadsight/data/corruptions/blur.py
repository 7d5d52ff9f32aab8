"""Four common corruptions that blur, and the two tools behind them: one kernel for all pixels, one source for each.

Images are (H, W, C) floating-point here, 0 to 1. Lengths are given in pixels of an image whose shorter side has 224
and are scaled to the image at hand.
"""

import math

import numpy as np
from PIL import Image

REFERENCE = 224  # pixels of the shorter side, for which all lengths are given
FINEST = 1 / 3  # what moves single pixels about is not scaled down further, or small images would not notice it


def scale_of(x: np.ndarray) -> float:
    return min(x.shape[:2]) / REFERENCE


def defocus_blur(x: np.ndarray, rng: np.random.Generator, radius: float) -> np.ndarray:
    """Every point of light becomes a disc."""
    radius *= scale_of(x)
    count = math.ceil(8 * radius) + 8  # four points or more to a pixel
    axis = (np.arange(count) + 0.5) / count * 2 - 1
    rows, columns = axis[np.array(np.nonzero(axis**2 + axis[:, None] ** 2 <= 1))] * radius
    return convolved(x, point_kernel(rows, columns, np.ones(len(rows))))


def glass_blur(x: np.ndarray, rng: np.random.Generator, sigma: float, reach: float, rounds: int) -> np.ndarray:
    """Frosted glass: every pixel shows a random place nearby, the image being softened before and after.

    The places are independent of one another: up to `reach` pixels away in each direction, `rounds` times over. The
    original swaps pixels one after the other, which takes a loop over all of them.
    """
    scale = max(scale_of(x), FINEST)
    soft = gaussian_kernel(sigma * scale)
    rows, columns = rng.uniform(-reach * scale, reach * scale, (rounds, 2, *x.shape[:2])).sum(0)
    return convolved(moved(convolved(x, soft), rows, columns), soft)


def motion_blur(x: np.ndarray, rng: np.random.Generator, radius: float, sigma: float) -> np.ndarray:
    """Every point leaves a trail that fades, in one direction within 45 degrees of the horizontal."""
    return convolved(x, trail_kernel(radius * scale_of(x), sigma * scale_of(x), rng.uniform(-45, 45)))


def zoom_blur(x: np.ndarray, rng: np.random.Generator, count: int, step: float) -> np.ndarray:
    """The mean of the image and of `count` enlargements about its centre, from 1 in equal steps."""
    image = as_image(x)
    total = x.copy()
    for zoom in 1 + step * np.arange(count):
        left, top = (side * (1 - 1 / zoom) / 2 for side in image.size)
        box = left, top, image.width - left, image.height - top
        total += as_array(image.resize(image.size, Image.Resampling.BILINEAR, box))
    return total / (count + 1)


def point_kernel(rows: np.ndarray, columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted points, in pixels from the centre, as a square kernel of sum 1; each is shared by the four pixels about
    it, so that lengths below a pixel still count."""
    half = int(max(np.abs(rows).max(), np.abs(columns).max())) + 1
    side = 2 * half + 1
    kernel = np.zeros(side * side)
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    for down in (0, 1):
        for right in (0, 1):
            share = weights * np.abs(1 - down - (rows - top)) * np.abs(1 - right - (columns - left))
            kernel += np.bincount((top + down + half) * side + left + right + half, share, side * side)
    return kernel.reshape(side, side) / kernel.sum()


def gaussian_kernel(sigma: float) -> np.ndarray:
    reach = math.ceil(4 * sigma)
    line = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    kernel = line * line[:, None]
    return kernel / kernel.sum()


def trail_kernel(radius: float, sigma: float, degrees: float) -> np.ndarray:
    """From the centre on, half a Gaussian of 2 * radius pixels."""
    way = np.linspace(0, 2 * radius, math.ceil(8 * radius) + 2)  # four points or more to a pixel
    angle = math.radians(degrees)
    return point_kernel(way * math.sin(angle), way * math.cos(angle), np.exp(-0.5 * (way / sigma) ** 2))


def convolved(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """(H, W, C) with a square kernel of odd side; beyond its border the image is mirrored."""
    height, width, _ = x.shape
    half = len(kernel) // 2
    x = np.pad(x, ((half, half), (half, half), (0, 0)), "symmetric")
    size = [side + -side % 16 for side in x.shape[:2]]  # large prime factors take long
    spectrum = np.fft.rfft2(x, size, axes=(0, 1)) * np.fft.rfft2(kernel, size)[..., None]
    x = np.fft.irfft2(spectrum, size, axes=(0, 1))
    return x[2 * half : 2 * half + height, 2 * half : 2 * half + width]  # the kernel's centre is at (half, half)


def moved(x: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Every pixel shows the place that lies (H, W) `rows` down and `columns` right of it, read between pixels; beyond
    its border the image is mirrored."""
    height, width, channels = x.shape
    top, down = _between(np.arange(height)[:, None] + rows, height)
    left, right = _between(np.arange(width) + columns, width)
    pixels = x.reshape(-1, channels)
    corner = top * width + left
    upper = pixels.take(corner, 0) * (1 - right) + pixels.take(corner + 1, 0) * right
    lower = pixels.take(corner + width, 0) * (1 - right) + pixels.take(corner + width + 1, 0) * right
    return upper * (1 - down) + lower * down


def _between(places: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The pixel before each place, at most the last but one, and the way from there with a channel's axis added."""
    places = np.abs((places + count - 1) % (2 * (count - 1)) - (count - 1))
    before = np.minimum(places.astype(int), count - 2)
    return before, (places - before)[..., None]


def as_image(x: np.ndarray) -> Image.Image:
    """(H, W, C), 0 to 1 -> an image of mode RGB or L."""
    return Image.fromarray(as_bytes(x).squeeze(2) if x.shape[2] == 1 else as_bytes(x))


def as_array(image: Image.Image) -> np.ndarray:
    """An image of mode RGB or L -> (H, W, C), 0 to 1."""
    return np.asarray(image).reshape(image.height, image.width, -1) / 255


def as_bytes(x: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(x, 0, 1) * 255).astype(np.uint8)
