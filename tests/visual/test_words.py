"""Numbers with units, and sentences."""

import math

import pytest

from broadsight.visual.words import NOTHING, amount, milliseconds, number, percent, plural, sentence

NUMBERS = [(1234567, "1,234,567"), (12.0, "12.0"), (0.7312, "0.731"), (2345.6, "2,346"), (0, "0"), (0.0, "0")]
NUMBERS += [(-1.5, "-1.50"), (3.14159e-9, "3.14e-9"), (1e30, "1e30")]
NUMBERS += [(value, NOTHING) for value in (None, math.nan, math.inf, True)]
AMOUNTS = [(11e6, "11.0 M"), (1.82e9, "1.82 G"), (390e6, "390 M"), (999_999, "1.00 M"), (12, "12"), (2e12, "2.00 T")]
TIMES = [(1.234, "1.23 ms"), (12.34, "12.3 ms"), (123.4, "123 ms")]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        *((number(value), shown) for value, shown in NUMBERS),
        *((amount(value), shown.replace(" ", "\u00a0")) for value, shown in AMOUNTS),
        *((milliseconds(value), shown) for value, shown in TIMES),
        (percent(81), "81.0\u00a0%"),
        (percent(math.nan), NOTHING),
        (sentence("cut short "), "cut short."),
        (sentence("why?"), "why?"),
        (plural(1, "class", "classes"), "1 class"),
        (plural(1000, "class", "classes"), "1,000 classes"),
        (plural(0, "image"), "0 images"),
    ],
)
def test_words(shown, expected):
    assert shown == expected
