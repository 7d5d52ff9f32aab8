"""The folder of a page: whole or not there, never over somebody's files, and nothing in it that asks the model."""

import base64
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from importlib.resources import files

import pytest

from broadsight.deployment import FORMATS
from broadsight.deployment.formats import web as web_format
from broadsight.deployment.formats.web import DIGESTS, GLUE, SCRIPT, WASM, check_folder, find_runtime, require
from tests.deployment.tiny import described
from tests.refusals import refused

write = FORMATS["web"].write
FILES = {SCRIPT: b"/*! ONNX Runtime Web v9.8.7 */", GLUE: b"export default 1", WASM: b"\0asm"}
MODEL = bytes(range(256)) * 40  # whatever it is, it comes out again


@pytest.fixture
def runtime(tmp_path):
    folder = tmp_path / "ort" / "dist"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
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
    found = web_format.manifest(folder)
    assert found["description"] == json.loads(said.to_json()) and set(found["files"]) == below(folder)
    assert found["packed"]["model"]["bytes"] == len(MODEL) and web_format.model_bytes(folder) == MODEL
    assert "onnxruntime-web 9.8.7" in found["made"]
    assert (folder / "runtime" / SCRIPT).read_bytes() == (runtime / SCRIPT).read_bytes()
    assert "MIT License" in (folder / "runtime" / "LICENSE.txt").read_text()
    assert (folder / "manifest.js").read_text().isascii()
    assert [path.name for path in folder.parent.iterdir()] == ["page"]
    assert folder.stat().st_mode & 0o077 == (tmp_path / "new").stat().st_mode & 0o077  # a web server may read it


def test_write__again_over_its_own_but_never_over_others(tmp_path, runtime, model, monkeypatch):
    folder = tmp_path / "page"
    folder.mkdir()  # empty
    write(model, described(title="first"), folder, ort_web=runtime)
    model.write_bytes(b"other")
    write(model, described(title="second"), folder, ort_web=runtime)
    assert web_format.model_bytes(folder) == b"other"
    for place in (folder, tmp_path / "fresh"):  # nothing is left of a failure
        with pytest.raises(FileNotFoundError):
            write(tmp_path / "missing.onnx", described(title="third"), place, ort_web=runtime)
    assert web_format.manifest(folder)["description"]["title"] == "second"
    assert {path.name for path in tmp_path.iterdir()} == {"page", "ort", "model.onnx"}
    (folder / "holiday.txt").write_text("mine")
    refused("page also holds holiday.txt, which would be lost", write, model, described(), folder, ort_web=runtime)
    assert (folder / "holiday.txt").read_text() == "mine"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").write_text("mine")
    refused("other is not empty and not the folder of such a page; give a new one", check_folder, tmp_path / "other")
    refused("model.onnx is there and no folder", check_folder, model)
    monkeypatch.chdir(tmp_path)
    refused("the folder that this runs in", check_folder, ".")
    check_folder("new")


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
    for key in ("interpolation", "resize", "crop"):
        fewer = {name: kept for name, kept in usual.items() if name != key}
        refused(f"does not say how images are prepared: no {key}", require, described(preprocessing=fewer))


def test_model_bytes__damaged(tmp_path, runtime, model):
    folder = tmp_path / "page"
    write(model, described(), folder, ort_web=runtime)
    part = folder / "model" / "part-000.js"
    part.write_text(part.read_text()[:-200] + '");\n')
    refused(r"the model in .*page is damaged .*export it again", web_format.model_bytes, folder)
    part.unlink()
    refused("is damaged", web_format.model_bytes, folder)
    refused("is not the folder of a page that `broadsight export --format web` wrote", web_format.manifest, runtime)


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


# ---- The browser's runtime comes from npm once, checked, or from a folder; or one line says what to do


@pytest.fixture
def archive(monkeypatch):
    """What a registry would send, and is known to be right."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as opened:
        for name, content in {**FILES, "other.js": b"not wanted"}.items():
            entry = tarfile.TarInfo(f"package/dist/{name}")
            entry.size = len(content)
            opened.addfile(entry, io.BytesIO(content))
    digest = base64.b64encode(hashlib.sha512(packed.getvalue()).digest()).decode()
    monkeypatch.setattr(web_format, "INTEGRITY", f"sha512-{digest}")
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    monkeypatch.setattr(web_format, "DIGESTS", sums)
    return packed.getvalue()


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """Puts a program called npm where it is found: a shell script. Every call of it leaves a line in `calls`."""
    monkeypatch.setenv("BROADSIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def put(body: str):
        program = tmp_path / "bin" / "npm"
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "calls"}\n{body}\n')
        program.chmod(0o755)
        return tmp_path / "calls"

    return put


def test_find__fetched_once_checked_and_kept(tmp_path, npm, archive):
    (tmp_path / "sent").write_bytes(archive)
    calls = npm(f"cp {tmp_path / 'sent'} onnxruntime-web-1.30.0.tgz")
    found = find_runtime()
    assert found == tmp_path / "cache" / "onnxruntime-web-1.30.0"
    assert {file.name: file.read_bytes() for file in found.iterdir()} == FILES
    assert find_runtime() == found
    assert calls.read_text() == "pack onnxruntime-web@1.30.0 --ignore-scripts --loglevel=error\n"
    assert web_format.version(found) == "9.8.7"

    (found / WASM).write_bytes(b"cut short")
    assert find_runtime() == found and (found / WASM).read_bytes() == FILES[WASM]
    assert len(calls.read_text().splitlines()) == 2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [found.name]
    # Another archive is refused
    (tmp_path / "sent").write_bytes(archive + b"\0")
    shutil.rmtree(found)
    refused("npm gave another onnxruntime-web@1.30.0 than the one that was checked", find_runtime)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("npm error code E404\nnpm error 404 GET https://somewhere.example/x - Not found", "E404"),
        ("npm ERR! code ENOTFOUND\nnpm ERR! network request to https://somewhere.example/x failed", "ENOTFOUND"),
        ("something else", "it failed"),
    ],
)
def test_find__npm_fails_without_naming_whom_it_asked(npm, said, reason):
    npm(f"echo '{said}' >&2; exit 1")
    words = rf"^npm cannot fetch onnxruntime-web@1.30.0 \({reason}\); run `npm install .*--ort-web [^:]*$"
    refused(words, find_runtime)


def test_find__npm_is_slow_or_not_there(npm, tmp_path, monkeypatch):
    monkeypatch.setattr(web_format, "PATIENCE", 0.2)
    npm("exec sleep 20")
    refused(r"npm cannot fetch .* \(no answer within 0.2 seconds\)", find_runtime)
    monkeypatch.setenv("PATH", str(tmp_path))
    refused("there is no npm to fetch it; run `npm install .* then give --ort-web", find_runtime)
    assert not list((tmp_path / "cache").iterdir())


def test_find__given_folder_or_the_one_above(runtime):
    assert find_runtime(runtime) == find_runtime(runtime.parent) == runtime
    (runtime / SCRIPT).write_text("/* something else */")
    refused(f"dist/{SCRIPT} is not that of onnxruntime-web; give the folder dist", find_runtime, runtime.parent)
    (runtime / GLUE).unlink()
    refused(f"--ort-web .*dist has no {GLUE}; give the folder dist of", find_runtime, runtime)
    assert set(DIGESTS) == {SCRIPT, GLUE, WASM}
    assert all(len(bytes.fromhex(digest)) == 32 for digest in DIGESTS.values())
