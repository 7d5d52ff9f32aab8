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
from tests.deployment.formats.web.pages import found_runtime, mosaic, page
from tests.deployment.tiny import Tiny, ask, described

needs_node = pytest.mark.skipif(node() is None, reason="there is no node")
IMAGES = np.random.default_rng(0).standard_normal((3, 3, 64, 64)).astype(np.float32)


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

    def reference(images):
        return [classifier.model(torch.from_numpy(images)).numpy()]

    agreement = compare(session, reference, [IMAGES[:1], IMAGES])  # one process for both
    assert agreement.images == 4 and agreement.same_class == 1
    assert agreement.relative < 1e-6
    with pytest.raises(RuntimeError, match=r"does not run in ONNX Runtime Web: .*invalid dimensions"):
        session._run(IMAGES[..., 1:])


@needs_node
def test_node__int8(tmp_path, classifier):
    onnxruntime = pytest.importorskip("onnxruntime")
    folder = page(tmp_path / "page", classifier, found_runtime(), int8=True, quantised={"kept": []})
    (found,) = NodeModel(folder)(IMAGES)
    model = web_format.model_bytes(folder)
    assert b"QuantizeLinear" in model
    options = onnxruntime.SessionOptions()
    # step by step: its fused kernels for 8 bits overflow on older processors, those of the browser do not
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"images": IMAGES})
    step = np.diff(np.unique(expected)).min()
    assert np.abs(found - expected).max() < 1.5 * step
    assert np.abs(found - classifier.model(torch.from_numpy(IMAGES)).numpy()).max() > step / 4  # 8 bits, not 32


def test_open__without_node_in_onnxruntime(folder, classifier, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(web_check, "node", lambda: None)
    found = open_artefact(folder, threads=1)(IMAGES)["logits"]
    np.testing.assert_allclose(found, classifier.model(torch.from_numpy(IMAGES)).numpy(), atol=1e-4, rtol=1e-5)
    with pytest.raises(ValueError, match="there is no node of version 18 or later"):
        NodeModel(folder)(IMAGES)


def test_node__too_old_or_no_node(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for said, found in (("v16.20.0", None), ("v18.1.0", str(tmp_path / "node")), ("what", None)):
        (tmp_path / "node").write_text(f"#!/bin/sh\necho {said}\n")
        (tmp_path / "node").chmod(0o755)
        assert web_check.node.__wrapped__() == found
    (tmp_path / "node").unlink()
    assert web_check.node.__wrapped__() is None


@needs_node
def test_node__damaged_folder(tmp_path, folder):
    copy = shutil.copytree(folder, tmp_path / "page")
    part = copy / "model" / "part-000.js"
    part.write_text(part.read_text().replace("part-000.js", "part-001.js"))
    with pytest.raises(RuntimeError, match=r"ONNX Runtime Web: model/part-000.js is damaged; copy the whole folder"):
        NodeModel(copy)(IMAGES)


@pytest.fixture
def subject():
    pytest.importorskip("onnxscript")
    images = [*np.random.default_rng(1).standard_normal((3, 1, 3, 32, 32)).astype(np.float32)]
    return Subject(Tiny().eval().requires_grad_(False), described(), lambda side: images, "noise")


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
    with pytest.raises(Disagreement, match=r"tiny in the browser's runtime differs from torch .* nothing was written"):
        write_artefact(subject, tmp_path / "page", ask("web", rounds=0, ort_web=found_runtime()))
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
        with pytest.raises(ValueError, match="is not the folder of a page"):
            open_artefact(copy)
    else:
        found = open_artefact(copy)(IMAGES)["logits"]  # in ONNX Runtime
        np.testing.assert_allclose(found, classifier.model(torch.from_numpy(IMAGES)).numpy(), atol=1e-4, rtol=1e-5)
    assert not mark.exists()


def test_model__parts_that_are_none(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "page"))
    bomb = base64.b64encode(gzip.compress(bytes(2**26))).decode()
    part = copy / "model" / "part-000.js"
    for text in (f'Bundle.part("model/part-000.js", "{bomb}");\n', 'Bundle.part("x", "");\n', 'x"y"z"w"', ""):
        part.write_text(text)
        with pytest.raises(ValueError, match="is damaged"):
            web_format.model_bytes(copy)
    said = web_format.manifest(copy)
    for name in ("../../x", "/etc/passwd", "model/../x.js", 3):
        said["packed"]["model"]["parts"] = [name]
        (copy / "manifest.js").write_text(web_format.OPENING + json.dumps(said) + web_format.CLOSING)
        with pytest.raises(ValueError, match="is damaged"):
            web_format.model_bytes(copy)
