"""How scenes are painted, at any size: outlines become patches, patches get textures, light and noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np
from PIL import Image, ImageDraw


@dataclass
class Canvas:
    """What is to be painted, from the back to the front: each patch is one or more outlines that share a texture; 0 is
    the ground. Offsets are shares of the shorter side, centres are shares of width and height."""

    outlines: list[tuple[int, np.ndarray, tuple[float, float]]] = field(default_factory=list)  # patch, offsets, centre
    owners: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # object and part of each patch, from 1

    def patch(self, thing: int = 0, part: int = 0) -> int:
        self.owners.append((thing, part))
        return len(self.owners) - 1

    def add(self, patch: int, offsets: np.ndarray, centre: tuple[float, float]) -> None:
        self.outlines.append((patch, offsets, centre))

    def paint(self, height: int, width: int, hidden: Sequence[int] = ()) -> np.ndarray:
        """(H, W) uint8: the patch that is seen at each pixel, as if the `hidden` ones had never been drawn."""
        canvas = Image.new("L", (width, height))
        draw = ImageDraw.Draw(canvas)
        patches, offsets, centres = zip(*self.outlines, strict=True)
        counts = [len(one) for one in offsets]
        points = np.concatenate(offsets) * min(height, width) - 0.5  # a pixel's middle has whole coordinates
        points += np.repeat(np.array(centres) * (width, height), counts, axis=0)
        numbers, start = points.ravel().tolist(), 0
        for patch, count in zip(patches, counts, strict=True):
            if patch not in hidden:
                draw.polygon(numbers[start : start + 2 * count], fill=patch)
            start += 2 * count
        return np.array(canvas)


def contours(patches: np.ndarray) -> np.ndarray:
    """(H, W) bool: the rim of every patch where it lies on an earlier one."""
    rim = np.zeros(patches.shape, bool)
    step = max(1, round(min(patches.shape) / 100))
    for own, seen in ((rim, patches), (rim.T, patches.T)):
        own[step:] |= seen[step:] > seen[:-step]
        own[:-step] |= seen[:-step] > seen[step:]
    return rim


def hue(hues: np.ndarray, saturation: np.ndarray, value: np.ndarray) -> np.ndarray:
    """HSV, (n,) each, hues in turns -> (3, n) colours in 0..1."""
    pure = np.clip(np.abs((hues * 6 + np.array([[0], [4], [2]])) % 6 - 3) - 1, 0, 1)
    return value * (1 - saturation * (1 - pure))


BANK = 4096  # textures to pick from
STRIP = 6000  # pixels that are coloured at a time: more need memory afresh, which costs more than the arithmetic

# How much of each wave a texture takes: one wave, the other, their product, the cloud; then what is added.
TEXTURES = (
    (0.0, 0.0, 0.0, 0.6, 0.0),  # nearly plain
    (0.0, 0.0, 0.0, 2.5, 0.0),  # clouds
    (1.6, 0.0, 0.0, 0.0, 0.0),  # stripes
    (1.2, 1.2, 0.0, 0.0, -0.9),  # dots
    (0.0, 0.0, 2.5, 0.0, 0.0),  # checks
    (1.0, 0.0, 0.0, 1.8, 0.0),  # marble
)


@cache
def textures(vivid: bool) -> np.ndarray:
    """(17, BANK) float32, one in each column: two waves (x, y, phase), four weights and a sum, two colours; mixed once
    and picked from at random ever after, so that neither colour nor pattern says anything about the class."""
    dice = np.random.default_rng(int(vivid)).random((12, BANK))
    angle = dice[0] * 2 * math.pi
    pitch = (4 if vivid else 2) + 9 * dice[1] ** 2
    table = np.empty((17, BANK), np.float32)
    table[0] = table[4] = np.cos(angle) * pitch
    table[1] = np.sin(angle) * pitch
    table[3] = -table[1]
    table[2], table[5] = dice[2], dice[3]
    table[6:11] = np.array(TEXTURES)[(dice[4] * len(TEXTURES)).astype(int)].T
    saturation = (0.3 + 0.6 * dice[5:7]) if vivid else 0.5 * dice[5:7]
    first = hue(dice[7], saturation[0], 0.3 + 0.7 * dice[8])
    second = hue(dice[7] + 0.25 * (dice[9] - 0.5), saturation[1], 0.2 + 0.8 * dice[10])
    table[11:14] = first
    table[14:17] = first + (second - first) * (0.1 + (0.7 if vivid else 0.4) * dice[11])
    return table


@lru_cache(4)
def cloud_bank(short: int, height: int, width: int) -> np.ndarray:
    """(H + 2 * short, W + 2 * short) float32 in about -0.5..0.5: soft spots; each image cuts a piece out."""
    cells = np.random.default_rng(2).random((8 * height // short + 16, 8 * width // short + 16), dtype=np.float32)
    size = width + 2 * short, height + 2 * short
    return np.asarray(Image.fromarray(cells - 0.5).resize(size, Image.Resampling.BICUBIC))


@lru_cache(4)
def noise_bank(height: int, width: int) -> np.ndarray:
    """(3, H + 64, W + 64) float32 in -127.5..127.5."""
    noise = np.random.default_rng(3).integers(0, 256, (3, height + 64, width + 64), dtype=np.uint8)
    return noise.astype(np.float32) - 127.5


def triangle_wave(phase: np.ndarray) -> np.ndarray:
    """-1..1 with period 1. Unlike a sine it comes out the same to the last bit on every machine."""
    phase -= np.rint(phase)
    np.abs(phase, out=phase)
    phase *= 4
    phase -= 1
    return phase


def colour(patches: np.ndarray, rims: np.ndarray, count: int, grounds: int, rng: np.random.Generator) -> np.ndarray:
    """Fill patches (H, W), below `count`, with random textures, dull ones for the first `grounds`, and with light,
    noise and dark `rims` (H, W): (H, W, 3) uint8."""
    height, width = patches.shape
    short = min(height, width)
    chosen = rng.integers(BANK, size=count)
    table = np.concatenate((textures(False)[:, chosen[:grounds]], textures(True)[:, chosen[grounds:]]), 1)
    light = rng.random(7).tolist()
    down, right = int(light[5] * 2 * short), int(light[6] * 2 * short)
    clouds = cloud_bank(short, height, width)[down : down + height, right : right + width]
    down, right = rng.integers(64, size=2).tolist()
    noise = noise_bank(height, width)[:, down : down + height, right : right + width]
    rim, grain = np.float32(0.3 + 0.4 * light[3]), 0.02 + 0.14 * light[4]
    x = (np.arange(width, dtype=np.float32) + 0.5) / short
    y = (np.arange(height, dtype=np.float32)[:, None] + 0.5) / short
    bright = 190 + 90 * light[0] + (120 * light[1] - 60) / x[-1] * x + (120 * light[2] - 60) / y[-1] * y  # H W
    image = np.empty((height, width, 3), np.uint8)
    rows = max(1, STRIP // width)
    for start in range(0, height, rows):
        strip = slice(start, min(start + rows, height))
        at = table.take(patches[strip], 1)  # 17 h W
        one = triangle_wave(at[0] * x + at[1] * y[strip] + at[2])
        two = triangle_wave(at[3] * x + at[4] * y[strip] + at[5])
        mix = at[6] * one + at[7] * two + at[8] * (one * two) + at[9] * clouds[strip] + at[10]
        np.clip(mix + 0.5, 0, 1, out=mix)
        planes = at[11:14] + (at[14:] - at[11:14]) * mix
        planes *= bright[strip] * np.where(rims[strip], rim, np.float32(1))
        planes += noise[:, strip] * grain
        image[strip] = np.clip(planes, 0, 255, out=planes).transpose(1, 2, 0)
    return image
