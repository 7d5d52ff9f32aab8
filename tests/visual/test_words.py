"""Numbers with units, and text that is safe in HTML."""

import math

import pytest

from broadsight.visual.metrics import figure
from broadsight.visual.words import NOTHING, amount, escape, number, percent, plural, sentence


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


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("top1", 34.46, "34.5 %"),
        ("top1", None, NOTHING),
        ("latency_ms", 12.0, "12.0 ms"),
        ("macs", 2.1e8, "210 M"),
        ("loss", 1.9, "1.90 nats"),
        ("unheard_of", 0.5, "0.500"),
        ("unheard_of", "a & b", "a &amp; b"),
    ],
)
def test_figure(key, value, shown):
    assert figure(key, value) == shown.replace(" %", "\u00a0%").replace(" ms", "\u00a0ms").replace(
        " M", "\u00a0M"
    ).replace(" nats", "\u00a0nats")


def test_percent():
    assert percent(81) == "81.0\u00a0%" and percent(math.nan) == NOTHING


def test_escape():
    assert escape('<b>&"x"\'') == "&lt;b&gt;&amp;&quot;x&quot;&#x27;"
    assert escape("tab\tline\r\nend\x00\udcff") == "tab\tline\r\nend\ufffd\ufffd"


def test_sentence():
    assert sentence("cut short ") == "cut short." and sentence("why?") == "why?"


def test_plural():
    assert (plural(1, "class", "classes"), plural(1000, "class", "classes")) == ("1 class", "1,000 classes")
    assert plural(0, "image") == "0 images"
