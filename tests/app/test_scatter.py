"""The plot: points where their figures are, each with its name, shape and words."""

import re

import pytest

from broadsight.app.scatter import SHAPES, Point, marker, plot
from tests.app.test_cards import EVIL, tags


def a_point(**more) -> Point:
    return Point(**dict(name="net", x=4.0, y=50.0, place=0, colour="#0072B2", about={"latency": "4 ms"}) | more)


def places(html: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'style="left:([\d.]+)%;bottom:([\d.]+)%"', html)]


def test_plot__points_at_their_shares_of_the_axes():
    html = plot([a_point(), a_point(x=8.0, y=95.0)], "latency, ms", "accuracy, %")
    across = [float(tick) for tick in re.findall(r'class="bs-x" style="left:[\d.]+%">([\d.]+)<', html)]
    upwards = [float(tick) for tick in re.findall(r'class="bs-y" style="bottom:[\d.]+%">([\d.]+)<', html)]
    assert across[0] == upwards[0] == 0
    assert across[-1] >= 8 and upwards[-1] >= 95
    for (x, y), (left, bottom) in zip([(4, 50), (8, 95)], places(html), strict=True):
        assert (left, bottom) == pytest.approx((100 * x / across[-1], 100 * y / upwards[-1]), abs=0.01)


def test_plot__words_stay_inside():
    html = plot([a_point(x=1.0, y=1.0), a_point(x=10.0, y=10.0)], "x", "y")
    assert re.findall(r'class="bs-point bs-(\w+) bs-(\w+)"', html) == [("right", "above"), ("left", "below")]


def test_plot__nothing_and_zeros():
    assert plot([], "x", "y") == ""
    assert places(plot([a_point(x=0.0, y=0.0)], "x", "y")) == [(0, 0)]


def test_plot__each_point_is_told_and_reached():
    html = plot([a_point()], "x", "y")
    assert 'tabindex="0"' in html and 'aria-label="net; latency 4 ms"' in html


def test_plot__names_are_text():
    evil = a_point(name=EVIL, about={EVIL: EVIL})
    assert tags(plot([evil], EVIL, EVIL)) == tags(plot([a_point()], "x", "y"))


def test_marker__shapes_differ_as_colours_do():
    assert len({marker(place, "#000000") for place in range(len(SHAPES))}) == len(SHAPES) == 6
