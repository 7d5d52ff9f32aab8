"""A look laid over its image: heat as colours, regions with borders, masks as light and shade."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from ..visual.canvas import array, blend
from ..visual.colours import BLACK, WHITE, Colour, colour
from .maps.map import Look

# Viridis in steps of a sixteenth: brightness grows with the value, for every kind of colour vision and in print.
ANCHORS = (
    *("#440154", "#48186a", "#472d7b", "#424086", "#3b528b", "#33638d", "#2c728e", "#26828e", "#21918c"),
    *("#1fa088", "#28ae80", "#3fbc73", "#5ec962", "#84d44b", "#addc30", "#d8e219", "#fde725"),
)
HEAT, TINT, MEANS, SHADE = 0.6, 0.5, 0.75, 0.72  # how much of the image gives way in each form
DISTINCT = 12  # regions up to this number have colours of their own; more have the mean colour of their pixels
FLAT = 1e-3  # a map that varies by less than this share of its values is one colour: noise must not look like a map


def overlay(image: Image.Image, look: Look, alpha: float | None = None) -> Image.Image:
    """The look over its image, RGB of the image's size; `alpha`, 0 to 1, of the image gives way to it.

    Heat goes from the map's own smallest value (dark blue, nan too) to its largest (yellow). Regions have borders, and
    if they are few colours of their own; a negative label is none. Places outside of a mask are dark. The look's mark
    has a cross, and what the place there cannot attend to, which is exactly 0, is dark grey.
    """
    if alpha is not None and not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}; expected 0 (the image alone) to 1 (the map alone)")
    if look.values.ndim != 2 or not look.values.numel():
        raise ValueError(f"values of a look have shape {tuple(look.values.shape)}; expected (h, w)")
    forms = {"heat": _heat, "labels": _regions, "mask": _shade}
    if look.form not in forms:
        raise ValueError(f"form {look.form!r} of a look is not known; expected heat, labels or mask")
    pixels = np.asarray(image.convert("RGB"))
    drawn = forms[look.form](pixels, _attended(look), alpha)
    if look.mark is None:
        return Image.fromarray(drawn)
    hidden = nearest(look.values == 0, pixels.shape[:2])
    drawn = Image.fromarray(np.where(hidden[..., None], _darkened(pixels), drawn))
    _cross(drawn, look.mark)
    return drawn


def _attended(look: Look) -> Tensor:
    """The values, nan where a marked place cannot look: these are not part of the scale."""
    return look.values if look.mark is None else look.values.masked_fill(look.values == 0, float("nan"))


def scaled(values: Tensor) -> Tensor:
    """(h, w) -> the same from 0 to 1. A flat map is 0.5 everywhere, or 0 if it is zero."""
    values = values.detach().cpu().double()
    finite = values.isfinite()
    if not finite.any():
        return torch.zeros_like(values)
    low, high = values[finite].min(), values[finite].max()
    values = values.nan_to_num(float(low), float(high), float(low))
    if high - low <= FLAT * max(abs(low), abs(high)):
        return torch.full_like(values, 0.5 if high > 0 else 0.0)
    return (values - low) / (high - low)


def is_flat(look: Look) -> bool:
    """Whether it is a heat map that is the same everywhere."""
    return look.form == "heat" and len(scaled(_attended(look)).unique()) == 1


def colours_of(shades: np.ndarray) -> np.ndarray:
    """Numbers (…) from 0 to 1 -> colours (…, 3) from 0 to 255, not rounded."""
    anchors = np.array([[int(text[at : at + 2], 16) for at in (1, 3, 5)] for text in ANCHORS], np.float64)
    steps = np.linspace(0, 1, len(anchors))
    return np.stack([np.interp(shades, steps, anchors[:, channel]) for channel in range(3)], axis=-1)


def colour_bar(width: int, height: int) -> Image.Image:
    """The colours of heat from the smallest value to the largest, left to right."""
    strip = np.rint(colours_of(np.linspace(0, 1, width))).astype(np.uint8)
    return Image.fromarray(np.tile(strip, (height, 1, 1)))


def nearest(values: Tensor, size: Sequence[int]) -> np.ndarray:
    """(h, w) -> (H, W): every pixel has the value of its place."""
    found = array(values)
    rows, columns = ((np.arange(new) * 2 + 1) * old // (2 * new) for new, old in zip(size, found.shape, strict=True))
    return found[rows[:, None], columns]


def _heat(pixels: np.ndarray, values: Tensor, alpha: float | None) -> np.ndarray:
    (height, width), shades, alpha = pixels.shape[:2], scaled(values), HEAT if alpha is None else alpha
    smaller = height < shades.shape[0] or width < shades.shape[1]
    whole = F.interpolate(shades[None, None], (height, width), mode="bilinear", antialias=smaller)[0, 0]
    # On grey, or the image's own colours would be taken for values
    return blend(_grey(pixels, alpha), colours_of(whole.clamp(0, 1).numpy()), alpha)


def _regions(pixels: np.ndarray, values: Tensor, alpha: float | None) -> np.ndarray:
    labels = nearest(values, pixels.shape[:2])
    numbers, regions = np.unique(labels, return_inverse=True)
    regions = regions.reshape(labels.shape)
    if (numbers >= 0).sum() <= DISTINCT:
        fill = np.array([colour(max(int(number), 0)) for number in numbers], np.float64)
        drawn = blend(_grey(pixels, 0.5), fill[regions], TINT if alpha is None else alpha)
    else:
        places, count = regions.ravel(), np.bincount(regions.ravel(), minlength=len(numbers))
        sums = [np.bincount(places, channel, len(numbers)) for channel in pixels.reshape(-1, 3).T]
        fill = np.stack(sums, axis=1) / count[:, None]
        drawn = blend(pixels, fill[regions], MEANS if alpha is None else alpha)
    drawn[labels < 0] = _darkened(pixels)[labels < 0]
    return _outlined(drawn, labels, WHITE, 0.85)


def _shade(pixels: np.ndarray, values: Tensor, alpha: float | None) -> np.ndarray:
    mask, alpha = nearest(values, pixels.shape[:2]).astype(bool), SHADE if alpha is None else alpha
    shaded = blend(_grey(pixels, alpha), BLACK, alpha)
    return _outlined(np.where(mask[..., None], pixels, shaded), mask, colour(1), 1.0)


def _grey(pixels: np.ndarray, share: float) -> np.ndarray:
    """The image with that share of its colours taken away."""
    luminance = pixels @ np.array([0.299, 0.587, 0.114])
    return blend(pixels, luminance[..., None].repeat(3, -1), share)


def _darkened(pixels: np.ndarray) -> np.ndarray:
    return blend(_grey(pixels, 1.0), BLACK, SHADE)


def _cross(image: Image.Image, mark: tuple[float, float]) -> None:
    """A cross in white on black, so that it is seen on every colour."""
    x, y = (int(share * side) for share, side in zip(mark, image.size, strict=True))
    pen, arm = ImageDraw.Draw(image), max(3, min(image.size) // 32)
    thin = 1 + 2 * (arm // 12)
    for ink, width, more in ((BLACK, thin + 2, 1), (WHITE, thin, 0)):
        for across, down in ((arm + more, 0), (0, arm + more)):
            pen.line((x - across, y - down, x + across, y + down), fill=ink, width=width)


def _outlined(pixels: np.ndarray, regions: np.ndarray, line: Colour, opacity: float) -> np.ndarray:
    """Lines where a region meets another; none at the image's edge. As thin as can be seen."""
    border = np.zeros(regions.shape, bool)
    across, down = regions[:, 1:] != regions[:, :-1], regions[1:] != regions[:-1]
    border[:, 1:] |= across
    border[1:] |= down
    if min(regions.shape) >= 400:  # two pixels, one on either side
        border[:, :-1] |= across
        border[:-1] |= down
    drawn = pixels.copy()
    drawn[border] = blend(pixels[border], line, opacity)
    return drawn
