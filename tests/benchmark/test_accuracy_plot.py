"""Published accuracy beside measured latency: which figures, and which of the rows."""

import dataclasses

import pytest
import timm

from broadsight.benchmark import accuracy_plot
from broadsight.benchmark.published_accuracy import published
from broadsight.benchmark.run import Report, Row, Summary
from broadsight.benchmark.settings import Settings
from broadsight.models import FAMILIES


def row(model: str, runtime: str, ms: float, size: int = 224) -> Row:
    time, one = Summary(ms, ms, 0.0), Summary(1.0, 1.0, 0.0)
    return Row(model, runtime, 1, 1, time, time, 1, one, one, one, 1, 1, None, None, None, None, [ms], [ms], [size] * 2)


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
    assert [(p.model, p.row.runtime, p.row.wall_ms.median) for p in found] == [
        ("mat_1", "onnx", 20),
        ("fastvit_t8", "eager", 25),
    ]
    assert [(p.family, p.published.ours, p.published.top1) for p in found] == [
        ("MAT", True, 76.3),
        ("FastViT", False, 76.2),
    ]
    assert missing == ["resnet50", "vit_tiny_cb_s"]  # another size, and no figure in our sources
    eager, _ = accuracy_plot.points([REPORT], ["eager"])
    assert [p.row.wall_ms.median for p in eager] == [30, 25]


def test_plot__names_every_point(tmp_path):
    pytest.importorskip("matplotlib")
    accuracy_plot.plot([REPORT], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text("utf-8")
    # letters are drawn as shapes; the names stay beside them as comments
    assert all(text.count(f"<!-- {name} -->") == 2 for name in ("mat_1", "fastvit_t8@256"))
    assert "<!-- resnet50 -->" not in text and "<!-- eager torch -->" in text
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


def test_plot__refuses_to_draw_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    nothing = dataclasses.replace(REPORT, rows=REPORT.rows[-1:])
    with pytest.raises(ValueError, match="no published top-1 at its size for any of vit_tiny_cb_s"):
        accuracy_plot.plot([nothing], tmp_path / "a.svg")
    assert list(tmp_path.iterdir()) == []


def test_published__names_are_registered_and_every_family_of_ours_has_one():
    found = published()
    assert all(timm.is_model(name) for name in found)
    assert {figure.family for figure in found.values() if figure.ours} == set(FAMILIES)
    for name, figure in found.items():
        assert 65 < figure.top1 < 90 and figure.source and figure.size >= 224
        assert figure.ours == (figure.family in FAMILIES)
        if figure.weights is not None:
            assert f"{name}.{figure.weights}" in timm.list_pretrained(f"{name}.*")
    assert (found["mat_2"].top1, found["stvit_small"].top1, found["deit_tiny_distilled_cb_s"].top1) == (
        79.0,
        83.6,
        75.3,
    )


def test_check__before_anything_is_timed():
    accuracy_plot.check(["vit_tiny_cb_s", "mat_1"], (224, 224))
    accuracy_plot.check(["fastvit_t8@256"], (224, 224))
    with pytest.raises(
        ValueError, match=r"^no published top-1 for vit_tiny_cb_s, fastvit_t8 at that size; fastvit_t8 has one at 256"
    ):
        accuracy_plot.check(["vit_tiny_cb_s", "fastvit_t8"], (224, 224))
