"""Every registered model exports, in every format, and computes the same there.

By default models of every kind at full width and with one block a stage, which is every code path; the slow set has
all that are registered, whole and at their own size, as the command exports them.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

import broadsight
from broadsight.deployment import FORMATS, Description, capture, compare, need, open_artefact
from broadsight.deployment.preparation import prepare
from broadsight.deployment.run import write_artefact
from broadsight.deployment.subject import of_classifier
from broadsight.models import FAMILIES
from broadsight.runs.classifier import open_classifier
from tests.compare import randomize
from tests.deployment.tiny import described
from tests.zoo import KINDS, shallow

from .tiny import ask

ALIASES = ("_patch16_224_cb", "_window7_224_cb")  # under the full name of timm's model as well
NAMES = [n for family in FAMILIES for n in timm.list_models(module=family) if not any(a in n for a in ALIASES)]

# What these are made of runs in loops, one by one, or by writing in places that are computed: slow, or not at all.
SLOW_OPERATIONS = {"Loop", "If", "Scan", "NonZero", "Scatter", "ScatterND", "ScatterElements", "Unique", "Compress"}


def map_under(backbone: str) -> torch.nn.Module:
    return broadsight.swap_pool(backbone, "map", groups=2, tokens=2, dim=32, heads=2, mlp_dim=64, num_classes=9)


SMALL: dict[str, Any] = {
    **{name: lambda name=name: shallow(name, num_classes=9) for name in KINDS},
    "map_mobilenetv1": lambda: timm.create_model("map_mobilenetv1", num_classes=9),
    "map of test_resnet": lambda: map_under("test_resnet"),
    "map of test_vit": lambda: map_under("test_vit"),
    "map of mat_1": lambda: broadsight.swap_pool(shallow("mat_1"), "map", groups=2, tokens=2, num_classes=9),
    "vit_tiny_cb": lambda: timm.create_model("vit_tiny_cb", depth=2, num_classes=9),
    "vit_tiny_cb_s": lambda: timm.create_model("vit_tiny_cb_s", depth=2, num_classes=9),
    "deit_tiny_distilled_cb": lambda: timm.create_model("deit_tiny_distilled_cb", depth=2, num_classes=9),
    "vit_small_cb_hybrid": lambda: timm.create_model("vit_small_cb_hybrid", depth=1, num_classes=9),
    "vit_small_cb_gate": lambda: timm.create_model("vit_small_cb_gate", depth=1, num_classes=9),
    "pvt_v2_b0_cb": lambda: timm.create_model("pvt_v2_b0_cb", depths=(1, 1, 1, 1), num_classes=9),
}


class Made:
    """A model, and its program for any number of images, which several formats share."""

    def __init__(self, name: str):
        torch.manual_seed(0)
        self.model = randomize(SMALL[name]()).eval()
        tied = getattr(self.model, "pretrained_cfg", {}).get("architecture", "").startswith(("vit", "deit"))
        self.side = 224 if tied else 96
        self.program = capture(prepare(self.model, (self.side, self.side)), (3, self.side, self.side))

    def description(self, any_batch: bool = True) -> Description:
        return described(self.side, any_batch=any_batch, classes=None)

    def reference(self, images: np.ndarray) -> list[np.ndarray]:
        with torch.no_grad():
            return [self.model(torch.from_numpy(images)).numpy()]

    def images(self, count: int) -> np.ndarray:
        shape = count, 3, self.side, self.side
        return np.random.default_rng(count).standard_normal(shape, np.float32)


# The others differ from these in what is timm's own, or in one operation.
LATER = {"stvit_base", "vit_tiny_cb_s", "deit_tiny_distilled_cb", "vit_small_cb_hybrid", "vit_small_cb_gate"}
LATER |= {name for name in SMALL if name.startswith("map of")}


def _unless_later(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow) if name in LATER else name


@pytest.fixture(scope="module", params=map(_unless_later, SMALL))
def made(request) -> Made:
    return Made(request.param)


@pytest.mark.parametrize("format", ["onnx", "openvino", "pt2"])
def test_small__computes_the_same_whatever_the_batch(made, format, tmp_path):
    for package in FORMATS[format].packages:
        pytest.importorskip(package)
    path = tmp_path / f"model{FORMATS[format].suffix}"
    FORMATS[format].write(made.program, made.description(), path)
    session = open_artefact(path, threads=1)
    found = compare(session, made.reference, [made.images(1), made.images(3)])
    assert found.within(2e-5), found
    if format == "onnx":
        import onnx

        operations = Counter(node.op_type for node in onnx.load(path).graph.node)
        assert not SLOW_OPERATIONS & operations.keys(), operations
        assert {node.domain for node in onnx.load(path).graph.node} == {""}  # nothing but the standard's own


# XNNPACK's lowering takes a minute for each; tests/deployment/formats/test_formats.py has a tiny one.
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in SMALL])
def test_small__on_a_phone(name, tmp_path):
    pytest.importorskip("executorch")
    made = Made(name)
    program = capture(prepare(made.model, (made.side, made.side)), (3, made.side, made.side), any_batch=False)
    path = tmp_path / "model.pte"
    need("executorch").write(program, made.description(any_batch=False), path)
    found = compare(open_artefact(path, threads=1), made.reference, [made.images(1), made.images(3)])
    assert found.within(1e-4), found


def _whole(name: str, format: str, path: Path, **wanted: Any) -> None:
    for package in FORMATS[format].packages:
        pytest.importorskip(package)
    torch.manual_seed(0)
    classifier = open_classifier(name, pretrained=False, device="cpu")
    subject = of_classifier(replace(classifier, model=randomize(classifier.model)), "a test", count=2)
    found = write_artefact(subject, path / f"model{FORMATS[format].suffix}", ask(format, rounds=0, **wanted))
    assert found.agreement.within(1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("format", [name for name, form in FORMATS.items() if form.suffix])
@pytest.mark.parametrize("name", NAMES)
def test_whole__in_every_format(name, format, tmp_path):
    _whole(name, format, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "openvino", "pt2"])
@pytest.mark.parametrize("name", ["stvit_small", "emsnet_xxtiny", "mat_1", "partialformer_b0", "map_resnet50"])
def test_whole__for_any_size(name, format, tmp_path):
    _whole(name, format, tmp_path, any_size=True)
