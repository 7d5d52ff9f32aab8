"""Suites: lines where there is a strength, heat where there are many cases or words."""

from broadsight.report.charts import BOTTOM, LEFT, RIGHT, TOP
from broadsight.report.suites import suites

from .reading import of_class, read, tables, text


def suite(model="ours", cases=("a",), at=(0, 10), name="s", **others):
    rows = [dict(case=case, at=a, top1=100.0 - 10 * i, images=5) for case in cases for i, a in enumerate(at)]
    return dict(name=name, title="Title", axis="side, %", model=model, rows=rows) | others


def lines(html):
    return [path for chart in of_class(read(html), "chart") for g in chart.iter("g") for path in of_class(g, "line")]


def show(*given):
    return suites(dict(title="x", suites=given))


def test_numbers__a_line_for_every_model_and_case():
    html = show(suite("ours", ("a", "b")), suite("other", ("a", "b")))
    assert len(of_class(read(html), "chart")) == 1 and len(lines(html)) == 4
    assert lines(html)[0].get("d") == f"M{LEFT} {TOP}L{RIGHT} {BOTTOM}"
    (legend,) = of_class(read(html), "legend")
    assert [text(item) for item in legend] == ["ours, a", "ours, b", "other, a", "other, b"]
    assert len(tables(html)[0]) == 9


def test_numbers__a_chart_for_each_model_if_lines_are_too_many():
    html = show(suite("ours", "abcde"), suite("other", "abcde"))
    assert [text(chart.find("figcaption")) for chart in of_class(read(html), "chart")] == ["ours", "other"]


def test_many_cases__heat_with_the_mean():
    html = show(suite(cases="abcdefg", at=(1, 2, 3)))
    (table,) = tables(html)
    assert table[0] == ["case", "1", "2", "3", "mean"] and table[1] == ["a", "100.0", "90.0", "80.0", "90.0"]
    assert len(table) == 8 and len(of_class(read(html), "h10")) == 7 and lines(html) == []


def test_words__heat_for_each_model():
    html = show(suite("ours", at=("top", "side")), suite("other", at=("top", "side")))
    assert [table[0] for table in tables(html)] == [["case", "top", "side"]] * 2
    assert [text(strong) for strong in read(html).iter("strong")] == ["ours", "other"]


def test_one_strength__models_beside_each_other():
    html = show(suite("ours", "ab", (None,)), suite("other", "ab", (None,)))
    assert tables(html) == [[["case", "ours", "other"], ["a", "100.0", "100.0"], ["b", "100.0", "100.0"]]]


def test_summary__of_every_model():
    html = show(suite("ours", summary={"mean top-1": 44.1}), suite("other", summary={"drop": 0.5}))
    assert tables(html)[0] == [
        ["model", "mean top-1", "drop"],
        ["ours", "44.1\u00a0%", "–"],  # noqa: RUF001
        ["other", "–", "0.500"],  # noqa: RUF001
    ]


def test_names__keep_suites_apart():
    titles = [text(h) for h in read(show(suite(), suite(name="t", title=None), suite("m"))).iter("h3")]
    assert titles == ["Title", "t"]


def test_nothing_measured():
    assert "No image could be used." in show(suite(rows=[]))
    unknown = [dict(case="a", at=a, top1=None) for a in (1, 2)]
    assert "No accuracy was measured." in show(suite(rows=unknown))
    assert show() == suites(dict(title="x")) == ""
