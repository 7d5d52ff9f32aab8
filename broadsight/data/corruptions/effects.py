"""What the common corruptions do to images (H, W, C), 0 to 1; lengths are scaled from a shorter side of 224 pixels."""

import io
import math

import numpy as np
from numpy.random import Generator
from PIL import Image

from ..decoding import open_image

FINEST = 1 / 3  # what moves single pixels about is not scaled down further, or small images would not notice it
DIRECTIONS = 6  # in which frost grows on one image
ICE = np.array([0.86, 0.94, 1.0])  # white, and a little blue
GREY = np.array([0.299, 0.587, 0.114])


def gaussian_noise(x: np.ndarray, rng: Generator, deviation: float) -> np.ndarray:
    return x + rng.normal(0, deviation, x.shape)


def shot_noise(x: np.ndarray, rng: Generator, photons: float) -> np.ndarray:
    """White is `photons` on average."""
    return rng.poisson(x * photons) / photons


def impulse_noise(x: np.ndarray, rng: Generator, share: float) -> np.ndarray:
    """This share of the values becomes 0 or 1, evenly, in every channel by itself."""
    dice = rng.random(x.shape)
    return np.where(dice < share, dice < share / 2, x)


def brightness(x: np.ndarray, rng: Generator, amount: float) -> np.ndarray:
    """The value of HSV raised; hue and saturation stay."""
    value = x.max(2, keepdims=True)
    raised = np.minimum(value + amount, 1)
    return np.where(value > 0, x * (raised / np.where(value > 0, value, 1)), raised)


def contrast(x: np.ndarray, rng: Generator, share: float) -> np.ndarray:
    """This share of the distance from each channel's mean."""
    mean = x.mean((0, 1), keepdims=True)
    return mean + share * (x - mean)


def elastic_transform(x: np.ndarray, rng: Generator, distance: float, corner: float) -> np.ndarray:
    """Places are displaced, smoothly over 2.4 pixels, by `distance` pixels (one standard deviation) in each direction;
    before that, three points of the image go up to `corner` pixels elsewhere and it is sheared to fit."""
    height, width, _ = x.shape
    third = min(height, width) / 3
    points = np.array([[1.0, 1, 1], [1, -1, 1], [-1, -1, 1]])  # down and right of the centre, in thirds; one
    reach = corner * scale_of(x)
    shear = np.linalg.solve(points, rng.uniform(-reach, reach, (3, 2)))  # (down, right, 1) -> displacement
    down = (np.arange(height)[:, None] - (height - 1) / 2) / third
    right = (np.arange(width) - (width - 1) / 2) / third
    fine = max(scale_of(x), FINEST)
    kernel = gaussian_kernel(2.4 * fine)
    waves = convolved(rng.standard_normal((height, width, 2)), kernel) * (distance * fine / np.sqrt((kernel**2).sum()))
    rows, columns = (waves[..., i] + shear[0, i] * down + shear[1, i] * right + shear[2, i] for i in (0, 1))
    return moved(x, rows, columns)


def pixelate(x: np.ndarray, rng: Generator, share: float) -> np.ndarray:
    """This share of the pixels of each side."""
    image = as_image(x)
    few = image.resize((int(image.width * share), int(image.height * share)), Image.Resampling.BOX)
    return as_array(few.resize(image.size, Image.Resampling.BOX))


def jpeg_compression(x: np.ndarray, rng: Generator, quality: int) -> np.ndarray:
    file = io.BytesIO()
    as_image(x).save(file, "JPEG", quality=quality)
    return as_array(open_image(file.getvalue()))


def scale_of(x: np.ndarray) -> float:
    return min(x.shape[:2]) / 224


def defocus_blur(x: np.ndarray, rng: Generator, radius: float) -> np.ndarray:
    """Every point of light becomes a disc."""
    radius *= scale_of(x)
    count = math.ceil(8 * radius) + 8  # four points or more to a pixel
    axis = (np.arange(count) + 0.5) / count * 2 - 1
    rows, columns = axis[np.array(np.nonzero(axis**2 + axis[:, None] ** 2 <= 1))] * radius
    return convolved(x, point_kernel(rows, columns, np.ones(len(rows))))


def glass_blur(x: np.ndarray, rng: Generator, sigma: float, reach: float, rounds: int) -> np.ndarray:
    """Frosted glass: every pixel shows a place up to `reach` pixels away in each direction, `rounds` times over, the
    image being softened before and after."""
    scale = max(scale_of(x), FINEST)
    soft = gaussian_kernel(sigma * scale)
    rows, columns = rng.uniform(-reach * scale, reach * scale, (rounds, 2, *x.shape[:2])).sum(0)
    return convolved(moved(convolved(x, soft), rows, columns), soft)


