"""Looks over images: colours, regions and shade, checked pixel by pixel."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from broadsight.explanation.maps.map import Look
from broadsight.explanation.overlay import colour_bar, colours_of, is_flat, nearest, overlay, scaled
from broadsight.visual.colours import colour, lab

from ..refusals import refused


def look(values, form="heat"):
    return Look("gradcam", "it", "layer", 0, form, torch.as_tensor(values))


def image(height=8, width=12):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def pixels(image):
    return np.asarray(image).astype(int)


def test_colours__are_perceptually_uniform():
    shades = np.linspace(0, 1, 101)
    found = colours_of(shades)
    assert found[0].tolist() == [0x44, 0x01, 0x54] and found[-1].tolist() == [0xFD, 0xE7, 0x25]
    lightness = lab(found)[:, 0]
    assert (np.diff(lightness) > 0).all() and abs(np.diff(lightness) - 0.75).max() < 0.25  # equal steps to the eye
    bar = pixels(colour_bar(50, 3))
    assert bar.shape == (3, 50, 3) and bar[0, 0].tolist() == [68, 1, 84] and bar[2, -1].tolist() == [253, 231, 37]
    matplotlib = pytest.importorskip("matplotlib")
    assert abs(found / 255 - matplotlib.colormaps["viridis"](shades)[:, :3]).max() < 0.02


def test_scaled__from_0_to_1_and_noise_is_no_map():
    nan, inf = float("nan"), float("inf")
    for values, expected in (
        ([[1.0, 3], [2, 5]], [[0, 0.5], [0.25, 1]]),
        ([[1.0, nan], [inf, 5]], [[0, 0], [1, 1]]),
        (torch.tensor([[2, 4]], dtype=torch.bfloat16), [[0, 1]]),
        ([[nan, nan]], [[0, 0]]),
        ([[0.0, 0], [0, 0]], [[0, 0], [0, 0]]),
        ([[1.0, 1.0001]], [[0.5, 0.5]]),
    ):
        assert scaled(torch.as_tensor(values)).tolist() == expected
    assert is_flat(look([[1.0, 1.0001]])) and is_flat(look([[7.0]])) and not is_flat(look([[1.0, 1.1]]))
    assert not is_flat(look([[3, 3]], "labels"))


def test_heat__is_the_map_alone_or_the_image_alone():
    under = image(2, 4)
    values = torch.tensor([[0.0, 1.0]])
    # halves of places lie on either side of a centre: 0, 1/4, 3/4, 1
    expected = np.rint(colours_of(np.array([[0, 0.25, 0.75, 1]] * 2)))
    assert np.array_equal(pixels(overlay(under, look(values), 1.0)), expected)
    assert np.array_equal(pixels(overlay(under, look(values), 0.0)), pixels(under))
    assert overlay(under, look(values)).size == (4, 2)


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (224, 224)])
@pytest.mark.parametrize("values", [[[0.0]], [[float("nan")]], torch.rand(7, 7), torch.rand(300, 2)])
def test_heat__any_size(size, values):
    for under in (image(*size), image(*size).convert("L")):
        found = overlay(under, look(values))
        assert found.size == size[::-1] and found.mode == "RGB"


def test_labels__few_have_colours_of_their_own():
    assert nearest(torch.tensor([[1, 2], [3, 4]]), (4, 3)).tolist() == [[1, 2, 2], [1, 2, 2], [3, 4, 4], [3, 4, 4]]
    assert nearest(torch.tensor([[1, 2, 3, 4]]), (1, 2)).tolist() == [[2, 4]]
    found = pixels(overlay(image(8, 12), look([[0, 1], [0, 2]], "labels"), 1.0))
    assert found[0, 0].tolist() == list(colour(0)) and found[0, 11].tolist() == list(colour(1))
    assert found[7, 11].tolist() == list(colour(2))
    border = (found[..., None, :] == np.array([colour(n) for n in range(3)])).all(-1).any(-1)
    expected = np.ones((8, 12), bool)
    expected[:, 6] = False  # the first column of the right half
    expected[4, 6:] = False  # the first row of the lower quarter
    assert np.array_equal(border, expected)


def test_labels__many_have_the_mean_of_their_pixels_and_what_is_not_in_a_mask_lies_in_the_shade():
    under, values = image(8, 64), torch.arange(16)[None]
    found = pixels(overlay(under, look(values, "labels"), 1.0))
    for number in range(16):
        inside = slice(4 * number + 1, 4 * number + 4)  # without the border
        mean = pixels(under)[:, 4 * number : 4 * number + 4].reshape(-1, 3).mean(0)
        assert abs(found[:, inside] - mean).max() <= 0.5
    grey = Image.new("RGB", (8, 8), (200, 200, 200))
    found = pixels(overlay(grey, look([[-1, 4]], "labels")))  # a label below zero is no region
    assert found[0, 0].max() < 70 and len(set(found[0, 0].tolist())) == 1
    under = image(8, 12)
    found = pixels(overlay(under, look([[True, False]], "mask")))
    assert np.array_equal(found[:, :6], pixels(under)[:, :6])
    assert (found[:, 6] == colour(1)).all()  # the border
    assert found[:, 7:].mean() < 0.35 * pixels(under)[:, 7:].mean()
    assert np.array_equal(pixels(overlay(under, look([[True]], "mask"))), pixels(under))


def test_mark__is_a_cross_and_what_it_cannot_attend_to_is_dark():
    seen = replace(look([[0.0, 0.4], [0.0, 0.4]]), mark=(0.75, 0.25))
    under = Image.new("RGB", (64, 64), (200, 200, 200))
    found = pixels(overlay(under, seen))
    assert found[16, 48].tolist() == [255] * 3 and found[20, 48].tolist() == [0] * 3 and found.shape == (64, 64, 3)
    assert found[40, :32].max() < 70 and np.ptp(found[40, :32]) == 0
    assert np.array_equal(found[40, 32:], pixels(overlay(under, look([[0.4, 0.4]])))[40, 32:])
    assert is_flat(seen) and not is_flat(replace(seen, mark=None))  # zeros are no part of its scale


def test_refused():
    for size, form, alpha, message in (
        ((2, 2), "heat", 1.5, r"alpha=1.5; expected 0 \(the image alone\) to 1"),
        ((2, 2), "heat", float("nan"), "alpha=nan"),
        ((1, 2, 2), "heat", None, r"values of a look have shape \(1, 2, 2\); expected \(h, w\)"),
        ((0, 2), "heat", None, r"values of a look have shape \(0, 2\)"),
        ((2, 2), "contour", None, "form 'contour' of a look is not known; expected heat, labels or mask"),
    ):
        refused(message, overlay, image(), look(torch.rand(size), form), alpha)
