"""The comparison: figures, where they come from, and those that nobody has."""

import json
import re

import pytest
from PIL import Image

from broadsight.app.candidates import Candidate
from broadsight.app.comparison import MOST, Row, accuracy_of, compare, first_axes, plot, points, table
from broadsight.benchmark.timing import Summary
from broadsight.evaluation.run import macs_of
from broadsight.runs.classifier import open_classifier
from broadsight.visual.plots import PALETTE
from tests.app.test_answers import EVIL, tags
from tests.training.small_runs import leave_run, refusal


def a_row(name="net", **more) -> Row:
    usual = dict(name=name, task="classify", trained=True, parameters=2_000_000, macs=3_000_000_000)
    figures = dict(latency=Summary(4.0, 3.0, 0.1), accuracy=71.0, measure="top-1", measured_on="validation")
    return Row(**usual | figures | more)


@pytest.fixture
def run(tmp_path):
    folder, _ = leave_run(tmp_path / "runs" / "mine")
    lines = [dict(kind="epoch", best=value) for value in (10.0, 34.5)] + [dict(kind="updates")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Candidate("mine", str(folder), True, open_classifier(folder))


def evaluation(folder, source, **figures):
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text(json.dumps(dict(figures=figures, model=dict(source=str(source)))))


def test_compare__figures_of_each(run):
    rows = compare([run], Image.new("RGB", (40, 40)))
    assert (rows[0].parameters, rows[0].macs) == (run.run.parameters, macs_of(run.run))
    assert rows[0].latency.median > 0
    assert (rows[0].accuracy, rows[0].measured_on) == (34.5, "validation of the run")
    assert "choose at least one" in refusal(lambda: compare([], Image.new("RGB", (40, 40))))
    assert f"at most {MOST}" in refusal(lambda: compare([run] * (MOST + 1), Image.new("RGB", (40, 40))))


def test_accuracy__an_evaluation_of_this_model_comes_first_and_random_weights_have_none(run, tmp_path):
    folder = tmp_path / "e"
    evaluation(folder / "other", tmp_path / "runs" / "another", top1=99.0)
    evaluation(folder / "without", run.source, loss=1.0)
    evaluation(folder / "x", "resnet18", top1=70.0)
    (folder / "damaged").mkdir()
    (folder / "damaged" / "evaluation.json").write_text("[")
    assert accuracy_of(run, folder) == (34.5, "validation of the run")
    for trained, expected in ((False, (None, "")), (True, (70.0, "evaluation x"))):
        assert accuracy_of(Candidate("resnet18", "resnet18", trained, run.run), folder) == expected
    evaluation(folder / "mine", run.source, top1=41.0)
    assert accuracy_of(run, folder) == (41.0, "evaluation mine")


def test_points_and_table__values_on_the_axes_what_is_not_known_and_a_shape_for_every_model():
    drawn, missing = points([a_row(), a_row("b", accuracy=80.0)], "latency", "accuracy")
    assert [one.pop("about")["accuracy"] for one in drawn] == ["71.0 % top-1", "80.0 % top-1"] and missing == []
    first = dict(name="net", x=4.0, y=71.0, place=0, colour=PALETTE[0])
    assert drawn == [first, dict(name="b", x=4.0, y=80.0, place=1, colour=PALETTE[1])]
    for x, y, values in [("macs", "parameters", (3.0, 2.0)), ("macs", "macs", (3.0, 3.0))]:
        assert [(one["x"], one["y"]) for one in points([a_row()], x, y)[0]] == [values]
    rows = [a_row(), a_row("b", accuracy=None), a_row("c", macs=None), a_row("d", measure="box AP", task="detect")]
    drawn, missing = points(rows, "macs", "accuracy")
    assert [one["name"] for one in drawn] == ["net"]
    assert missing == ["b: accuracy not known", "c: MACs not known", "d: measured in box AP, not in top-1"]
    assert first_axes([a_row(accuracy=None)]) == ("macs", "latency")
    assert first_axes([a_row(accuracy=None), a_row()]) == ("latency", "accuracy")
    text = table([a_row("<b>", accuracy=None, macs=None, trained=False)])
    assert "not run" in text and "not counted" in text and "random weights" in text
    assert "&lt;b&gt;" in text and "<b>" not in text
    assert "71.0 % top-1" in table([a_row()]) and "8.0 MB" in table([a_row()])
    signs = re.findall("<svg.*?</svg>", table([a_row(str(number)) for number in range(MOST)]))
    assert len({re.sub("style=.*? ", "", sign) for sign in signs}) == len(signs) == MOST


def a_point(**more) -> dict:
    return dict(name="net", x=4.0, y=50.0, place=0, colour="#0072B2", about={"latency": "4 ms"}) | more


def places(html: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'style="left:([\d.]+)%;bottom:([\d.]+)%"', html)]


def test_plot__points_at_their_shares_of_the_axes_each_told_and_reached():
    html = plot([a_point(), a_point(x=8.0, y=95.0)], "latency, ms", "accuracy, %")
    across = [float(tick) for tick in re.findall(r'class="bs-x" style="left:[\d.]+%">([\d.]+)<', html)]
    upwards = [float(tick) for tick in re.findall(r'class="bs-y" style="bottom:[\d.]+%">([\d.]+)<', html)]
    assert across[0] == upwards[0] == 0 and across[-1] >= 8 and upwards[-1] >= 95
    for (x, y), found in zip([(4, 50), (8, 95)], places(html), strict=True):
        assert found == pytest.approx((100 * x / across[-1], 100 * y / upwards[-1]), abs=0.01)
    assert plot([], "x", "y") == "" and places(plot([a_point(x=0.0, y=0.0)], "x", "y")) == [(0, 0)]
    html = plot([a_point(x=1.0, y=1.0), a_point(x=10.0, y=10.0)], "x", "y")
    assert re.findall(r'class="bs-point bs-(\w+) bs-(\w+)"', html) == [("right", "above"), ("left", "below")]
    assert html.count('tabindex="0"') == html.count('aria-label="net; latency 4 ms"') == 2
    evil = a_point(name=EVIL, about={EVIL: EVIL})
    assert tags(plot([evil], EVIL, EVIL)) == tags(plot([a_point()], "x", "y"))
