"""Whether words stand in an image."""

import numpy as np
from PIL import Image, ImageDraw

from broadsight.visual.lettering import MUTED, PAPER, TEXT, fitting


def has_written(image, text, size=12):
    """Whether an image has the text in letters of that size, exactly, in one of the two inks of legends."""
    pixels = np.asarray(image)
    for ink in (TEXT, MUTED):
        text, font = fitting(text, size, 10_000)
        sample = Image.new("RGB", (int(font.getlength(text)) + 20, 3 * size), PAPER)
        ImageDraw.Draw(sample).text((10, 2 * size), text, fill=ink, font=font, anchor="ls")
        inked = (np.asarray(sample) != PAPER).any(2)
        rows, columns = np.flatnonzero(inked.any(1)), np.flatnonzero(inked.any(0))
        sample = np.asarray(sample)[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        height, width = sample.shape[:2]
        if height > pixels.shape[0] or width > pixels.shape[1]:
            continue
        fits = np.ones((pixels.shape[0] - height + 1, pixels.shape[1] - width + 1), bool)  # by the place of its corner
        rows, columns = fits.shape
        for y, x in np.argwhere((sample != PAPER).any(2))[::3]:  # a part of the ink leaves few places to look at
            fits &= pixels[y : y + rows, x : x + columns, 0] == sample[y, x, 0]
        if any(np.array_equal(pixels[y : y + height, x : x + width], sample) for y, x in np.argwhere(fits)):
            return True
    return False
