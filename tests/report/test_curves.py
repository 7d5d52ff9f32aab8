"""A run's metrics as charts, whatever is missing in them."""

import math

from broadsight.report.charts import BOTTOM, RIGHT, TOP
from broadsight.report.curves import curves

from .reading import of_class, read, tables, text

EPOCHS = [
    dict(kind="epoch", epoch=e, updates=10 * e, train_loss=3.0 - e, val_loss=3.5 - e, val_top1=40.0 * e, skipped=0)
    for e in (1, 2)
]
STEPS = [dict(kind="updates", updates=5 * u, epoch=1, loss=2.0, lr=1e-3 * u) for u in (1, 2, 3, 4)]


def titles(html):
    return [text(caption) for caption in read(html).iter("figcaption")]


def test_charts__those_there_are_numbers_for():
    assert titles(curves([*STEPS, *EPOCHS])) == ["Loss", "Accuracy", "Learning rate"]
    assert titles(curves(STEPS)) == ["Loss", "Learning rate"]
    assert titles(curves([dict(kind="epoch", epoch=1, val_top1=3.0)])) == ["Accuracy"]
    assert curves([]) == curves([{}, dict(kind="epoch", epoch=1), dict(kind="updates")]) == ""


def test_updates__are_placed_among_the_epochs():
    rate = read(curves([*STEPS, *EPOCHS])).findall(".//figure")[2]
    (line,) = of_class(rate, "line")
    assert line.get("d").endswith(f"L{RIGHT} {TOP}")  # update 20 of 20 at the end of epoch 2, at the highest rate
    alone = read(curves(STEPS)).findall(".//figure")[1]
    assert [text(label) for label in of_class(alone, "name")] == ["learning rate", "updates"]


def test_updates__cannot_be_placed_if_epochs_do_not_count_them():
    lines = [{k: v for k, v in line.items() if k != "updates"} for line in EPOCHS]
    assert titles(curves([*STEPS, *lines])) == ["Loss", "Accuracy"]


def test_one_epoch__is_a_point_at_the_end():
    loss = read(curves(EPOCHS[:1])).find(".//figure")
    assert [c.get("cx") for c in loss.iter("circle")] == [str(RIGHT)] * 2
    ticks = [text(label) for label in loss.iter("text") if label.get("y") == str(BOTTOM + 17)]
    assert ticks == ["0", "1"]


def test_no_numbers__are_left_out():
    lines = [*EPOCHS, dict(kind="epoch", epoch=3, updates=30, train_loss=math.nan, val_loss=None, val_top1=math.inf)]
    assert len(list(read(curves(lines)).find(".//figure").iter("circle"))) == 4


def test_numbers__in_a_table():
    (table,) = tables(curves(EPOCHS))
    assert table[0] == ["epoch", "training loss", "validation loss", "validation top-1"]
    assert table[2] == ["2", "1.00", "1.50", "80.0\u00a0%"]
    assert "Best after epoch 2: 80.0\u00a0% top-1" in text(read(curves(EPOCHS)))
