"""Charts: what lies at the end of an axis is drawn at the edge of the plot, and so on by hand."""

import math
import re

import pytest

from broadsight.report.charts import BOTTOM, LEFT, RIGHT, TOP, Axis, Bar, Chart, Dot, Series, axis, finite, thin

from .reading import draw, of_class, text

X, Y = Axis("epoch", (0.0, 5.0, 10.0)), Axis("loss", (1.0, 2.0, 3.0))


def drawn(**parts):
    return draw(Chart("Loss", X, Y, **parts))


def test_ticks__edges_and_labels():
    assert (X.x(0), X.x(10), X.x(5)) == (LEFT, RIGHT, (LEFT + RIGHT) / 2)
    assert (Y.y(1), Y.y(3), Y.y(2)) == (BOTTOM, TOP, (BOTTOM + TOP) / 2)
    labels = [(text(t), float(t.get("x")), float(t.get("y"))) for t in drawn().iter("text") if t.get("class") is None]
    assert [label for label, _, _ in labels] == ["1", "2", "3", "0", "5", "10"]
    assert [y - 4 for _, _, y in labels[:3]] == [BOTTOM, (BOTTOM + TOP) / 2, TOP]
    assert [x for _, x, _ in labels[3:]] == [LEFT, (LEFT + RIGHT) / 2, RIGHT]
    texts = {(0, 0.5, 1): ["0", "0.5", "1.0"], (0, 5e-5, 1e-4): ["0", "5e-5", "1e-4"]}
    for ticks, shown in (texts | {(0, 20000): ["0", "20,000"], (0, 2e9): ["0", "2e9"]}).items():
        chart = draw(Chart("", X, Axis("", tuple(map(float, ticks)))))
        assert [text(t) for t in chart.iter("text")][: len(shown)] == shown


def test_line_bar_and_dot__from_edge_to_edge():
    chart = drawn(lines=[Series("training", [(0.0, 3.0), (10.0, 1.0)], 0)])
    (path,) = of_class(chart.find(".//g[@class='c0']"), "line")
    assert path.get("d") == f"M{LEFT} {TOP}L{RIGHT} {BOTTOM}"
    ends = [(str(LEFT), str(TOP)), (str(RIGHT), str(BOTTOM))]
    assert [(c.get("cx"), c.get("cy")) for c in chart.iter("circle")] == ends
    assert [text(c) for c in chart.iter("circle")] == ["training: 3.000 (epoch 0)", "training: 1.000 (epoch 10)"]
    assert len(list(drawn(lines=[Series("a", [(5.0, 2.0)], 0, marked=False)]).iter("circle"))) == 1
    line = Series("training", [(0.0, 3.0), (10.0, 1.0)], 0)
    assert Chart("Loss", X, Y, lines=[line]).description == "Loss: loss by epoch; training from 3.00 to 1.00"
    (bar,) = drawn(bars=[Bar(0, 5, 2.0, "half")]).iter("rect")
    half = (BOTTOM - TOP) / 2
    assert (float(bar.get("y")), float(bar.get("height"))) == (TOP + half, half)
    assert float(bar.get("width")) == pytest.approx((RIGHT - LEFT) / 2 - 1.5, abs=0.06)
    assert float(bar.get("x")) == pytest.approx(LEFT + 0.75, abs=0.06) and text(bar) == "half"
    chart = drawn(dots=[Dot(10.0, 3.0, "7", "resnet", True)])
    (dot,) = of_class(chart, "ours")
    assert (dot.find("circle").get("cx"), dot.find("circle").get("cy")) == (str(RIGHT), str(TOP))
    assert text(dot.find("text")) == "7"


@pytest.mark.parametrize(
    ("low", "high", "within", "ticks"),
    [
        (0, 10, None, (0, 2, 4, 6, 8, 10)),
        (0.42, 2.31, None, (0, 0.5, 1, 1.5, 2, 2.5)),
        (34.5, 80.1, (0, 100), (30, 40, 50, 60, 70, 80, 90)),
        (97, 100, (0, 100), (97, 98, 99, 100)),
        (0, 2e-3, None, (0, 0.0005, 0.001, 0.0015, 0.002)),
        (5, 5, None, (4.4, 4.6, 4.8, 5, 5.2, 5.4, 5.6)),
        (0, 0, (0, 100), (0, 0.2, 0.4, 0.6, 0.8, 1)),
        (100, 100, (0, 100), (90, 92, 94, 96, 98, 100)),
        (120, 130, (0, 100), (90, 92, 94, 96, 98, 100)),
        (-3, 4, None, (-4, -2, 0, 2, 4)),
    ],
)
def test_axis__ends_at_round_numbers(low, high, within, ticks):
    made = axis("x", low, high, within=within)
    assert made.ticks == pytest.approx(ticks) and (made.low, made.high) == pytest.approx((ticks[0], ticks[-1]))


def test_thin__keeps_ends_and_extremes():
    points = [(float(i), math.sin(i)) for i in range(10_000)]
    points[1234], points[8765] = (1234.0, 99.0), (8765.0, -99.0)
    kept = thin(points)
    assert len(kept) <= 600 and {points[0], points[-1], points[1234], points[8765]} <= set(kept)
    assert kept == sorted(kept) and thin(points[:600]) == points[:600] and len(thin(points[:601])) <= 600
    line = Series("a", [(float(i), i % 2) for i in range(10_000)], 0)
    chart = draw(Chart("", Axis("", (0.0, 9999.0)), Axis("", (0.0, 1.0)), lines=[line]))
    (path,) = of_class(chart.find(".//g[@class='c0']"), "line")
    assert len(re.findall("[ML]", path.get("d"))) <= 600 and not list(chart.iter("circle"))
    assert finite([(1, 2.0), (2, None), (3, math.nan), (math.inf, 1), ("4", 1), (5, True)]) == [(1.0, 2.0)]


def test_legend__names_the_lines_if_there_are_several():
    several = drawn(lines=[Series("a < b", [(0.0, 1.0)], 0), Series("c", [(0.0, 1.0)], 7, dash=1)])
    (legend,) = of_class(several, "legend")
    assert [text(item) for item in legend] == ["a < b", "c"]
    assert of_class(legend, "c1")[0].find("path").get("stroke-dasharray") == "7 4"  # colours begin anew after the last
    assert of_class(drawn(lines=[Series("a", [(0.0, 1.0)], 0)]), "legend") == []
