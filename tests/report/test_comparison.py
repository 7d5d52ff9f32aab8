"""This model beside others, and twins."""

from broadsight.report.charts import BOTTOM, RIGHT
from broadsight.report.comparison import beside, twins

from .reading import of_class, read, tables, text

OURS = dict(title="x", parameters=1_000_000, macs=2e9, latency_ms=5.0, figures=dict(top1=80.0, ece=3.0, loss=1.0))
OTHER = dict(title="resnet18", parameters=11_700_000, macs=1e9, figures=dict(top1=70.0, ece=2.0))


def test_table__ours_first_best_in_bold():
    html = beside(OURS | dict(beside=[OTHER]))
    assert tables(html)[0] == [
        ["model", "parameters", "MACs", "latency", "top-1", "ECE"],  # only ours has a loss
        ["1x", "1.00\u00a0M", "2.00\u00a0G", "5.00\u00a0ms", "80.0\u00a0%", "3.0\u00a0%"],
        ["2resnet18", "11.7\u00a0M", "1.00\u00a0G", "–", "70.0\u00a0%", "2.0\u00a0%"],  # noqa: RUF001
    ]
    bold = [text(strong) for strong in read(html).iter("strong")]
    assert bold == ["1.00\u00a0M", "80.0\u00a0%", "1.00\u00a0G", "2.0\u00a0%"]
    assert text(of_class(read(html), "marked")[0]).startswith("1x")


def test_table__a_row_of_ours_may_be_given():
    html = beside(dict(title="a run", model="x", beside=[OTHER, OURS]))
    assert [row[0] for row in tables(html)[0]] == ["model", "1x", "2resnet18"]


def test_charts__numbered_as_the_rows():
    (macs,) = of_class(read(beside(OURS | dict(beside=[OTHER]))), "chart")  # latency is known of one alone
    dots = of_class(macs, "dot")
    assert [text(dot.find("text")) for dot in dots] == ["2", "1"] and "ours" in dots[1].get("class")
    assert float(dots[1].find("circle").get("cx")) < RIGHT and float(dots[0].find("circle").get("cy")) < BOTTOM
    assert "1 x: 80.0\u00a0%, 2.00\u00a0G" in macs.find("svg").get("aria-label")


def test_twins():
    (table,) = tables(twins(dict(twins=[dict(title="a", top1=50.0, parameters=1e6, minutes=11.5, folder="runs/a")])))
    assert table[1] == ["a", "50.0\u00a0%", "1.00\u00a0M", "11.5\u00a0min", "runs/a"]
    (table,) = tables(twins(dict(twins=[dict(title="a", folder="runs/a")])))
    assert table[0] == ["run", "top-1", "parameters", "folder"]  # no run tells its time


def test_nothing():
    assert beside(OURS) == twins(OURS) == ""
