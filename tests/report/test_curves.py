"""Curves of a run, calibration and robustness against figures by hand."""

import math

import pytest

from broadsight.report.charts import BOTTOM, LEFT, RIGHT, TOP
from broadsight.visual.words import NOTHING

from .reading import of_class, section, tables, text

TALL = BOTTOM - TOP
EPOCHS = [
    dict(kind="epoch", epoch=e, updates=10 * e, train_loss=3.0 - e, val_loss=3.5 - e, val_top1=40.0 * e, skipped=0)
    for e in (1, 2)
]
STEPS = [dict(kind="updates", updates=5 * u, epoch=1, loss=2.0, lr=1e-3 * u) for u in (1, 2, 3, 4)]
UNCOUNTED = [{k: v for k, v in line.items() if k != "updates"} for line in EPOCHS]
BINS = [
    dict(low=0.0, high=0.25, count=0, confidence=None, accuracy=None),
    dict(low=0.25, high=0.5, count=10, confidence=40.0, accuracy=25.0),
    dict(low=0.5, high=1.0, count=30, confidence=75.0, accuracy=50.0),
]


def curves(lines):
    return section("curves", curves=lines)


def calibration(**data):
    return section("calibration", dict(calibration=data))


@pytest.mark.parametrize(
    ("lines", "titles"),
    [
        ([*STEPS, *EPOCHS], ["Loss", "Accuracy", "Learning rate"]),
        (STEPS, ["Loss", "Learning rate"]),
        ([dict(kind="epoch", epoch=1, val_top1=3.0)], ["Accuracy"]),
        ([*STEPS, *UNCOUNTED], ["Loss", "Accuracy"]),  # updates cannot be placed if epochs do not count them
    ],
)
def test_curves__those_there_are_numbers_for(lines, titles):
    assert [text(caption) for caption in curves(lines).iter("figcaption")] == titles


def test_curves__points_are_placed_among_the_epochs_and_numbers_in_a_table():
    rate = curves([*STEPS, *EPOCHS]).findall(".//figure")[2]
    (line,) = of_class(rate, "line")
    assert line.get("d").endswith(f"L{RIGHT} {TOP}")  # update 20 of 20 at the end of epoch 2, at the highest rate
    alone = curves(STEPS).findall(".//figure")[1]
    assert [text(label) for label in of_class(alone, "name")] == ["learning rate", "updates"]
    loss = curves(EPOCHS[:1]).find(".//figure")
    assert [c.get("cx") for c in loss.iter("circle")] == [str(RIGHT)] * 2
    assert [text(label) for label in loss.iter("text") if label.get("y") == str(BOTTOM + 17)] == ["0", "1"]
    lines = [*EPOCHS, dict(kind="epoch", epoch=3, updates=30, train_loss=math.nan, val_loss=None, val_top1=math.inf)]
    assert len(list(curves(lines).find(".//figure").iter("circle"))) == 4
    found = curves(EPOCHS)
    (table,) = tables(found)
    assert table[0] == ["epoch", "training loss", "validation loss", "validation top-1"]
    assert table[2] == ["2", "1.00", "1.50", "80.0\u00a0%"]
    assert "Best after epoch 2: 80.0\u00a0% top-1" in text(found)


def test_calibration__bars_as_high_as_the_accuracy_and_a_table():
    reliability, spread = calibration(bins=BINS).findall(".//figure")
    bars, shares = list(reliability.iter("rect")), list(spread.iter("rect"))
    assert [float(bar.get("height")) for bar in bars] == [TALL / 4, TALL / 2]
    places = [LEFT + (RIGHT - LEFT) / 4 + 0.75, (LEFT + RIGHT) / 2 + 0.75]
    assert [float(bar.get("x")) for bar in bars] == pytest.approx(places, abs=0.06)
    assert of_class(reliability, "aim")[1].get("d") == f"M{(LEFT + RIGHT) // 2} {TOP + TALL // 4}H{RIGHT}"
    assert [text(bar) for bar in shares] == ["25 to 50\u00a0%: 10 images", "50 to 100\u00a0%: 30 images"]
    heights = [TALL * 25 / 80, TALL * 75 / 80]  # the axis ends at 80 %
    assert [float(bar.get("height")) for bar in shares] == pytest.approx(heights, abs=0.06)
    (table,) = tables(calibration(bins=BINS))
    assert table[1] == ["0 to 25\u00a0%", "0", NOTHING, NOTHING] and len(table) == 4


