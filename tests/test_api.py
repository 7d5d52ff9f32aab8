"""The verbs as functions: the options of the commands as keywords, objects back, nothing printed, UsageErrors."""

import inspect
import json

import pytest

import broadsight
from broadsight.cli.main import COMMANDS
from broadsight.cli.parser import request_of
from broadsight.prediction.request import Request
from broadsight.runs.dense_model import DenseModel
from broadsight.surgery.pooling import swap_pool

from .refusals import refused
from .training.small_runs import fill

SMALL = dict(epochs=1, size=32, batch=4, device="cpu", workers=0, threads=1)
VERBS = dict(train="train", eval="evaluate", predict="predict", explain="explain", analyze="analyze")
VERBS |= dict(export="export", bench="bench")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("data"), 40, red=8, blue=8)


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    return broadsight.train(data, model="test_vit", out=out, report=False, model_args={"img_size": 32}, **SMALL)


@pytest.mark.parametrize(("command", "verb"), VERBS.items())
def test_verbs__take_the_options_of_the_commands(command, verb):
    function = getattr(broadsight, verb)
    options, kind = inspect.signature(function).parameters, request_of(COMMANDS[command])
    assert set(kind.settings()) | {"progress"} == set(options) - {"keep"} and kind.verb == verb
    assert all(f"{name}: " in function.__doc__ for name in options)


def test_train__gives_the_run_opened(run, data, capsys):
    assert run.task == "classify" and run.classes == ("blue", "red") and run.metrics["epoch"] == 1
    again = broadsight.open_run(run.source)
    assert again.metrics == run.metrics and again.title == run.title
    about = again.run["broadsight"]
    assert about["command"].startswith(f"broadsight.train({str(data)!r}, ")
    assert "model='test_vit'" in about["command"] and "epochs=1" in about["command"]


def test_run__predicts_evaluates_explains_exports(run, data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = sorted((data / "red").glob("*.png"))
    found = run.predict(images[0])
    assert len(found) == 1 and set(found[0].classes) == {"blue", "red"}
    asked = Request(run, images[0])
    assert found == broadsight.predict(run.source, [images[0]], device="cpu") == broadsight.predict(asked)
    evaluation = run.evaluate(data, part="all", latency=False, workers=0)
    assert len(evaluation.results[0].predictions) == 16 and 0 <= evaluation.figures["top1"] <= 100
    seen = run.explain(images[:2], kinds="gradcam")
    assert [len(one.looks) > 0 for one in seen.looked.values()] == [True, True]
    vit = broadsight.explain("test_vit", images[0], query=(3, 4), kinds="query", pretrained=False, size=32)
    assert {one.title for seen in vit.looked.values() for one in seen.looks} == {"(3,4)"}
    exported = run.export("onnx", out=tmp_path / "net.onnx", rounds=0, compare=2)
    assert exported.path == tmp_path / "net.onnx" and exported.agreement.relative < 1e-3
    assert capsys.readouterr() == ("", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx", "net.onnx.export.json"]


def test_files__where_an_option_names_a_place(run, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image = next((data / "red").glob("*.png"))
    run.predict(image, csv="all.csv", json="all.json", workers=0)
    assert json.loads((tmp_path / "all.json").read_text())[0]["file"] == str(image)
    found = run.evaluate(data, part="all", latency=False, workers=0, json="eval.json", out="there")
    assert json.loads((tmp_path / "eval.json").read_text())["figures"] == found.record["figures"]
    assert found.folder is not None and (tmp_path / "there" / "report.html").is_file()
    kept = broadsight.explain(run, image, kinds="gradcam", keep=True)
    assert kept.folder is not None and kept.folder.parent.name == "explanations"
    assert (kept.folder / "explanation.json").is_file() and kept.entries[0]["file"] == str(image)
    measured = broadsight.analyze("variance", [run], data=str(data), samples=4, json="m.json", plot="m.png", workers=0)
    assert measured.results and (tmp_path / "m.png").is_file() and measured.folder is None
    assert json.loads((tmp_path / "m.json").read_text())["measure"] == "variance"


def test_bench_and_json__write_where_asked(run, tmp_path, capsys):
    report = broadsight.bench("test_vit", rounds=1, warmup=0, size=32, batch=1, json=tmp_path / "b.json")
    assert report.rows[0].model == "test_vit"
    assert json.loads((tmp_path / "b.json").read_text())["command"].startswith("broadsight.bench(['test_vit'], ")
    run.export("onnx", out=tmp_path / "net.onnx", rounds=0, compare=1, json="-")
    record = json.loads(capsys.readouterr().out)
    assert record["command"].startswith("broadsight.export(") and record["artefact"] == "net.onnx"


def test_dense__run(tmp_path):
    head, options = dict(width=64, assigner="atss"), SMALL | dict(size=64, report=False, out=tmp_path / "run")
    run = broadsight.train("scenes:8", task="detect", model="test_resnet", head_args=head, **options)
    assert isinstance(run, DenseModel) and run.task == "detect" and run.metrics["epoch"] == 1
    image = fill(tmp_path / "images", 40, red=1) / "red" / "000.png"
    assert [row[0] for row in run.predict(image).rows] == [str(image)]
    assert "box_ap" in run.evaluate(workers=0).figures
    refused("explain looks into classifiers", run.explain, image, error=broadsight.UsageError)


def test_mistakes__are_usage_errors(run, data, tmp_path):
    for call, words in (
        (lambda: broadsight.train("nowhere", device="cpu"), "no such data: nowhere"),
        (lambda: broadsight.train("scenes:8", epoch=3), "there is no option 'epoch'; did you mean 'epochs'?"),
        (lambda: broadsight.train("scenes:8", epochs="many"), "--epochs: expected a whole number, got many"),
        (lambda: run.predict("nowhere.png"), "no such file or folder: nowhere.png"),
        (lambda: run.predict(tmp_path, slide=True), "--slide is for runs of --task segment; this is a classifier"),
        (lambda: run.evaluate("nowhere"), "no such data: nowhere"),
        (lambda: broadsight.predict(run, data, size=64), "is open already; give size when you open it"),
        (lambda: run.explain(next(data.glob("red/*")), raw=True), "--raw without a folder for files; give out="),
        (lambda: run.export("onyx"), "unknown format 'onyx'"),
        (lambda: broadsight.analyze("varience", [run]), "did you mean 'variance'?"),
    ):
        assert words in refused("", call, error=broadsight.UsageError)


def test_names__are_lazy_and_listed():
    assert broadsight.swap_pool is swap_pool and {"train", "open_run", "layers", "UsageError"} <= set(dir(broadsight))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        broadsight.nonsense  # noqa: B018
