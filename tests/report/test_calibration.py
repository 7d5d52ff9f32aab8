"""The reliability diagram against bins by hand."""

import pytest

from broadsight.report.calibration import calibration
from broadsight.report.charts import BOTTOM, LEFT, RIGHT, TOP

from .reading import of_class, read, tables, text

BINS = [
    dict(low=0.0, high=0.25, count=0, confidence=None, accuracy=None),
    dict(low=0.25, high=0.5, count=10, confidence=40.0, accuracy=25.0),
    dict(low=0.5, high=1.0, count=30, confidence=75.0, accuracy=50.0),
]


def test_bars__as_high_as_the_accuracy():
    reliability, spread = read(calibration(dict(calibration=dict(bins=BINS)))).findall(".//figure")
    tall = BOTTOM - TOP
    assert [float(bar.get("height")) for bar in reliability.iter("rect")] == [tall / 4, tall / 2]
    assert [float(bar.get("x")) for bar in reliability.iter("rect")] == pytest.approx(
        [LEFT + (RIGHT - LEFT) / 4 + 0.75, (LEFT + RIGHT) / 2 + 0.75], abs=0.06
    )
    aims = [aim.get("d") for aim in of_class(reliability, "aim")]
    assert aims[1] == f"M{(LEFT + RIGHT) // 2} {TOP + tall // 4}H{RIGHT}"
    assert [text(bar) for bar in spread.iter("rect")] == [
        "25 to 50\u00a0%: 10 images",
        "50 to 100\u00a0%: 30 images",
    ]
    assert [float(bar.get("height")) for bar in spread.iter("rect")] == pytest.approx(
        [tall * 25 / 80, tall * 75 / 80], abs=0.06
    )  # the axis ends at 80 %


@pytest.mark.parametrize(
    ("accuracy", "words"),
    [(50.0, "22 points more sure than it is right"), (90.0, "7.5 points less sure"), (80.0, "as sure as it should be")],
)
def test_sentence(accuracy, words):
    bins = [BINS[1], BINS[2] | dict(accuracy=accuracy)]
    assert words in text(read(calibration(dict(calibration=dict(ece=4.2, mce=11.0, bins=bins)))))


def test_sentence__errors():
    html = calibration(dict(calibration=dict(ece=4.2, mce=11.0, bins=BINS)))
    assert "differ by 4.2 points on average (ECE), by 11.0 in the worst bin (MCE)." in text(read(html))


def test_table__names_empty_bins_too():
    (table,) = tables(calibration(dict(calibration=dict(bins=BINS))))
    assert table[1] == ["0 to 25\u00a0%", "0", "–", "–"] and len(table) == 4  # noqa: RUF001


@pytest.mark.parametrize("data", [None, {}, dict(ece=1.0), dict(bins=[]), dict(bins=BINS[:1])])
def test_nothing(data):
    assert calibration(dict(calibration=data)) == ""
