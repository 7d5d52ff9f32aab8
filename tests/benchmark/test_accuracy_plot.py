"""Published accuracy beside measured latency: which figures, and which of the rows."""

import dataclasses

import pytest
import timm

from broadsight.benchmark import accuracy_plot
from broadsight.benchmark.accuracy_plot import published
from broadsight.benchmark.run import Report
from broadsight.benchmark.settings import Settings
from broadsight.models import FAMILIES
from tests.refusals import refused

from .conftest import row

REPORT = Report(
    {"rounds_completed": 1},
    Settings(batch=1, rounds=1, runtimes=("eager", "onnx", "int8")),
    [
        *(row("mat_1", "eager", 30), row("mat_1", "onnx", 20), row("mat_1", "int8", 10)),
        *(row("fastvit_t8@256", "eager", 25, 256), row("fastvit_t8@256", "onnx", 40, 256)),
        *(row("resnet50", "eager", 99, 288), row("vit_tiny_cb_s", "eager", 9)),
    ],
)


def test_points__the_fastest_in_float_at_the_published_size():
    found, missing = accuracy_plot.points([REPORT])
    fastest = [(p.model, p.row.runtime, p.at) for p in found]
    assert fastest == [("mat_1", "onnx", (20, 76.3)), ("fastvit_t8", "eager", (25, 76.2))]
    assert [(p.family, p.published.ours) for p in found] == [("MAT", True), ("FastViT", False)]
    assert missing == ["resnet50", "vit_tiny_cb_s"]  # another size, and no figure in our sources
    eager, _ = accuracy_plot.points([REPORT], ["eager"])
    assert [p.row.wall_ms.median for p in eager] == [30, 25]


def test_plot__names_every_point_or_refuses(tmp_path):
    pytest.importorskip("matplotlib")
    accuracy_plot.plot([REPORT], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text("utf-8")
    # letters are drawn as shapes; the names stay beside them as comments
    assert all(text.count(f"<!-- {name} -->") == 2 for name in ("mat_1", "fastvit_t8@256"))
    assert "<!-- resnet50 -->" not in text and "<!-- eager torch -->" in text
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]
    nothing = dataclasses.replace(REPORT, rows=REPORT.rows[-1:])
    refused(
        "no published top-1 at its size for any of vit_tiny_cb_s", accuracy_plot.plot, [nothing], tmp_path / "b.svg"
    )
    assert not (tmp_path / "b.svg").exists()


def test_published__names_are_registered_and_every_family_of_ours_has_one():
    found = published()
    assert all(timm.is_model(name) for name in found)
    assert {figure.family for figure in found.values() if figure.ours} == set(FAMILIES)
    for name, figure in found.items():
        assert 65 < figure.top1 < 90 and figure.source and figure.size >= 224
        assert figure.ours == (figure.family in FAMILIES)
        if figure.weights is not None:
            assert f"{name}.{figure.weights}" in timm.list_pretrained(f"{name}.*")
    assert [found[name].top1 for name in ("mat_2", "stvit_small", "deit_tiny_distilled_cb_s")] == [79.0, 83.6, 75.3]


def test_check__before_anything_is_timed():
    accuracy_plot.check(["vit_tiny_cb_s", "mat_1"], (224, 224))
    accuracy_plot.check(["fastvit_t8@256"], (224, 224))
    words = r"^no published top-1 for vit_tiny_cb_s, fastvit_t8 at that size; fastvit_t8 has one at 256"
    refused(words, accuracy_plot.check, ["vit_tiny_cb_s", "fastvit_t8"], (224, 224))
