"""Classes and their confusions, from none to a thousand."""

import pytest

from broadsight.report.classes import MATRIX, class_figures, confusions, per_class
from broadsight.visual.words import NOTHING

from .reading import of_class, read, tables, text


def rows_of(count):
    return [{"class": f"c{i}", "images": 10, "recall": float(i % 97), "precision": 50.0} for i in range(count)]


def test_few_classes__one_table_in_their_order():
    (table,) = tables(per_class(dict(per_class=rows_of(40))))
    assert [row[0] for row in table] == ["class", *(f"c{i}" for i in range(40))]


def test_many_classes__weakest_strongest_and_the_others_folded_away():
    html = per_class(dict(per_class=[*rows_of(90), {"class": "empty", "images": 0, "recall": None}]))
    worst, best, others = tables(html)
    assert [row[0] for row in worst[1:]] == [f"c{i}" for i in range(20)]
    assert [row[0] for row in best[1:]] == [f"c{i}" for i in (89, 88, 87, 86, 85)]
    assert [row[0] for row in others[1:]] == [*(f"c{i}" for i in range(20, 85)), "empty"]
    assert text(read(html).find(".//details/summary")) == "The other 66 classes"
    assert "91 classes; recall from 0.0\u00a0% (c0) to 89.0\u00a0% (c89)" in text(read(html))


def test_class_without_images():
    row = {"class": "none", "images": 0, "recall": None, "precision": None, "f1": None, "most_confused_with": None}
    html = per_class(dict(per_class=[row]))
    assert tables(html)[0][1] == ["none", "0", *"––––"] and of_class(read(html), "bar") == []  # noqa: RUF001


def test_confused_class__is_named_with_its_count():
    row = {"class": "cat", "images": 9, "recall": 25.0, "most_confused_with": "<dog>", "confused": 4}
    html = per_class(dict(per_class=[row]))
    assert tables(html)[0][1][-1] == "<dog> 4"
    assert [cell.get("style") for cell in of_class(read(html), "bar")] == ["--v:25"]


def test_matrix__right_and_wrong_by_colour():
    html = confusions(dict(classes=["cat", "dog", "owl"], confusion=[[8, 2, 0], [1, 9, 0], [0, 0, 0]]))
    matrix, frequent = tables(html)
    assert matrix[1:] == [["cat", "8", "2", ""], ["dog", "1", "9", ""], ["owl", "", "", ""]]
    kinds = [[cell.get("class") for cell in row.iter("td")] for row in read(html).find(".//tbody").iter("tr")]
    assert kinds == [["h8", "e10", None], ["e5", "h9", None], [None] * 3]
    assert frequent[1:] == [["cat", "dog", "2", "20.0\u00a0%"], ["dog", "cat", "1", "10.0\u00a0%"]]


def test_matrix__without_names_or_mistakes():
    html = confusions(dict(confusion=[[3, 0], [0, 4]]))
    assert tables(html)[0][0][1:] == ["0", "1"] and "No image was taken for another class." in text(read(html))


def test_matrix__too_large_to_read():
    size = MATRIX + 1
    html = confusions(dict(confusion=[[int(j == (i + 1) % size) for j in range(size)] for i in range(size)]))
    (frequent,) = tables(html)
    assert len(frequent) == 31 and "A matrix of 61 classes is too large to be read." in text(read(html))


@pytest.mark.parametrize("record", [{}, dict(confusion=[], confused=[]), dict(classes=["a"])])
def test_nothing(record):
    assert confusions(record) == per_class(record) == ""


def test_class_figures__counts_first_and_the_weakest_on_top():
    rows = [
        {"name": "cat", "box_ap": 40.0, "objects": 7, "box_ap50": 60.0},
        {"name": "<dog>", "box_ap": 10.0, "objects": 3, "box_ap50": float("nan")},
        {"name": "cow", "objects": 0},
    ]
    (table,) = tables(class_figures({"class_figures": rows}))
    assert table[0] == ["class", "objects", "box AP", "box AP50"]
    assert [row[0] for row in table[1:]] == ["<dog>", "cat", "cow"]
    assert table[1][1:3] == ["3", "10.0\u00a0%"] and table[3][2:] == [NOTHING] * 2
    assert class_figures({}) == ""