def motion_blur(x: np.ndarray, rng: Generator, radius: float, sigma: float) -> np.ndarray:
    """Every point leaves a trail that fades, in one direction within 45 degrees of the horizontal."""
    return convolved(x, trail_kernel(radius * scale_of(x), sigma * scale_of(x), rng.uniform(-45, 45)))


def zoom_blur(x: np.ndarray, rng: Generator, count: int, step: float) -> np.ndarray:
    """The mean of the image and of `count` enlargements about its centre, from 1 in equal steps."""
    image = as_image(x)
    total = x.copy()
    for zoom in 1 + step * np.arange(count):
        left, top = (side * (1 - 1 / zoom) / 2 for side in image.size)
        box = left, top, image.width - left, image.height - top
        total += as_array(image.resize(image.size, Image.Resampling.BILINEAR, box))
    return total / (count + 1)


def point_kernel(rows: np.ndarray, columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted points, in pixels from the centre, as a square kernel of sum 1; four pixels share each point."""
    half = int(max(np.abs(rows).max(), np.abs(columns).max())) + 1
    side = 2 * half + 1
    kernel = np.zeros(side * side)
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
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
    """Every pixel shows the place (H, W) `rows` down and `columns` right of it, between pixels and mirrored beyond."""
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


def snow(
    x: np.ndarray, rng: Generator, level: float, flake: float, least: float, radius: float, sigma: float, keep: float
) -> np.ndarray:
    """Flakes that fall, on an image that is bleached to the share 1 - keep: what exceeds the `least` of a coarse noise
    about `level`, with trails within 45 degrees of the vertical; added twice, the second time upside down."""
    height, width, channels = x.shape
    scale = scale_of(x)
    degrees = rng.uniform(-135, -45)
    flake = max(1.0, flake * scale)
    cells = rng.standard_normal((math.ceil(height / flake), math.ceil(width / flake)), np.float32)
    box = 0, 0, width / flake, height / flake
    layer = np.asarray(Image.fromarray(cells).resize((width, height), Image.Resampling.BILINEAR, box))
    layer = level + 0.3 * layer * (2 / 3 / layer.std())  # of noise of 1 this is left between its grains, on average
    layer = np.where(layer < least, 0, np.minimum(layer, 1))[..., None]
    layer = convolved(layer, trail_kernel(radius * scale, sigma * scale, degrees))
    grey = x @ GREY[:, None] if channels == 3 else x  # H W 1
    return keep * x + (1 - keep) * np.maximum(x, 1.5 * grey + 0.5) + layer + layer[::-1, ::-1]


def frost(x: np.ndarray, rng: Generator, keep: float, ice: float) -> np.ndarray:
    """A darkened image behind ice."""
    return keep * x + ice * frost_layer(rng, *x.shape[:2])[..., None] * (ICE if x.shape[2] == 3 else 1)


def fog(x: np.ndarray, rng: Generator, thickness: float, decay: float) -> np.ndarray:
    """Clouds added, the whole scaled to keep its brightest value. Of noise whose octaves lose by the factor `decay`."""
    height, width, _ = x.shape
    clouds = np.clip(0.5 + filtered_noise(rng, height, width, 1 + math.log2(decay)) / 6, 0, 1)
    return (x + thickness * clouds[..., None]) * (x.max() / (x.max() + thickness))


def frost_layer(rng: Generator, height: int, width: int) -> np.ndarray:
    """(H, W), 0 to 1: feathers of ice, bright ridges that branch at 60 degrees, dense here and sparse there."""
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
    rng: Generator, height: int, width: int, slope: float, angle: float = 0, stretch: float = 1
) -> np.ndarray:
    """(H, W) noise of mean 0 and variance 1 whose amplitude falls with the frequency, as 1 / frequency ** slope, drawn
    out along a direction by `stretch`. Frequencies are per shorter side: it looks the same at every size."""
    down = np.fft.fftfreq(height)[:, None] * min(height, width)
    right = np.fft.rfftfreq(width) * min(height, width)
    along = down * math.sin(angle) + right * math.cos(angle)
    across = right * math.sin(angle) - down * math.cos(angle)
    frequency = np.hypot(along * stretch, across)
    frequency[0, 0] = np.inf
    noise = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((height, width))) / frequency**slope, (height, width))
    return noise / noise.std()
