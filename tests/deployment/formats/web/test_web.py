"""The folder of a page: whole or not there, never over somebody's files, and nothing in it that asks the model."""

import json
import re
from importlib.resources import files

import pytest

from broadsight.deployment import FORMATS
from broadsight.deployment.formats import web as web_format
from broadsight.deployment.formats.web import check_folder, manifest, model_bytes, require
from broadsight.deployment.formats.web.runtime import GLUE, SCRIPT, WASM
from tests.deployment.tiny import described
from tests.refusals import refused

write = FORMATS["web"].write
MODEL = bytes(range(256)) * 40  # whatever it is, it comes out again


@pytest.fixture
def runtime(tmp_path):
    folder = tmp_path / "ort"
    folder.mkdir()
    for name in (SCRIPT, GLUE, WASM):
        (folder / name).write_text(f"/*! ONNX Runtime Web v9.8.7 */ {name}")
    return folder


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.onnx").write_bytes(MODEL)
    return tmp_path / "model.onnx"


def below(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_write__everything_is_inside(tmp_path, runtime, model, monkeypatch):
    monkeypatch.setattr(web_format, "PART", 4096)
    classes = ("ant", "</script>", "line\u2028separator", "bée", '"; alert(1); "')
    said = described(classes=classes, quantised={"kept": ["head"]})
    write(model, said, tmp_path / "new" / "page", ort_web=runtime)
    folder = tmp_path / "new" / "page"
    assert below(folder) == {
        *("index.html", "style.css", "resampling.js", "images.js", "model.js", "page.js", "manifest.js"),
        *("runtime/ort.wasm.min.js", "runtime/LICENSE.txt", "runtime/glue-000.js", "runtime/wasm-000.js"),
        *("model/part-000.js", "model/part-001.js", "model/part-002.js"),
    }
    found = manifest(folder)
    assert found["description"] == json.loads(said.to_json()) and set(found["files"]) == below(folder)
    assert found["packed"]["model"]["bytes"] == len(MODEL) and model_bytes(folder) == MODEL
    assert "onnxruntime-web 9.8.7" in found["made"]
    assert (folder / "runtime" / SCRIPT).read_bytes() == (runtime / SCRIPT).read_bytes()
    assert "MIT License" in (folder / "runtime" / "LICENSE.txt").read_text()
    assert (folder / "manifest.js").read_text().isascii()
    assert [path.name for path in folder.parent.iterdir()] == ["page"]
    assert folder.stat().st_mode & 0o077 == (tmp_path / "new").stat().st_mode & 0o077  # a web server may read it


def test_write__again_over_its_own(tmp_path, runtime, model):
    folder = tmp_path / "page"
    folder.mkdir()  # empty
    write(model, described(title="first"), folder, ort_web=runtime)
    model.write_bytes(b"other")
    write(model, described(title="second"), folder, ort_web=runtime)
    assert manifest(folder)["description"]["title"] == "second"
    assert model_bytes(folder) == b"other"
    assert {path.name for path in tmp_path.iterdir()} == {"page", "ort", "model.onnx"}


def test_write__never_over_others(tmp_path, runtime, model, monkeypatch):
    folder = tmp_path / "page"
    write(model, described(), folder, ort_web=runtime)
    (folder / "holiday.txt").write_text("mine")
    refused("page also holds holiday.txt, which would be lost", write, model, described(), folder, ort_web=runtime)
    assert (folder / "holiday.txt").read_text() == "mine"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").write_text("mine")
    words = "other is not empty and not the folder of such a page; give a new one"
    refused(words, write, model, described(), tmp_path / "other", ort_web=runtime)
    refused("model.onnx is there and no folder", check_folder, model)
    monkeypatch.chdir(tmp_path)
    refused("the folder that this runs in", check_folder, ".")
    check_folder("new")


def test_write__nothing_is_left_of_a_failure(tmp_path, runtime, model):
    write(model, described(title="old"), tmp_path / "page", ort_web=runtime)
    for name in ("page", "fresh"):
        with pytest.raises(FileNotFoundError):
            write(tmp_path / "missing.onnx", described(title="new"), tmp_path / name, ort_web=runtime)
    assert manifest(tmp_path / "page")["description"]["title"] == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"page", "ort", "model.onnx"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "detect"}, "the format web shows classifiers; tiny is for --task detect"),
        ({"channels": 4}, "images of 4 channels; a page can give 1"),
        ({"channels": 1}, "tiny has 3 means for 1 channels"),
        ({"interpolation": "random"}, "interpolation=random of tiny; a page can do nearest, bilinear, bicubic"),
        ({"resize": [40, 30]}, "resize=[40, 30] of tiny; expected pixels of the shorter side"),
        ({"crop": 30}, "tiny takes 32 x 32 pixels, but a crop of 30 is made"),
    ],
)
def test_require__refuses_what_a_page_cannot_do(changes, said):
    usual = described().preprocessing
    preprocessing = usual | {name: changes.pop(name) for name in [*changes] if name in usual}
    refused(re.escape(said), require, described(preprocessing=preprocessing, **changes))


@pytest.mark.parametrize("key", ["interpolation", "resize", "crop"])
def test_require__preprocessing_that_is_not_said(key):
    fewer = {name: kept for name, kept in described().preprocessing.items() if name != key}
    refused(f"does not say how images are prepared: no {key}", require, described(preprocessing=fewer))


def test_model_bytes__damaged(tmp_path, runtime, model):
    folder = tmp_path / "page"
    write(model, described(), folder, ort_web=runtime)
    part = folder / "model" / "part-000.js"
    part.write_text(part.read_text()[:-200] + '");\n')
    refused(r"the model in .*page is damaged .*export it again", model_bytes, folder)
    part.unlink()
    refused("is damaged", model_bytes, folder)
    refused("is not the folder of a page that `broadsight export --format web` wrote", manifest, runtime)


def test_page__asks_nobody_and_names_its_limits():
    """No address of anything else in what we write; the policy forbids the rest to the runtime too."""
    page = files("broadsight.deployment.formats.web")
    for name in web_format.PAGE:
        assert not re.search(r"https?:|//[a-z]|fetch\(|XMLHttpRequest|WebSocket", (page / name).read_text()), name
    html = (page / "index.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)[1]
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy and "'unsafe-eval'" not in policy
    loaded = re.findall(r'<script defer src="([^"]+)"', html)
    assert set(loaded) <= {*web_format.PAGE, web_format.MANIFEST, f"runtime/{SCRIPT}"} and loaded[-1] == "page.js"
    most = re.search(r"MOST_PIXELS = ([\d_]+)", (page / "images.js").read_text())[1].replace("_", "")
    assert f"up to {int(most) // 10**6} million pixels" in html
