"""Every registered model exports, in every format, and computes the same there: by default models of every kind at full
width and with one block a stage; in the slow set all, whole and at their own size, as the command exports them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import broadsight
from broadsight.deployment import FORMATS, Agreement, capture, compare, open_artefact, prepare
from broadsight.deployment.run import write_artefact
from broadsight.deployment.subject import of_classifier
from broadsight.models import FAMILIES
from broadsight.runs.classifier import open_classifier
from tests.compare import randomize
from tests.zoo import KINDS, marked, shallow

from .tiny import ask, described, needed, noise, reference, written

ALIASES = ("_patch16_224_cb", "_window7_224_cb")  # under the full name of timm's model as well
NAMES = [n for family in FAMILIES for n in timm.list_models(module=family) if not any(a in n for a in ALIASES)]

# What these are made of runs in loops, one by one, or by writing in places that are computed: slow, or not at all. Only
# whole rows may be written so, which is one copy for each.
SLOW_OPERATIONS = {"Loop", "If", "Scan", "NonZero", "Scatter", "ScatterElements", "Unique", "Compress"}


def map_under(backbone: str) -> torch.nn.Module:
    return broadsight.swap_pool(backbone, "map", groups=2, tokens=2, dim=32, heads=2, mlp_dim=64, num_classes=9)


SHALLOW = dict.fromkeys(("vit_tiny_cb", "vit_tiny_cb_s", "deit_tiny_distilled_cb"), 2)  # blocks
SHALLOW |= {"vit_small_cb_hybrid": 1, "vit_small_cb_gate": 1}
SMALL: dict[str, Any] = {
    **{name: lambda name=name: shallow(name, num_classes=9) for name in KINDS},
    "map_mobilenetv1": lambda: timm.create_model("map_mobilenetv1", num_classes=9),
    "map of test_resnet": lambda: map_under("test_resnet"),
    "map of test_vit": lambda: map_under("test_vit"),
    "map of mat_1": lambda: broadsight.swap_pool(shallow("mat_1"), "map", groups=2, tokens=2, num_classes=9),
    **{name: lambda name=name: timm.create_model(name, depth=SHALLOW[name], num_classes=9) for name in SHALLOW},
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

    def agreement(self, path: Path) -> Agreement:
        batches = [noise(count, 3, self.side, self.side) for count in (1, 3)]
        return compare(open_artefact(path, threads=1), reference(self.model), batches)


# The others differ from these in what is timm's own, or in one operation.
LATER = {"stvit_base", *SHALLOW, *(n for n in SMALL if n.startswith(("map of", "pvt_")))} - {
    "vit_tiny_cb",
    "pvt_v2_b0_cb",
}
PARAMS = [pytest.param(name, marks=pytest.mark.slow) if name in LATER else name for name in SMALL]


@pytest.fixture(scope="module", params=PARAMS)
def made(request) -> Made:
    return Made(request.param)


@pytest.mark.parametrize("format", ["onnx", "openvino", "pt2"])
def test_small__computes_the_same_whatever_the_batch(made, format, tmp_path):
    needed(format)
    path = tmp_path / f"model{FORMATS[format].suffix}"
    FORMATS[format].write(made.program, described(made.side, classes=None), path)
    assert (found := made.agreement(path)).within(2e-5), found
    if format == "onnx":
        import onnx

        graph = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
        nodes, last = graph.node, {one.name: one.type.tensor_type.shape.dim[-1:] for one in graph.value_info}
        assert not SLOW_OPERATIONS & {node.op_type for node in nodes}
        assert all(last[node.input[1]][0].dim_value == 1 for node in nodes if node.op_type == "ScatterND")
        assert {node.domain for node in nodes} == {""}  # nothing but the standard's own


# XNNPACK's lowering takes a minute for each; tests/deployment/formats/test_formats.py has a tiny one.
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in SMALL])
def test_small__on_a_phone(name, tmp_path):
    made = Made(name)
    said = described(made.side, any_batch=False, classes=None)
    path = written("executorch", tmp_path, prepare(made.model, (made.side,) * 2), said)
    assert (found := made.agreement(path)).within(1e-4), found


WHOLE = [
    pytest.param(*name.values, format, False, marks=name.marks)
    for name in marked(NAMES)
    for format, form in FORMATS.items()
    if form.suffix
]
FREE = "stvit_small", "emsnet_xxtiny", "mat_1", "partialformer_b0", "map_resnet50"
WHOLE += [(name, format, True) for name in FREE for format in ("onnx", "openvino", "pt2")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "format", "any_size"), WHOLE)
def test_whole__in_every_format_and_some_for_any_size(name, format, any_size, tmp_path):
    needed(format)
    torch.manual_seed(0)
    classifier = open_classifier(name, pretrained=False, device="cpu")
    subject = of_classifier(replace(classifier, model=randomize(classifier.model)), "a test", count=2)
    target, wanted = tmp_path / f"model{FORMATS[format].suffix}", ask(format, rounds=0, any_size=any_size)
    assert write_artefact(subject, target, wanted).agreement.within(1e-3)
