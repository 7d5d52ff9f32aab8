"""Solar cells from their package."""

import numpy as np
import pytest
from PIL import Image

from broadsight.data.sources import Options, elpv
from broadsight.data.sources.elpv import open_elpv
from broadsight.data.view import View
from tests.refusals import refused

CELLS = [("0.0", "mono"), ("0.3333333333333333", "poly"), ("0.6666666666666666", "poly"), ("1.0", "mono")]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with four cells, the brightness of each its number. Whoever runs its code notices."""
    folder = tmp_path / "site" / "elpv_dataset"
    (folder / "data" / "images").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('the code of a package was run')\n")
    lines = []
    for number, (probability, crystal) in enumerate(CELLS, 1):
        Image.new("L", (30, 30), 10 * number).save(folder / "data" / "images" / f"cell{number:04d}.png")
        lines.append(f"images/cell{number:04d}.png  {probability}   {crystal}\n")
    (folder / "data" / "labels.csv").write_text("".join(lines))
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_elpv__images_and_labels(package):
    parts = open_elpv("elpv", Options())
    assert parts.keys() == {"all"}
    source = parts["all"].source
    assert source.classes == ("sound", "defective") and source.labels.tolist() == [0, 0, 1, 1]
    assert list(source.names) == ["mono/cell0001.png", "poly/cell0002.png", "poly/cell0003.png", "mono/cell0004.png"]
    assert np.asarray(source.open(2)).tolist() == np.full((30, 30, 3), 30).tolist()
    assert any("not for commercial use" in note for note in parts["all"].notes)
    some = View(open_elpv("elpv", Options(1))["all"].source, np.array([3, 1]))
    assert some.name(0) == "mono/cell0004.png" and some.open(0).mode == "L" and some.open(0).getpixel((0, 0)) == 40


def test_elpv__damaged_or_not_installed(package, monkeypatch):
    table = package / "data" / "labels.csv"
    (package / "data" / "images" / "cell0002.png").unlink()
    refused(r"^poly/cell0002\.png: no such file", open_elpv("elpv", Options())["all"].source.open, 1)
    one = "images/cell0001.png 0.0 mono\n"
    for text, words in (
        (f"{one}images/cell0002.png\n", r", line 2: 'images/cell0002\.png' is not a file, a pro"),
        ("", " lists no images; install elpv-dataset anew"),
        ("ä", " cannot be read: .*; install elpv-dataset anew"),
    ):
        table.write_text(text)
        refused(rf"labels\.csv{words}", open_elpv, "elpv", Options())
    monkeypatch.setattr(elpv, "find_spec", lambda name: None)
    expected = r"^elpv is not installed; pip install elpv-dataset \(its images are CC-BY-NC-SA-4\.0, non-commercial\)$"
    refused(expected, open_elpv, "elpv", Options(), error=FileNotFoundError)


def test_elpv__the_real_package():
    try:
        source = open_elpv("elpv", Options(1))["all"].source
    except FileNotFoundError:
        pytest.skip("the package elpv-dataset is not installed")
    assert len(source) == 2624 and np.bincount(source.labels).tolist() == [1803, 821]
    assert sum(name.startswith("mono/") for name in source.names) == 1074
    image = source.open(0)
    assert source.name(0) == "mono/cell0001.png" and source.label(0) == 1 and image.size == (300, 300)
