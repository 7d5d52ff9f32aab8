"""The very files of a folder, run under node: the browser's runtime computes what torch does."""

import base64
import contextlib
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from broadsight.deployment import compare, open_artefact
from broadsight.deployment.formats import web as web_format
from broadsight.deployment.formats.web import node as web_check
from broadsight.deployment.formats.web.node import NodeModel, node
from broadsight.deployment.run import Disagreement, write_artefact
from broadsight.deployment.subject import Subject
from tests.deployment.formats.web.pages import found_runtime, mosaic, page, plain_session
from tests.deployment.tiny import Tiny, ask, check_same, described, noise, reference
from tests.refusals import refused

needs_node = pytest.mark.skipif(node() is None, reason="there is no node")
IMAGES = noise(3, 3, 64, 64)


@pytest.fixture(scope="module")
def classifier():
    return mosaic()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, classifier):
    return page(tmp_path_factory.mktemp("web") / "page", classifier, found_runtime())


@needs_node
def test_open__in_the_runtime_of_the_folder(folder, classifier):
    pytest.importorskip("onnxruntime")
    session = open_artefact(folder)
    assert session.description.classes == classifier.labels
    agreement = compare(session, reference(classifier.model), [IMAGES[:1], IMAGES])  # one process for both
    assert agreement.images == 4 and agreement.same_class == 1 and agreement.relative < 1e-6
    refused("does not run in ONNX Runtime Web: .*invalid dimensions", session._run, IMAGES[..., 1:], error=RuntimeError)


@needs_node
def test_node__int8(tmp_path, classifier):
    folder = page(tmp_path / "page", classifier, found_runtime(), int8=True, quantised={"kept": []})
    (found,) = NodeModel(folder)(IMAGES)
    assert b"QuantizeLinear" in web_format.model_bytes(folder)
    (expected,) = plain_session(folder).run(None, {"images": IMAGES})
    step = np.diff(np.unique(expected)).min()
    assert np.abs(found - expected).max() < 1.5 * step
    assert np.abs(found - classifier.model(torch.from_numpy(IMAGES)).numpy()).max() > step / 4  # 8 bits, not 32


def test_open__without_node_in_onnxruntime(folder, classifier, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(web_check, "node", lambda: None)
    check_same(open_artefact(folder, threads=1), classifier.model, IMAGES, 1e-4, 1e-5)
    refused("there is no node of version 18 or later", NodeModel, folder)


def test_node__too_old_or_no_node(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for said, found in (("v16.20.0", None), ("v18.1.0", str(tmp_path / "node")), ("what", None)):
        (tmp_path / "node").write_text(f"#!/bin/sh\necho {said}\n")
        (tmp_path / "node").chmod(0o755)
        assert web_check.node.__wrapped__() == found
    (tmp_path / "node").unlink()
    assert web_check.node.__wrapped__() is None


@pytest.fixture
def subject():
    pytest.importorskip("onnxscript")
    return Subject(Tiny().eval().requires_grad_(False), described(), lambda side: [*noise(3, 1, 3, 32, 32)], "noise")


@needs_node
def test_export__is_compared_in_the_runtime_of_the_page(subject, tmp_path):
    wanted = ask("web", rounds=1, ort_web=found_runtime())
    found = write_artefact(subject, tmp_path / "page", wanted)
    assert {file.name for file in tmp_path.iterdir()} == {"page", "page.export.json"}
    assert found.agreement.images == 3 and found.agreement.same_class == 1 and 0 < found.agreement.relative < 1e-5
    assert found.bytes == sum(file.stat().st_size for file in (tmp_path / "page").rglob("*") if file.is_file())
    assert web_format.manifest(tmp_path / "page")["description"]["classes"] == list(described().classes)


@needs_node
def test_export__a_page_that_differs_is_not_written(subject, tmp_path, monkeypatch):
    original = web_check.NodeModel.__call__
    monkeypatch.setattr(web_check.NodeModel, "__call__", lambda self, images: [original(self, images)[0] + 1])
    words = "tiny in the browser's runtime differs from torch .* nothing was written"
    wanted = ask("web", rounds=0, ort_web=found_runtime())
    refused(words, write_artefact, subject, tmp_path / "page", wanted, error=Disagreement)
    assert not list(tmp_path.iterdir())


@needs_node
@pytest.mark.parametrize("file", ["model.js", "manifest.js", "runtime/ort.wasm.min.js", "runtime/glue-000.js"])
def test_open__executes_nothing_of_a_stranger(folder, classifier, tmp_path, file):
    pytest.importorskip("onnxruntime")
    mark = tmp_path / "mark"
    copy = Path(shutil.copytree(folder, tmp_path / "page"))
    script = f'\nprocess.getBuiltinModule("fs").writeFileSync({json.dumps(str(mark))}, "");\n'
    (copy / file).write_text((copy / file).read_text("utf-8") + script, "utf-8")
    with contextlib.suppress(RuntimeError, ValueError):
        NodeModel(copy)(IMAGES)
    assert mark.exists() or file.startswith("runtime/glue") or file == "manifest.js"  # node itself would run it
    mark.unlink(missing_ok=True)
    if file == "manifest.js":
        refused("is not the folder of a page", open_artefact, copy)
    else:
        check_same(open_artefact(copy), classifier.model, IMAGES, 1e-4, 1e-5)  # in ONNX Runtime
    assert not mark.exists()


def test_model__parts_that_are_none(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "page"))
    bomb = base64.b64encode(gzip.compress(bytes(2**26))).decode()
    part = copy / "model" / "part-000.js"
    part.write_text(part.read_text().replace("part-000.js", "part-001.js"))
    if node() is not None:
        words = "ONNX Runtime Web: model/part-000.js is damaged; copy the whole folder"
        refused(words, NodeModel, copy, error=RuntimeError)
    for text in (f'Bundle.part("model/part-000.js", "{bomb}");\n', 'Bundle.part("x", "");\n', 'x"y"z"w"', ""):
        part.write_text(text)
        refused("is damaged", web_format.model_bytes, copy)
    said = web_format.manifest(copy)
    for name in ("../../x", "/etc/passwd", "model/../x.js", 3):
        said["packed"]["model"]["parts"] = [name]
        (copy / "manifest.js").write_text(web_format.manifest_text(said))
        refused("is damaged", web_format.model_bytes, copy)