def test_calibration__in_words():
    sure = {50.0: "22 points more sure than it is right", 90.0: "7.5 points less sure", 80.0: "as sure as it should be"}
    for accuracy, words in sure.items():
        found = text(calibration(ece=4.2, mce=11.0, bins=[BINS[1], BINS[2] | dict(accuracy=accuracy)]))
        assert words in found and "differ by 4.2 points on average (ECE), by 11.0 in the worst bin (MCE)." in found


def suite(model="ours", cases=("a",), at=(0, 10), name="s", **others):
    rows = [dict(case=case, at=a, top1=100.0 - 10 * i, images=5) for case in cases for i, a in enumerate(at)]
    return dict(name=name, title="Title", axis="side, %", model=model, rows=rows) | others


def suites(*given):
    return section("suites", dict(suites=given))


def lines_of(tree):
    return [path for chart in of_class(tree, "chart") for g in chart.iter("g") for path in of_class(g, "line")]


def test_suites__strengths_make_lines_in_as_few_charts_as_can_be_read():
    found = suites(suite("ours", ("a", "b")), suite("other", ("a", "b")))
    assert len(of_class(found, "chart")) == 1 and len(lines_of(found)) == 4
    assert lines_of(found)[0].get("d") == f"M{LEFT} {TOP}L{RIGHT} {BOTTOM}"
    (legend,) = of_class(found, "legend")
    assert [text(item) for item in legend] == ["ours, a", "ours, b", "other, a", "other, b"]
    assert len(tables(found)[0]) == 9
    charts = of_class(suites(suite("ours", "abcde"), suite("other", "abcde")), "chart")
    assert [text(chart.find("figcaption")) for chart in charts] == ["ours", "other"]


def test_suites__many_cases_or_words_make_heat_tables_and_one_strength_puts_models_beside_each_other():
    found = suites(suite(cases="abcdefg", at=(1, 2, 3)))
    (table,) = tables(found)
    assert table[0] == ["case", "1", "2", "3", "mean"] and table[1] == ["a", "100.0", "90.0", "80.0", "90.0"]
    assert len(table) == 8 and len(of_class(found, "h10")) == 7 and lines_of(found) == []
    found = suites(suite("ours", at=("top", "side")), suite("other", at=("top", "side")))
    assert [table[0] for table in tables(found)] == [["case", "top", "side"]] * 2
    assert [text(strong) for strong in found.iter("strong")] == ["ours", "other"]
    found = suites(suite("ours", "ab", (None,)), suite("other", "ab", (None,)))
    assert tables(found) == [[["case", "ours", "other"], ["a", "100.0", "100.0"], ["b", "100.0", "100.0"]]]
    one, two = suite(at=(None,)), suite(at=(None,))
    two["rows"][0]["top1"] = 50.0
    assert tables(suites(one, two)) == [[["case", "ours", "ours"], ["a", "100.0", "50.0"]]]


def test_suites__by_name_with_their_summaries_and_without_figures():
    found = suites(suite("ours", summary={"mean top-1": 44.1}), suite("other", summary={"drop": 0.5}))
    ours, other = ["ours", "44.1\u00a0%", NOTHING], ["other", NOTHING, "0.500"]
    assert tables(found)[0] == [["model", "mean top-1", "drop"], ours, other]
    found = suites(suite(), suite(name="t", title=None), suite("m"))
    assert [text(title) for title in found.iter("h3")] == ["Title", "t"]
    assert "No image could be used." in text(suites(suite(rows=[])))
    for strengths in ((1, 2), ("top", "side")):
        rows = [dict(case="a", at=at, top1=None) for at in strengths]
        assert "No accuracy was measured." in text(suites(suite(rows=rows)))


def test_nothing__no_section():
    for data in (None, {}, dict(ece=1.0), dict(bins=[]), dict(bins=BINS[:1])):
        assert section("calibration", dict(calibration=data)) is None
    assert curves([]) is curves([{}, dict(kind="epoch", epoch=1), dict(kind="updates")]) is suites() is None
