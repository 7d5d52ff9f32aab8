"""Figures of classifiers on images, and what is written about them."""

import csv
import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from broadsight.cli.main import main
from broadsight.evaluation import run as evaluating
from broadsight.evaluation.record import record_of
from broadsight.evaluation.request import Request
from broadsight.evaluation.robustness import run_suite
from broadsight.evaluation.run import evaluate, latencies
from broadsight.report.run import write_evaluation
from broadsight.runs.classifier import open_classifier

from ..training.small_runs import fill, leave_run, refusal
from .test_tasks import name_classes

CLASSES = ["red", "green", "blue"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Images that are mostly red, green or blue, one that is called blue and is red, and one that is none."""
    folder = fill(tmp_path_factory.mktemp("data"), 32, red=4, green=3, blue=2)
    Image.open(folder / "red" / "000.png").save(folder / "blue" / "false.png")
    (folder / "green" / "broken.png").write_bytes(b"no image")
    os.rename(folder / "red" / "003.png", os.fsencode(folder / "red") + b"/caf\xe9.png")  # no Unicode
    return folder


class Brightest(torch.nn.Module):
    """Its logits are the means of the channels."""

    num_classes = 3

    def __init__(self, **_):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return 10 * self.scale * x.mean((2, 3))


@pytest.fixture
def brightest(tmp_path, monkeypatch):
    """A run whose model names the brightest channel; how it is loaded is tested elsewhere."""
    folder, _ = leave_run(tmp_path / "run", num_classes=3)
    name_classes(folder, CLASSES)

    def opened(source, **options):
        classifier = open_classifier(source, device="cpu")
        return type(classifier)(**{**vars(classifier), "model": Brightest()})

    monkeypatch.setattr("broadsight.runs.opening.open_classifier", opened)
    return folder


def test_precision__of_each_model_is_recorded_and_figures_stay(data, tmp_path):
    torch.manual_seed(0)
    folder, _ = leave_run(tmp_path / "run", num_classes=3)
    name_classes(folder, CLASSES)
    asked, said = Request(str(folder), str(data), workers=0, threads=1), []
    single, half = (evaluate(one, tell=said.append) for one in (asked, replace(asked, precision="bf16")))
    assert 0 < abs(half.figures["loss"] / single.figures["loss"] - 1) < 0.05
    record = record_of(half)
    assert record["model"]["precision"] == "bf16" and record["asked"]["precision"] == "bf16"
    assert ["precision", "bf16"] in record["facts"][0]["rows"] and "computes in bf16" in str(said)


def test_figures_and_record__by_hand(brightest, data, tmp_path):
    done = []
    asked = Request(str(brightest), str(data), workers=0, batch=4, threads=1, command="broadsight eval ...")
    (result,) = evaluate(asked, lambda *now: done.append(now)).results
    # Red 4 of 4, green 3 of 3, blue 2 of 3; the fourth green one cannot be read
    found = result.figures["top1"], result.figures["balanced_accuracy"]
    assert found == pytest.approx((90, 100 * (1 + 1 + 2 / 3) / 3)) and result.absent.keys() == {"top5", "ece"}
    assert list(result.predictions.skipped) == ["green/broken.png"]
    assert result.latency is not None and result.latency.median > 0 and done[-1][:2] == (10, 11)
    record = write_evaluation(evaluate(replace(asked, bins=5)), tmp_path / "out").record
    assert record == json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert record["confusion"] == [[4, 0, 0], [0, 3, 0], [1, 0, 2]]
    assert record["confused"] == [{"class": "blue", "as": "red", "count": 1, "share": pytest.approx(100 / 3)}]
    assert sum(row["count"] for row in record["calibration"]["bins"]) == 10
    assert record["model"]["parameters"] == 1 and record["data"]["images"] == 11
    assert record["command"] == "broadsight eval ..." and record["versions"]["torch"]
    assert record["skipped"].keys() == {"green/broken.png"}
    with (tmp_path / "out" / "predictions.csv").open(encoding="utf-8", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    assert os.fsencode(rows[-1]["file"]) == b"red/caf\xe9.png"
    wrong = [(row["file"], row["label"], row["predicted"]) for row in rows if row["rank"] != "1"]
    assert len(rows) == 10 and wrong == [("blue/false.png", "blue", "red")]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "blue, taken for red" in page and "blue/false.png" in page and "green/broken.png" in page


def test_suites__beside_another(brightest, data, tmp_path):
    (tmp_path / "mine.py").write_text("def light(images, batch):\n    return images.mean(1)\n")
    hard: dict = dict(occluded=(1.0,), corruptions="brightness", severities=1, epsilons="255")
    hard["saliency"] = f"{tmp_path / 'mine.py'}:light"
    both: dict = dict(suite="robustness", beside=str(brightest), workers=0, threads=1, samples=6)
    asked = Request(str(brightest), str(data), **both, **hard)
    counted = []
    evaluation = evaluate(asked, lambda done, total, doing: counted.append((done, total)))
    first, second = evaluation.results
    assert [suite.name for suite in first.suites] == ["occlusion", "fgsm", "salient", "corruptions"]
    assert first.suites == second.suites and len(first.predictions) <= 6
    clean = first.figures["top1"]
    # Nothing is left of an occluded image: all logits are equal, and the first class, red, is the answer
    red = 100 * float((first.predictions.labels == 0).mean())
    assert [row.top1 for row in first.suites[0].rows] == [pytest.approx(clean), pytest.approx(red)]
    record = record_of(evaluation)
    assert [entry["model"] for entry in record["suites"]] == 4 * ["run"] + 4 * ["run (2)"]
    assert record["beside"][0]["figures"] == record["figures"]
    assert json.loads(json.dumps(record)) == record


def test_measure__latencies_are_taken_in_turns_and_macs_may_not_be_counted(brightest, monkeypatch):
    monkeypatch.setattr(evaluating, "executed_macs", lambda *_: 1 / 0)
    assert evaluating.macs_of(open_classifier(brightest, device="cpu")) is None
    order = []

    class Slow:
        device = torch.device("cpu")

        def __init__(self, name):
            self.name, self.transforms = name, type("T", (), dict(channels=3, size=8))
            self.normalise, self.model = lambda images: images, lambda images: order.append((name, tuple(images.shape)))

    summaries = latencies([Slow("a"), Slow("b")], rounds=3)
    assert len(summaries) == 2 and order[0] == ("a", (1, 3, 8, 8))
    assert sorted(name for name, _ in order) == 6 * ["a"] + 6 * ["b"]
    assert [name for name, _ in order[:4]] == ["a", "b", "b", "a"]


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(*argv):
        code = main(["eval", *map(str, argv), "--workers", "0", "--threads", "1"])
        return code, *capsys.readouterr()

    return call


def test_command__tables_and_files(run, brightest, data, tmp_path):
    code, out, err = run(brightest, data)
    assert code == 0 and "90.00" in out and "1 images could not be read" in err
    folder = tmp_path / "evaluations" / f"{data.name}-run-1"
    last = f"report: evaluations/{folder.name}/report.html (with evaluation.json and predictions.csv)"
    assert out.splitlines()[-1] == last
    assert sorted(path.name for path in folder.iterdir()) == ["evaluation.json", "predictions.csv", "report.html"]
    assert run(brightest, data, "--out", "mine", "--suite", "occlusion")[0] == 0
    assert json.loads((tmp_path / "mine" / "evaluation.json").read_text())["suites"][0]["name"] == "occlusion"
    assert run(brightest, data)[1].splitlines()[-1].startswith(f"report: evaluations/{data.name}-run-2/")
    record = json.loads(run(brightest, data, "--no-latency", "--json")[1])  # alone
    assert record["figures"]["top1"] == pytest.approx(90) and record["model"]["latency_ms"] is None
    assert record["asked"]["data"] == str(data)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["RUN", "DATA", "--suite", "fog"], "unknown suite 'fog'; suites are occlusion"),
        (["RUN", "DATA", "--metrics", "top5"], "top5 needs more than 5 classes; 3 given"),
        # Before any is asked, so the one that cannot be read counts
        (["RUN", "DATA", "--metrics", "ece"], "ece needs at least as many images as bins, 15; 11 given"),
        (["RUN", "DATA", "--severities", "9", "--suite", "corruptions"], "severity 9"),
        (["RUN", "DATA", "--suite", "fgsm", "--epsilons", "x"], "--epsilons: expected numbers joined by commas, got x"),
        (["RUN", "DATA", "--saliency", "scenes", "--suite", "salient"], "saliency of the scenes needs scenes as data"),
        (["RUN", "DATA", "--out", "DATA"], "exists and is not an empty folder"),
        (["RUN", "DATA", "--out", "LIST/out"], "list.csv is a file; choose another --out"),
        (["RUN", "none"], "no such data: none"),
        (["RUN", "OTHERS"], "has 2 of 2 classes that run was not trained on: cat, dog"),
        (["RUN", "LIST", "--allow-outside"], "1 of 2 images in"),
        (["RUN", "NUMBERS", "--allow-outside"], "has the label 7, outside the range of run: 0 to 2"),
        (["RUN", "DATA", "--suite", "imagenet-a"], "--suite imagenet-a is about ImageNet's 1,000 classes"),
        (["EMPTY", "DATA"], "holds no weights (model.safetensors)"),
        (["RUN", "DATA", "--json", "none/x.json"], "there is no folder"),
        (["RUN", "DATA", "--part", "train"], "has no part 'train'"),
    ],
)
def test_command__one_line_and_exit_2(run, brightest, data, tmp_path, argv, message):
    (tmp_path / "list.csv").write_text(f"path,label\n{data}/red/000.png,red\nnone.png,red\n")
    (tmp_path / "numbers.csv").write_text(f"path,label\n{data}/red/000.png,0\n{data}/red/001.png,7\n")
    leave_run(tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors").unlink()
    names = {"RUN": brightest, "DATA": data, "OTHERS": fill(tmp_path / "others", 8, cat=1, dog=1)}
    names |= {"LIST": "list.csv", "LIST/out": "list.csv/out", "NUMBERS": "numbers.csv", "EMPTY": "empty"}
    code, out, err = run(*(names.get(word, word) for word in argv))
    assert (code, out, len(err.splitlines())) == (2, "", 1) and message in err
    assert not (tmp_path / "evaluations").exists()


def test_command__interrupted_keeps_what_is_finished_and_a_diverged_model_is_exit_1(
    run, brightest, data, monkeypatch, tmp_path
):
    def stop(name, *args, **kwargs):
        if name == "fgsm":
            raise KeyboardInterrupt
        return run_suite(name, *args, **kwargs)

    monkeypatch.setattr(evaluating, "run_suite", stop)
    code, _, err = run(brightest, data, "--suite", "occlusion,fgsm", "--out", "stopped")
    record = json.loads((tmp_path / "stopped" / "evaluation.json").read_text())
    assert code == 130 and "note: interrupted: suites that were not finished are missing" in err
    assert [suite["name"] for suite in record["suites"]] == ["occlusion"] and record["how"]["interrupted"]
    assert (tmp_path / "stopped" / "report.html").is_file()
    monkeypatch.setattr(Brightest, "forward", lambda self, x: x.mean((2, 3)) * np.nan)
    code, _, err = run(brightest, data)
    assert code == 1 and err.startswith("broadsight: run answers 10 of 10 images with numbers that are not finite")


def test_evaluate__classes_without_images_are_named_and_images_without_labels_refused(brightest, tmp_path, monkeypatch):
    told = []
    data = fill(tmp_path / "data", 32, red=3, green=2)
    evaluation = evaluate(Request(str(brightest), str(data), workers=0, latency=False), tell=told.append)
    assert any("all 3 compete; there are none of blue" in note for note in told)
    record = record_of(evaluation)
    assert record["coverage"] == {"occurring": 2, "classes": 3}
    blue = next(row for row in record["per_class"] if row["class"] == "blue")
    assert (blue["recall"], blue["precision"], blue["f1"]) == (None, None, None)
    page = write_evaluation(evaluation, tmp_path / "out") and (tmp_path / "out" / "report.html").read_text()
    assert "over 2 of 3 classes, since the others do not occur" in page
    asked = evaluation.request
    found, ((task,),) = evaluating.open_tasks(asked, evaluating.open_classifiers(asked))
    empty = replace(task, accepted={0: [], 1: []})
    monkeypatch.setattr(evaluating, "open_tasks", lambda *_: (found, [[empty]]))
    monkeypatch.setattr(evaluating, "ask", lambda *_: pytest.fail("work was begun"))
    assert "has an accepted label" in refusal(lambda: evaluate(asked))
