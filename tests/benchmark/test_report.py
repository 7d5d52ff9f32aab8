"""Tables and images of what was measured."""

import sys
from pathlib import Path

import pytest

from broadsight.benchmark.report import plot, render
from broadsight.benchmark.run import Report, Settings, measure
from broadsight.visual import plots as drawing

from .conftest import shown

SMALL = dict(batch=2, size=(64, 64), rounds=2, warmup=0)


@pytest.fixture(scope="module")
def inference() -> Report:
    return measure(["test_resnet", "test_vit"], Settings(**SMALL))


def test_render__shows_every_row(inference):
    for report in (inference, measure(["test_resnet", "test_vit"], Settings(train=True, **SMALL))):
        text = shown(render(report))
        assert "test_resnet" in text and "test_vit" in text and "64x64" in text and "eager" in text
        assert ("saved" in text) == report.settings.train


@pytest.mark.parametrize("suffix", drawing.PLOT_FORMATS)
def test_plot__writes_what_the_name_says(suffix, inference, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"latency.{suffix}"
    plot(inference, path)
    assert path.read_bytes()[:5] == {"png": b"\x89PNG\r", "svg": b"<?xml", "pdf": b"%PDF-"}[suffix]
    assert list(tmp_path.iterdir()) == [path]


def test_plot__refuses_or_fails_and_leaves_no_file(inference, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="expected a name ending in png, svg, pdf"):
        plot(inference, tmp_path / "latency.jpg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r'pip install "broadsight\[plot\]"'):
        plot(inference, tmp_path / "latency.png")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    figure = pytest.importorskip("matplotlib.figure")

    def fails(self, path: Path, **options) -> None:
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(figure.Figure, "savefig", fails)
    (tmp_path / "old.png").write_text("old")
    for name in ("new.png", "old.png"):
        with pytest.raises(OSError, match="disk full"):
            plot(inference, tmp_path / name)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("old.png", "old")]
