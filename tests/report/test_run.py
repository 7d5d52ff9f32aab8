"""The report of a run: what it says is what the run did."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from broadsight.cli.main import main
from broadsight.cli.train import _conclude
from broadsight.evaluation.tasks import own_splits
from broadsight.report import run as reporting
from broadsight.report.run import report_run, samples
from broadsight.runs.classifier import open_classifier
from broadsight.training.engine import Engine, Interrupted
from broadsight.training.run import train

from ..training.small_runs import ask, fill, without_drawing


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with its report, and the images."""
    folder = tmp_path_factory.mktemp("reported")
    data = fill(folder / "data", 40, red=12, green=12, blue=12)
    (data / "red" / "broken.png").write_bytes(b"no image")
    with pytest.MonkeyPatch.context() as patch:
        without_drawing(patch)
        changes = dict(epochs=2, mixup=0.8, erasing=0.5, smoothing=0.1)
        outcome = train(replace(ask(data, out=str(folder / "run"), changes=changes), report=True), reporter=report_run)
    return outcome


def test_report__says_what_the_run_found(finished):
    page = finished.report.read_text()
    assert finished.report == finished.folder / "report.html" and not finished.notes[2:]
    assert f"{finished.progress.best:.1f} %" in page
    for section in ("curves", "figures", "per_class", "confusion", "calibration", "samples", "skipped", "facts"):
        assert f'<section id="{section}"' in page, section
    assert "finished after 2 of 2 epochs" in page and "red/broken.png" in page and "mixup" in page


def test_report__top1_is_that_of_the_best_epoch(finished):
    classifier = open_classifier(finished.folder, device="cpu")
    evaluation = reporting._evaluation(classifier, own_splits(classifier), 0)
    assert evaluation.results[0].figures["top1"] == pytest.approx(finished.progress.best)
    lines = [json.loads(line) for line in (finished.folder / "metrics.jsonl").read_text().splitlines()]
    best = next(line for line in lines if line.get("epoch") == finished.progress.best_epoch and line["kind"] == "epoch")
    assert evaluation.results[0].figures["loss"] == pytest.approx(best["val_loss"], rel=1e-5)


def test_samples__as_the_run_saw_its_first_images_in_words(finished):
    classifier = open_classifier(finished.folder, device="cpu")
    shown = samples(classifier, own_splits(classifier), 8)
    assert len(shown) == 8 and all(image.image.size == (32, 32) for image in shown)
    mixed = [image.caption for image in shown if "+" in image.caption]
    assert mixed and all(re.fullmatch(r"(\w+ \d+ % \+ )+\w+ \d+ %", caption) for caption in mixed)
    again = samples(classifier, own_splits(classifier), 8)
    assert [np.array(a.image).tobytes() for a in shown] == [np.array(b.image).tobytes() for b in again]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    samples(classifier, own_splits(classifier), 4)
    assert torch.equal(torch.get_rng_state(), before)
    for target, text in ((1, "b"), ([0.05, 0.9, 0.05], "b"), ([0.05, 0.35, 0.65], "c 67 % + b 33 %")):  # smoothed too
        assert reporting._target(torch.tensor(target), "abc") == text


def test_command__writes_it_again_and_twins_are_compared(finished, tmp_path, capsys):
    finished.report.unlink()
    assert main(["report", str(finished.folder), "--workers", "0", "--threads", "1"]) == 0
    assert capsys.readouterr().out == f"report: {finished.report}\n" and finished.report.is_file()
    assert main(["report", str(finished.folder / "last")]) == 2
    assert "there is no run in" in capsys.readouterr().err
    shutil.copytree(finished.folder, tmp_path / "run")
    shutil.copytree(finished.folder, tmp_path / "run" / "twin-gap")
    page = report_run(tmp_path / "run", evaluated=False).read_text()
    assert '<section id="twins"' in page and "twin-gap" in page


def test_interrupted__curves_alone(finished, tmp_path, monkeypatch):
    without_drawing(monkeypatch)
    data = finished.folder.parent / "data"

    def stop(engine):
        raise Interrupted("stopped", 130)

    monkeypatch.setattr(Engine, "fit", stop)
    with pytest.raises(Interrupted):
        train(replace(ask(data, out=str(tmp_path / "run")), report=True), reporter=report_run)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "stopped after 0 of 1 epochs" in page and "the run has not finished" in page


def test_failure__of_the_page_leaves_the_run_whole(finished, tmp_path, monkeypatch):
    without_drawing(monkeypatch)

    def fail(*args, **kwargs):
        raise RuntimeError("no ink\nat all")

    monkeypatch.setattr(reporting, "render", fail)
    asked = ask(finished.folder.parent / "data", out=str(tmp_path / "run"), report=True)
    outcome = train(asked, reporter=report_run)
    assert outcome.report is None and outcome.notes[-1] == "no report.html: no ink"
    assert (tmp_path / "run" / "model.safetensors").is_file() and not (tmp_path / "run" / "report.html").exists()


def test_run__validated_on_one_class_keeps_its_last_weights(tmp_path, monkeypatch, capsys):
    """Who always says that class would have 100 %, for ever the best."""
    without_drawing(monkeypatch)
    fill(tmp_path / "data" / "train", red=4, green=4, blue=4)
    fill(tmp_path / "data" / "val", red=3)
    request = ask(tmp_path / "data", out=str(tmp_path / "run"), changes=dict(epochs=2), report=True)
    outcome = train(request, reporter=report_run)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val_top1"] is not None and (last["best"], last["best_epoch"]) == (None, 0)
    assert outcome.progress.best is None and any("all of one class, red" in note for note in outcome.notes)
    page = outcome.report.read_text()
    assert "no epoch has a top-1 to be compared by" in page
    classifier = open_classifier(outcome.folder, device="cpu")  # the weights of the last epoch
    evaluation = reporting._evaluation(classifier, own_splits(classifier), 0)
    assert evaluation.results[0].figures["loss"] == pytest.approx(last["val_loss"], rel=1e-5)
    assert "balanced_accuracy" in evaluation.results[0].absent
    _conclude([outcome])
    assert "no epoch has a top-1 to be compared by: the weights are those of the last one" in capsys.readouterr().out
