"""Colours of classes: stable, told apart, and readable under their text."""

import numpy as np
import pytest

from broadsight.visual.colours import BLACK, WHITE, colour, contrast, ink, lab
from tests.refusals import refused


def luminance(rgb):
    parts = [c / 255 for c in rgb]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_colour__a_thousand_classes_have_a_thousand_colours_beginning_with_those_of_our_plots():
    later = colour(700)
    colours = [colour(i) for i in range(1000)]
    assert len(set(colours)) == 1000 and all(0 <= part <= 255 for c in colours for part in c)
    assert colours[:3] == [(0, 114, 178), (230, 159, 0), (0, 158, 115)] and colours[700] == later
    refused("^class index is -1; expected 0 or more$", colour, -1)


@pytest.mark.parametrize("count, least", [(20, 25), (80, 15), (256, 8)])
def test_colour__first_ones_are_far_apart_to_the_eye(count, least):
    places = lab(np.array([colour(i) for i in range(count)]))
    distances = np.linalg.norm(places[:, None] - places, axis=2)[np.triu_indices(count, 1)]
    assert distances.min() > least


def test_lab_and_ink__known_colours_and_reading_on_the_first_hundred():
    expected = [(53.24, 80.09, 67.20), (32.30, 79.19, -107.86), (100, 0, 0), (0, 0, 0)]
    given = np.array([(255, 0, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)])
    np.testing.assert_allclose(lab(given), expected, atol=0.03)
    for i in range(100):
        ground = colour(i)
        dark, light = sorted((luminance(ink(ground)), luminance(ground)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5
    assert (ink((255, 255, 0)), ink((0, 0, 128))) == (BLACK, WHITE)
    assert contrast(BLACK, WHITE) == pytest.approx(21) == contrast(WHITE, BLACK)
