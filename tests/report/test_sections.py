"""Figures, classes and their confusions, other models, facts and what was left out."""

from broadsight.report.charts import BOTTOM, RIGHT
from broadsight.report.sections import MATRIX
from broadsight.visual.words import NOTHING

from .reading import of_class, section, tables, text

OURS = dict(title="x", parameters=1_000_000, macs=2e9, latency_ms=5.0, figures=dict(top1=80.0, ece=3.0, loss=1.0))
OTHER = dict(title="resnet18", parameters=11_700_000, macs=1e9, figures=dict(top1=70.0, ece=2.0))


def per_class(*rows):
    return section("per_class", dict(per_class=rows))


def rows_of(count):
    return [{"class": f"c{i}", "images": 10, "recall": float(i % 97), "precision": 50.0} for i in range(count)]


def test_nothing__no_section():
    assert section("per_class", dict(classes=["a"])) is section("confusion", dict(confusion=[], confused=[])) is None
    assert section("confusion", dict(classes=["a"])) is section("figures", dict(absent=dict(curves="not kept"))) is None
    assert {section(key, record) for key, record in (("beside", OURS), ("twins", OURS))} == {None}
    assert {section(key, {}) for key in ("class_figures", "figures", "facts")} == {None}


def test_figures__with_their_meaning_or_the_reason():
    absent = dict(auroc="1 class given", curves="not kept", top1="no")
    found = section("figures", dict(figures=dict(top1=34.5, odd_one=2.0), absent=absent))
    assert [[text(cell) for cell in row] for row in of_class(found, "figures")[0]] == [
        ["top-1", "34.5\u00a0%", "the class with the highest score is the right one"],
        ["odd one", "2.00"],
        ["AUROC", NOTHING, "not measured: 1 class given."],
    ]


def test_per_class__few_in_their_order_of_many_the_weakest_the_strongest_and_the_others_folded_away():
    (table,) = tables(per_class(*rows_of(40)))
    assert [row[0] for row in table] == ["class", *(f"c{i}" for i in range(40))]
    found = per_class(*rows_of(90), {"class": "empty", "images": 0, "recall": None})
    worst, best, others = ([row[0] for row in table[1:]] for table in tables(found))
    assert worst == [f"c{i}" for i in range(20)] and best == [f"c{i}" for i in (89, 88, 87, 86, 85)]
    assert others == [*(f"c{i}" for i in range(20, 85)), "empty"]
    assert text(found.find(".//details/summary")) == "The other 66 classes"
    assert "91 classes; recall from 0.0\u00a0% (c0) to 89.0\u00a0% (c89)" in text(found)


def test_per_class__a_confused_one_and_one_without_images():
    row = {"class": "none", "images": 0, "recall": None, "precision": None, "f1": None, "most_confused_with": None}
    found = per_class(row)
    assert tables(found)[0][1] == ["none", "0", *[NOTHING] * 4] and of_class(found, "bar") == []
    row = {"class": "cat", "images": 9, "recall": 25.0, "most_confused_with": "<dog>", "confused": 4}
    found = per_class(row)
    assert tables(found)[0][1][-1] == "<dog> 4"
    assert [cell.get("style") for cell in of_class(found, "bar")] == ["--v:25"]


def test_matrix__right_and_wrong_by_colour_without_names_or_too_large_to_read():
    found = section("confusion", dict(classes=["cat", "dog", "owl"], confusion=[[8, 2, 0], [1, 9, 0], [0, 0, 0]]))
    matrix, frequent = tables(found)
    assert matrix[1:] == [["cat", "8", "2", ""], ["dog", "1", "9", ""], ["owl", "", "", ""]]
    kinds = [[cell.get("class") for cell in row.iter("td")] for row in found.find(".//tbody").iter("tr")]
    assert kinds == [["h8", "e10", None], ["e5", "h9", None], [None] * 3]
    assert frequent[1:] == [["cat", "dog", "2", "20.0\u00a0%"], ["dog", "cat", "1", "10.0\u00a0%"]]
    found = section("confusion", dict(confusion=[[3, 0], [0, 4]]))
    assert tables(found)[0][0][1:] == ["0", "1"] and "No image was taken for another class." in text(found)
    size = MATRIX + 1
    matrix = [[int(j == (i + 1) % size) for j in range(size)] for i in range(size)]
    found = section("confusion", dict(confusion=matrix))
    (frequent,) = tables(found)
    assert len(frequent) == 31 and "A matrix of 61 classes is too large to be read." in text(found)


