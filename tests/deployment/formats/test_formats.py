"""Every format: what is written is read in its own runtime, says what it is, and computes the same."""

from pathlib import Path

import numpy as np
import pytest
import torch

from broadsight.benchmark.settings import RUNTIMES
from broadsight.deployment import FORMATS, Description, Session, capture, compare, need, open_artefact
from broadsight.deployment.formats import Format, of_file, register, runtimes
from tests.deployment.tiny import Pair, Tiny, described

SINGLE = [name for name, form in FORMATS.items() if form.suffix]  # the page has tests of its own


def written(name: str, folder: Path, model: torch.nn.Module, description: Description) -> Path:
    for package in FORMATS[name].packages:
        pytest.importorskip(package)
    image = description.image
    program = capture(model.eval(), description.shape, any_batch=image["any_batch"], any_size=image["any_size"])
    path = folder / f"model{FORMATS[name].suffix}"
    FORMATS[name].write(program, description, path)
    return path


def reference(model: torch.nn.Module):
    def run(images: np.ndarray) -> list[np.ndarray]:
        with torch.no_grad():
            found = model(torch.from_numpy(images))
        return [one.numpy() for one in (found if isinstance(found, tuple) else (found,))]

    return run


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", SINGLE)
def test_write_and_open__the_same_numbers_and_description(name, tmp_path):
    form, model = FORMATS[name], Tiny()
    said = described(32, any_batch=form.batches)
    path = written(name, tmp_path, model, said)
    assert {file.suffix for file in tmp_path.iterdir()} == set(form.files)
    session = open_artefact(path, threads=1)
    assert session.description == said
    found = compare(session, reference(model), [noise(1, 3, 32, 32), noise(3, 3, 32, 32)])
    assert found.within(1e-5), found
    assert found.largest > 0 or name == "pt2"  # another runtime rounds in another way: it did run


@pytest.mark.parametrize("name", [name for name in SINGLE if FORMATS[name].sizes])
def test_write_and_open__any_size_and_two_outputs(name, tmp_path):
    model = Pair()
    path = written(name, tmp_path, model, described(64, any_size=True, outputs=("maps", "logits"), task="segment"))
    session = open_artefact(str(path))
    found = compare(session, reference(model), [noise(2, 3, 64, 64), noise(1, 3, 75, 130)])
    assert found.within(1e-5) and found.same_class is None
    assert session(noise(1, 3, 90, 66))["maps"].shape == (1, 8, 45, 33)


@pytest.mark.parametrize("name", SINGLE)
def test_open__refuses_damaged_and_foreign_files(name, tmp_path):
    for package in FORMATS[name].packages:
        pytest.importorskip(package)
    path = tmp_path / f"model{FORMATS[name].suffix}"
    path.write_bytes(b"not a model")
    with pytest.raises(ValueError, match="cannot be opened"):
        open_artefact(path)


def test_open__refuses_an_onnx_file_without_description(tmp_path):
    onnx = pytest.importorskip("onnx")
    path = written("onnx", tmp_path, Tiny(), described())
    model = onnx.load(path)
    del model.metadata_props[:]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="does not say what it is"):
        open_artefact(path)


def test_open__refuses_what_is_not_there_and_other_endings(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no"):
        open_artefact(tmp_path / "absent.pt2")
    with pytest.raises(ValueError, match=r"\.pte, \.onnx, \.xml, \.pt2"):
        open_artefact(tmp_path / "model.tflite")


def test_onnx__others_can_read_task_and_classes(tmp_path):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(written("onnx", tmp_path, Tiny(), described()))
    kept = {one.key: one.value for one in model.metadata_props}
    assert kept["classes"].split("\n") == ["ant", "bée", "cat", "dog"] and kept["task"] == "classify"
    assert [one.name for one in model.graph.input] == ["images"]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim[1:]] == [3, 32, 32]
    assert model.opset_import[0].version == 20


def test_need__names_the_pip_line(monkeypatch):
    monkeypatch.setattr("broadsight.deployment.formats.find_spec", lambda package: None)
    for name, extra in (("onnx", "export"), ("web", "export"), ("openvino", "openvino"), ("executorch", "executorch")):
        with pytest.raises(ValueError, match=rf'run: pip install "broadsight\[{extra}\]"'):
            need(name)
    assert need("pt2") is FORMATS["pt2"]
    with pytest.raises(ValueError, match="nncf"):
        need("openvino", int8=True)


def test_need__refuses_unknown_names_and_int8_where_there_is_none():
    with pytest.raises(ValueError, match="did you mean 'openvino'"):
        need("opnvino")
    with pytest.raises(ValueError, match="onnx, openvino, web"):
        need("pt2", int8=True)


def test_register__a_format_of_ones_own_is_found_by_all(tmp_path, monkeypatch):
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
    with pytest.raises(ValueError, match=r"model\.mine cannot be opened by nothing: KeyError: 'no such"):
        open_artefact(path)


def test_runtimes__are_those_of_the_benchmark():
    assert set(runtimes()) == set(RUNTIMES) - {"eager", "compile"}
    assert runtimes()["int8"] == ("onnx", True) and "web" not in runtimes()


def test_capture__says_why_not():
    class Stubborn(Tiny):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) > 0 else x

    with pytest.raises(ValueError, match="Stubborn cannot be captured for any batch: "):
        capture(Stubborn().eval(), (3, 32, 32))
