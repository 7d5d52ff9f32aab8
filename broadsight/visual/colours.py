"""A colour for every class: always the same for an index, and far from those of the classes before it."""

import colorsys
from functools import cache

import numpy as np

from .plots import PALETTE

Colour = tuple[int, int, int]

BLACK, WHITE = (0, 0, 0), (255, 255, 255)
CHOSEN, CANDIDATES = 256, 2048  # colours that are chosen to differ, and their candidates
SHADES = ((0.85, 0.9), (0.5, 1.0), (0.8, 0.7), (0.45, 0.8), (0.3, 1.0))  # saturation and value
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def colour(index: int) -> Colour:
    """Red, green and blue, 0 to 255, of the class with that index from 0."""
    if index < 0:
        raise ValueError(f"class index is {index}; expected 0 or more")
    return _chosen()[index] if index < CHOSEN else _golden(CANDIDATES + index)


def ink(ground: Colour) -> Colour:
    """Black or white, whichever has more contrast to a colour: at least 4.5."""
    return max(BLACK, WHITE, key=lambda text: contrast(text, ground))


def contrast(one: Colour, other: Colour) -> float:  # as WCAG defines it, 1 to 21
    dark, light = sorted(float(TO_XYZ[1] @ _linear(np.array(rgb))) for rgb in (one, other))
    return (light + 0.05) / (dark + 0.05)


def lab(colours: np.ndarray) -> np.ndarray:
    """RGB (N, 3) of 0 to 255 -> CIE L*a*b* (N, 3), where distance is perceived difference."""
    xyz = _linear(colours) @ TO_XYZ.T / (0.95047, 1.0, 1.08883)  # the white of sRGB, D65
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


@cache
def _chosen() -> tuple[Colour, ...]:
    """The palette of our plots, then repeatedly the candidate that differs most from all chosen ones."""
    candidates = [_golden(i) for i in range(CANDIDATES)]
    chosen: list[Colour] = [(int(c[1:3], 16), int(c[3:5], 16), int(c[5:7], 16)) for c in PALETTE]
    places = lab(np.array(candidates))
    distance = np.linalg.norm(places[:, None] - lab(np.array(chosen)), axis=2).min(1)
    while len(chosen) < CHOSEN:
        best = int(distance.argmax())
        chosen.append(candidates[best])
        distance = np.minimum(distance, np.linalg.norm(places - places[best], axis=1))
    return tuple(chosen)


def _golden(index: int) -> Colour:
    saturation, value = SHADES[index % len(SHADES)]
    value -= 0.03 * (index // CHOSEN % 8)  # else rounding to bytes repeats hues after some hundreds
    hue = index * (5**0.5 - 1) / 2 % 1  # golden steps never repeat, and spread evenly
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def _linear(colours: np.ndarray) -> np.ndarray:
    parts = colours / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