def test_class_figures__counts_first_and_the_weakest_on_top():
    rows = [dict(name="cat", box_ap=40.0, objects=7, box_ap50=60.0), dict(name="cow", objects=0)]
    rows.insert(1, dict(name="<dog>", box_ap=10.0, objects=3, box_ap50=float("nan")))
    (table,) = tables(section("class_figures", {"class_figures": rows}))
    assert table[0] == ["class", "objects", "box AP", "box AP50"]
    assert [row[0] for row in table[1:]] == ["<dog>", "cat", "cow"]
    assert table[1][1:3] == ["3", "10.0\u00a0%"] and table[3][2:] == [NOTHING] * 2


def test_beside__ours_first_best_in_bold_and_dots_numbered_as_the_rows():
    found = section("beside", OURS | dict(beside=[OTHER]))
    assert tables(found)[0] == [
        ["model", "parameters", "MACs", "latency", "top-1", "ECE"],  # only ours has a loss
        ["1x", "1.00\u00a0M", "2.00\u00a0G", "5.00\u00a0ms", "80.0\u00a0%", "3.0\u00a0%"],
        ["2resnet18", "11.7\u00a0M", "1.00\u00a0G", NOTHING, "70.0\u00a0%", "2.0\u00a0%"],
    ]
    bold = [text(strong) for strong in found.iter("strong")]
    assert bold == ["1.00\u00a0M", "80.0\u00a0%", "1.00\u00a0G", "2.0\u00a0%"]
    assert text(of_class(found, "marked")[0]).startswith("1x")
    given = section("beside", dict(title="a run", model="x", beside=[OTHER, OURS]))  # with a row of ours
    assert [row[0] for row in tables(given)[0]] == ["model", "1x", "2resnet18"]
    (macs,) = of_class(section("beside", OURS | dict(beside=[OTHER])), "chart")  # latency is known of one alone
    dots = of_class(macs, "dot")
    assert [text(dot.find("text")) for dot in dots] == ["2", "1"] and "ours" in dots[1].get("class")
    assert float(dots[1].find("circle").get("cx")) < RIGHT and float(dots[0].find("circle").get("cy")) < BOTTOM
    assert "1 x: 80.0\u00a0%, 2.00\u00a0G" in macs.find("svg").get("aria-label")


def test_twins_and_skipped__time_and_folder_all_counted_the_first_named():
    run = dict(title="a", top1=50.0, parameters=1e6, minutes=11.5, folder="runs/a")
    (table,) = tables(section("twins", dict(twins=[run])))
    assert table[1] == ["a", "50.0\u00a0%", "1.00\u00a0M", "11.5\u00a0min", "runs/a"]
    (table,) = tables(section("twins", dict(twins=[dict(title="a", folder="runs/a")])))
    assert table[0] == ["run", "top-1", "parameters", "folder"]  # no run tells its time
    found = section("skipped", dict(skipped={f"{i}.jpg": "cut short" for i in range(240)}))
    assert len(tables(found)[0]) == 101
    assert "240 images could not be read and were left out. The first 100 are named." in text(found)
    one = section("skipped", dict(skipped={"a": "b"}))
    assert "1 image could not be read and was left out." in text(one)


def test_facts__and_what_it_was_made_with():
    record = dict(facts=[dict(group="Data", rows=[["classes", 2]]), dict(group="none", rows=[])])
    record |= dict(seed=0, commit=None, versions=dict(torch="2.15.0"), command="broadsight train <x>")
    found = section("facts", record)
    assert [text(h) for h in found.iter("h3")] == ["Data", "Made with", "Command"]
    names, values = ([text(e) for e in found.iter(tag)] for tag in ("dt", "dd"))
    assert names == ["classes", "seed", "commit", "torch"]
    assert values == ["2", "0", "unknown: not run from a checkout", "2.15.0"]
    assert text(found.find(".//pre")) == "broadsight train <x>"
