"""Numbers with units, and sentences."""

import math

import pytest

from broadsight.visual.words import NOTHING, amount, milliseconds, number, percent, plural, sentence


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234567, "1,234,567"),
        (12.0, "12.0"),
        (0.7312, "0.731"),
        (2345.6, "2,346"),
        (0, "0"),
        (0.0, "0"),
        (-1.5, "-1.50"),
        (3.14159e-9, "3.14e-9"),
        (1e30, "1e30"),
        (None, NOTHING),
        (math.nan, NOTHING),
        (math.inf, NOTHING),
        (True, NOTHING),
    ],
)
def test_number(value, shown):
    assert number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(11e6, "11.0 M"), (1.82e9, "1.82 G"), (390e6, "390 M"), (999_999, "1.00 M"), (12, "12"), (2e12, "2.00 T")],
)
def test_amount(value, shown):
    assert amount(value) == shown.replace(" ", "\u00a0")


def test_percent():
    assert percent(81) == "81.0\u00a0%" and percent(math.nan) == NOTHING


def test_sentence():
    assert sentence("cut short ") == "cut short." and sentence("why?") == "why?"


def test_plural():
    assert (plural(1, "class", "classes"), plural(1000, "class", "classes")) == ("1 class", "1,000 classes")
    assert plural(0, "image") == "0 images"


def test_milliseconds__three_digits():
    assert [milliseconds(value) for value in (1.234, 12.34, 123.4)] == ["1.23 ms", "12.3 ms", "123 ms"]
