"""Several runs on one page: their curves on common axes, a row for each, and what has no common axis."""

import json
import shutil

from broadsight.cli.main import main
from broadsight.report.charts import LEFT, RIGHT
from broadsight.report.together import report_together
from tests.refusals import refused

from .reading import of_class, read, tables, text


def leave(folder, top1, epochs=None, **given):
    """What a run of so many epochs, 2 points each of a classifier, has written down."""
    settings = dict(data="photos", model="resnet18", pool=None, broadcast=None, seed=0) | given.pop("settings", {})
    metric = given.pop("metric", "val_top1")
    lines = [dict(kind="updates", updates=3, epoch=1, loss=2.0, lr=0.1)]
    for epoch, value in enumerate(top1, 1):
        line = dict(kind="epoch", epoch=epoch, updates=5 * epoch, train_loss=3.0 - epoch, val_loss=1.0 / epoch)
        best = max(top1[:epoch])
        lines.append(line | {metric: value} | dict(val_top5=90.0, best=best, best_epoch=top1.index(best) + 1))
    about = dict(task="classify", settings=settings, recipe=dict(epochs=epochs or len(top1), cooldown_epochs=0))
    about |= dict(parameters=11_000_000, seed=0, data=dict(fingerprint="a")) | given
    folder.mkdir(parents=True)
    folder.joinpath("config.json").write_text(json.dumps(dict(architecture="resnet18", broadsight=about)))
    folder.joinpath("metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_page__a_chart_of_each_metric_and_a_row_of_each_run(tmp_path):
    gap, long = leave(tmp_path / "gap", [20.0, 40.0]), leave(tmp_path / "map", [30.0, 60.0, 50.0], epochs=4)
    page = read(report_together([gap, long], tmp_path / "both", "broadsight report gap map").read_text())
    charts = page.findall(".//figure")
    names = ["Training loss", "Validation loss", "Validation top-1", "Validation top-5"]
    assert [text(chart.find("figcaption")) for chart in charts] == names
    assert all([text(item) for item in of_class(chart, "legend")[0]] == ["gap", "map"] for chart in charts)
    first, second = of_class(charts[2], "line")[:2]
    step = (RIGHT - LEFT) / 3  # of the epochs from 0 to 3
    assert [path.get("d").count("L") for path in (first, second)] == [1, 2]
    assert second.get("d").startswith(f"M{LEFT + step:g} ") and f"L{LEFT + 3 * step:g} " in second.get("d")
    (table,) = tables(page.find(".//section[@id='runs']"))
    assert table[0][4:] == ["epochs", "best top-1", "its epoch", "training loss", "validation loss"]
    assert table[1] == ["gap", "resnet18", "0", "11.0\u00a0M", "2", "40.0\u00a0%", "2", "1.00", "0.500"]
    assert table[2][4:7] == ["3 of 4", "60.0\u00a0%", "2"]
    assert "not finished: map; drawn as far as they came." in text(page) and "2 runs on photos" in text(page)
    assert "different parts" not in text(page)
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["curves.png", "report.html"]


def test_page__more_runs_than_colours_one_without_epochs_and_other_seeds(tmp_path):
    runs = [leave(tmp_path / f"r{i}", [50.0 + i], data=dict(fingerprint=str(i))) for i in range(7)]
    runs.append(leave(tmp_path / "begun", [], epochs=3))
    page = read(report_together(runs, tmp_path / "all").read_text())
    chart = page.find(".//figure")
    assert [path.get("stroke-dasharray", "") for path in of_class(chart, "line")[:7]] == [""] * 6 + ["7 4"]
    assert tables(page.find(".//section[@id='runs']"))[0][8][4] == "0 of 3" and "different parts" in text(page)


def test_refused__what_has_no_common_axis(tmp_path, capsys):
    one, end = leave(tmp_path / "one", [20.0]), tmp_path / "out"
    other = leave(tmp_path / "other", [20.0], settings=dict(data="flowers"), data=dict(fingerprint="b"))
    moved = leave(tmp_path / "moved", [20.0], settings=dict(data="copy"))  # of the same images
    dense = leave(tmp_path / "dense", [20.0], task="segment")
    empty = [leave(tmp_path / f"none{i}", []) for i in (1, 2)]
    (broken := shutil.copytree(one, tmp_path / "broken")).joinpath("metrics.jsonl").write_text("{")
    others = r"other learned from other images \(flowers, not photos\) than .*one; figures of"
    refused(others, report_together, [one, other], end)
    refused(r"dense learned another task \(segment, not classify\)", report_together, [one, dense], end)
    refused("one is given twice; give every run once", report_together, [one, tmp_path / "other" / ".." / "one"], end)
    refused("none of none1, none2 has finished an epoch", report_together, empty, end)
    refused("metrics.jsonl is damaged", report_together, [one, broken], end)
    assert not end.exists()
    wrong = {("one", "--out", "x"): "--out is for several runs", ("one", "nowhere"): "there is no run in"}
    wrong[("one", "moved", "--device", "cpu")] = "--device: several runs are drawn from what they recorded"
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"architecture": "test_resnet"}')
    for words in (("bare",), ("one", "bare")):
        wrong[words] = "bare holds a model without the history of a run; give a folder"
    for words, message in wrong.items():
        runs = [str(tmp_path / word) if place < 2 and word[0] != "-" else word for place, word in enumerate(words)]
        assert main(["report", *runs]) == 2 and message in capsys.readouterr().err
    assert main(["report", str(one), str(moved), "--out", str(end)]) == 0
    assert capsys.readouterr().out == f"report: {end / 'report.html'}\n"


def test_page__dense_runs_by_their_goal_and_equal_folders_by_their_paths(tmp_path):
    given = dict(task="detect", metric="val_box_ap", settings=dict(head="fcos", neck="fpn"))
    runs = [leave(tmp_path / name, [20.0, 10.0], **given) for name in ("a/run", "b/run")]
    page = read(report_together(runs, tmp_path / "both").read_text())
    table = tables(page.find(".//section[@id='runs']"))[0]
    assert table[0][5] == "best box AP" and [row[0] for row in table[1:]] == [str(run) for run in runs]
    assert table[1][1] == "fcos-resnet18" and table[1][5:7] == ["20.0\u00a0%", "1"]
    assert "Validation box AP" in [text(one) for one in page.iter("figcaption")]
