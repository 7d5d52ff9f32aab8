"""Every format: what is written is read in its own runtime, says what it is, and computes the same."""

from dataclasses import replace

import pytest
import torch

from broadsight.benchmark.settings import RUNTIMES
from broadsight.deployment import FORMATS, Description, Session, compare, need, open_artefact
from broadsight.deployment.formats import Format, of_file, register, runtimes
from broadsight.inspection.precision import DTYPES
from tests.deployment.tiny import Pair, Tiny, described, needed, noise, reference, written
from tests.refusals import refused

SINGLE = [name for name, form in FORMATS.items() if form.suffix]  # the page has tests of its own


@pytest.mark.parametrize("name", SINGLE)
def test_write_and_open__the_same_numbers_and_description(name, tmp_path):
    form, model = FORMATS[name], Tiny()
    said = described(32, any_batch=form.batches)
    path = written(name, tmp_path, model, said)
    assert {file.suffix for file in tmp_path.iterdir()} == set(form.files)
    session = open_artefact(path, threads=1)
    assert session.description == said
    found = compare(session, reference(model), [noise(1, 3, 32, 32), noise(3, 3, 32, 32)])
    assert found.within(1e-5) and (found.largest > 0 or name == "pt2"), found  # other runtimes round otherwise


@pytest.mark.parametrize("name", [name for name in SINGLE if FORMATS[name].sizes])
def test_write_and_open__any_size_and_two_outputs(name, tmp_path):
    model = Pair()
    path = written(name, tmp_path, model, described(64, any_size=True, outputs=("maps", "logits"), task="segment"))
    session = open_artefact(str(path))
    found = compare(session, reference(model), [noise(2, 3, 64, 64), noise(1, 3, 75, 130)])
    assert found.within(1e-5) and found.same_class is None
    assert session(noise(1, 3, 90, 66))["maps"].shape == (1, 8, 45, 33)


HALF = [("pt2", "bf16"), ("pt2", "fp16"), ("onnx", "fp16"), ("executorch", "fp16"), ("openvino", "bf16")]


@pytest.mark.parametrize(("name", "precision"), HALF)
def test_precision__files_are_in_it_and_sessions_say_what_they_compute_in(name, precision, tmp_path):
    needed(name)
    form = FORMATS[name]
    if precision not in form.precisions:
        pytest.skip(f"{form.runtime} has no {precision} on this CPU")
    path = written(name, tmp_path, Tiny(), described(32, any_batch=form.batches, precision=precision))
    session = open_artefact(path, 1)
    assert session.description.precision == precision and session.precision in ("fp32", precision)
    found = compare(session, reference(Tiny().eval()), [noise(1, 3, 32, 32), noise(3, 3, 32, 32)])
    assert found.relative > 1e-6 and replace(found, precision=precision).within(1e-3) and not found.within(1e-6)
    if session.precision == precision:  # in which it is opened with or without being asked for it
        assert [open_artefact(path, 1, one).precision for one in (precision, "auto")] == [precision] * 2
    for wrong in {*DTYPES} - {session.precision} if not form.chooses else ():
        refused(f"computes in {session.precision} on this CPU, not in {wrong}", open_artefact, path, 1, wrong)


def test_precision__what_is_meant_and_what_a_format_has_not(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert [FORMATS[name].precision("auto") for name in ("pt2", "onnx", "executorch")] == ["bf16", "fp32", "fp32"]
    assert FORMATS["onnx"].precision("auto", int8=True) == "fp32"
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert FORMATS["pt2"].precision("auto") == "fp32" and FORMATS["pt2"].precision("bf16") == "bf16"
    refused("--precision bf16, but ONNX Runtime has fp32 and fp16 on this CPU", FORMATS["onnx"].precision, "bf16")
    refused("ONNX Runtime in int8 has fp32 on this CPU", FORMATS["onnx"].precision, "fp16", int8=True)
    refused(r"damaged \(TypeError: the precision fp8\)", Description.from_json, described(precision="fp8").to_json())


@pytest.mark.parametrize("name", SINGLE)
def test_open__refuses_damaged_foreign_and_absent_files_and_other_endings(name, tmp_path):
    needed(name)
    path = tmp_path / f"model{FORMATS[name].suffix}"
    refused("there is no", open_artefact, path, error=FileNotFoundError)
    path.write_bytes(b"not a model")
    refused("cannot be opened", open_artefact, path)
    refused(r"\.pte, \.onnx, \.xml, \.pt2", open_artefact, tmp_path / "model.tflite")


def test_onnx__others_can_read_task_and_classes(tmp_path):
    onnx = pytest.importorskip("onnx")
    path = written("onnx", tmp_path, Tiny(), described())
    model = onnx.load(path)
    kept = {one.key: one.value for one in model.metadata_props}
    assert kept["classes"].split("\n") == ["ant", "bée", "cat", "dog"] and kept["task"] == "classify"
    assert [one.name for one in model.graph.input] == ["images"]
    batch, *sides = model.graph.input[0].type.tensor_type.shape.dim
    assert batch.dim_param and [dim.dim_value for dim in sides] == [3, 32, 32]
    assert model.opset_import[0].version == 20
    del model.metadata_props[:]
    path.write_bytes(model.SerializeToString())
    refused("does not say what it is", open_artefact, path)


def test_need__names_the_pip_line(monkeypatch):
    monkeypatch.setattr("broadsight.deployment.formats.find_spec", lambda package: None)
    for name, extra in (("onnx", "export"), ("web", "export"), ("openvino", "openvino"), ("executorch", "executorch")):
        refused(rf'run: pip install "broadsight\[{extra}\]"', need, name)
    assert need("pt2") is FORMATS["pt2"]
    refused("nncf", need, "openvino", int8=True)
    refused("did you mean 'openvino'", need, "opnvino")
    refused("onnx, openvino, web", need, "pt2", int8=True)


def test_register__a_format_of_ones_own_is_found_by_all_and_the_benchmark_knows_the_others(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, "mine", FORMATS["pt2"])  # forgotten afterwards

    @register
    class Mine(Format):
        name, files, runtime, int8 = "mine", (".mine",), "nothing", "mine-int8"

        def write(self, program, description, path):
            path.write_text(description.to_json())

        def load(self, path, threads):
            return Session(described(), lambda images: [images.mean((2, 3))])

    assert isinstance(need("mine", int8=True), Mine) and of_file(tmp_path / "a.mine") is FORMATS["mine"]
    assert runtimes()["mine"] == ("mine", False) and runtimes()["mine-int8"] == ("mine", True)
    path = written("mine", tmp_path, Tiny(), described())
    assert open_artefact(path)(noise(2, 3, 32, 32))["logits"].shape == (2, 3)
    monkeypatch.setattr(Mine, "load", lambda *_: {}["no such\nkey"])
    refused(r"model\.mine cannot be opened by nothing: KeyError: 'no such", open_artefact, path)
    monkeypatch.undo()
    assert set(runtimes()) == set(RUNTIMES) - {"eager", "compile"}
    assert runtimes()["int8"] == ("onnx", True) and "web" not in runtimes()
