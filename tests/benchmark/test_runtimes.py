"""Exported runtimes of the benchmark: what they answer, what they refuse, what their rows hold."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from broadsight.benchmark import cold_start as start_up
from broadsight.benchmark import runtimes as exported_runtimes
from broadsight.benchmark.candidates import Variant, build, create
from broadsight.benchmark.cold_start import StartUp
from broadsight.benchmark.report import render
from broadsight.benchmark.run import Report, Settings, measure
from broadsight.benchmark.runtimes import Artefacts, file_bytes
from broadsight.deployment.formats import runtimes
from tests.refusals import refused

from .conftest import shown

QUICK = Settings(batch=2, size=(32, 32), rounds=2, warmup=0, runtimes=("eager", "pt2"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("artefacts")


@pytest.fixture(scope="module")
def report(kept) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_up, "measure", lambda candidate, settings, artefact: StartUp(1.5, 0.25, 4_000_000))
        return measure(["test_resnet"], QUICK, artefacts=kept)


def test_measure__rows_of_exported_runtimes(report, kept):
    eager, exported = report.rows
    assert [row.runtime for row in report.rows] == ["eager", "pt2"]
    assert exported.peak_bytes is None and eager.peak_bytes > 0
    assert eager.difference is None and exported.difference < 1e-5
    assert (eager.start_up_s, exported.import_s, exported.resident_bytes) == (0.25, 1.5, 4_000_000)
    sizes = {path.suffix: path.stat().st_size for path in kept.iterdir()}
    assert (eager.artefact_bytes, exported.artefact_bytes) == (sizes[".safetensors"], sizes[".pt2"])
    assert eager.artefact_bytes > 4 * eager.params and len(sizes) == 2
    assert Report.from_dict(json.loads(json.dumps(dataclasses.asdict(report)))) == report
    text = shown(render(report))
    assert all(word in text for word in ("start-up", "resident", "file", "0.25", "4.0", "folded first"))
    assert "noise" not in text and "page" not in text


def test_measure__kept_artefacts_are_used_again(report, kept, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    monkeypatch.setattr(exported_runtimes, "capture", None)
    settings = dataclasses.replace(QUICK, start_up=False, rounds=1)
    row = measure(["test_resnet"], settings, artefacts=kept).rows[1]
    assert row.artefact_bytes == report.rows[1].artefact_bytes and row.start_up_s is None
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == before


def test_key__follows_weights_size_and_code(monkeypatch, tmp_path):
    model = create(Variant("test_resnet"), QUICK).eval()
    images = torch.zeros(1, 3, 32, 32)
    key = exported_runtimes._key
    assert key(model, "a", images) == key(model, "a", images)
    others = {key(model, "a", images), key(model, "b", images), key(model, "a", images[..., :16])}
    with torch.no_grad():
        next(model.parameters()).add_(1)
    others.add(key(model, "a", images))
    tmp_path.joinpath("other.py").write_text("changed")
    monkeypatch.setattr(exported_runtimes, "_sources", lambda model, exporting: {tmp_path / "other.py"})
    assert len({*others, key(model, "a", images)}) == 5


def test_open__answers_as_the_model_does_whatever_the_batch(kept):
    settings = dataclasses.replace(QUICK, runtimes=("pt2",), batch=3)
    (candidate,) = build(Variant("test_resnet"), settings, None, Artefacts(kept, 1))
    images = []
    candidate.model.register_forward_pre_hook(lambda module, inputs: images.extend(inputs))
    found = candidate.forward()
    assert images == []  # the artefact answers, not the module
    torch.manual_seed(settings.seed)
    with torch.no_grad():
        expected = candidate.model(torch.randn(3, 3, 32, 32))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_open__refuses_other_answers_but_int8_may_be_rough(kept, report, monkeypatch):
    right = exported_runtimes.open_artefact

    def wrong(path, threads, precision):
        session = right(path, threads, precision)
        run = session._run
        session._run = lambda images: [1.01 * one for one in run(images)]
        return session

    monkeypatch.setattr(exported_runtimes, "open_artefact", wrong)
    words = r"outputs in pt2 differ from torch's by 0\.01 of the largest"
    refused(words, measure, ["test_resnet"], QUICK, artefacts=kept, error=RuntimeError)
    expected = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).numpy()
    assert exported_runtimes._checked("int8", expected, 1.2 * expected) == pytest.approx(0.2, rel=1e-3)
    for nonsense in (-expected, expected * float("nan")):
        refused("outputs in int8 have a cosine of", exported_runtimes._checked, "int8", expected, nonsense)
    words = r"outputs of shape \(1, 50\) in onnx, \(2, 50\) in torch"
    refused(words, exported_runtimes._checked, "onnx", expected, expected[:1])


@pytest.mark.parametrize(
    ("runtime", "package", "extra"),
    [("onnx", "onnxruntime", "export"), ("int8", "onnx", "export"), ("executorch", "executorch", "executorch")],
)
def test_measure__says_how_to_install_what_is_missing(runtime, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    words = rf'{package}.* not installed; run: pip install "broadsight\[{extra}\]"'
    refused(words, measure, ["test_resnet"], dataclasses.replace(QUICK, runtimes=("eager", runtime)))


def test_file_bytes_and_folders(tmp_path):
    for name, size in (("a.xml", 3), ("a.bin", 40), ("a.onnx", 500)):
        tmp_path.joinpath(name).write_bytes(bytes(size))
    assert (file_bytes(tmp_path / "a.xml"), file_bytes(tmp_path / "a.onnx")) == (43, 500)
    tmp_path.joinpath("file").touch()
    refused("it is a file; give the name of a folder", measure, ["test_resnet"], QUICK, artefacts=tmp_path / "file")


@pytest.mark.slow
@pytest.mark.parametrize("runtime", runtimes())
def test_measure__every_runtime(runtime):
    for package in exported_runtimes.FORMATS[runtimes()[runtime][0]].packages:
        pytest.importorskip(package)
    settings = dataclasses.replace(QUICK, runtimes=("eager", runtime), size=(64, 64))
    eager, exported = measure(["test_resnet"], settings).rows
    assert exported.difference < (0.5 if runtimes()[runtime][1] else 1e-4)
    assert exported.start_up_s > 0 and exported.artefact_bytes > 1e5
    assert (exported.artefact_bytes < 0.6 * eager.artefact_bytes) == runtimes()[runtime][1]
