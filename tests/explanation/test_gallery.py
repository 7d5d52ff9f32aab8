"""A gallery: a sheet for every model and image, a page that shows them all, nothing lost when it fails."""

import json
import re
import shutil
from collections import Counter

import pytest
from PIL import Image

from broadsight.cli.main import main
from broadsight.data.names import printable
from broadsight.explanation.gallery import _page
from tests.data.nasty_names import NASTY
from tests.report.reading import read, text

TINY = ("test_resnet", "--no-pretrained", "--size", "64", "--kinds", "gradcam")


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for name, colour in (("red", "#c00000"), ("blue", "#0000c0")):
        Image.new("RGB", (90, 70), colour).save(tmp_path / "photos" / f"{name}.png")
    return tmp_path


def test_page__shows_a_sheet_of_every_model_and_image(photos, capsys):
    assert main(["gallery", TINY[0], *TINY, "--images", "photos", "--out", "docs/seen.md"]) == 0
    assert "2 models" in capsys.readouterr().out
    page = (photos / "docs" / "seen.md").read_text("utf-8")
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page)
    names = ["test_resnet/blue.webp", "test_resnet/red.webp", "test_resnet-2/blue.webp", "test_resnet-2/red.webp"]
    assert shown == [f"seen/{name}" for name in names]
    for path in shown:
        with Image.open(photos / "docs" / path) as sheet:
            assert sheet.width > 600 and len(sheet.convert("RGB").getcolors(1 << 20)) > 20
    assert page.count("untrained: the weights are random") == 2  # a line for each model
    record = json.loads((photos / "docs" / "seen" / "gallery.json").read_text("utf-8"))
    assert [one["name"] for one in record["models"]] == ["test_resnet", "test_resnet-2"]
    assert f"broadsight gallery {TINY[0]}" in record["command"] and record["data"] == "photos"
    assert main(["gallery", *TINY, "--images", "photos"]) == 0  # and the next takes its place
    assert main(["gallery", *TINY, "--images", "photos/red.png"]) == 0
    assert [path.name for path in sorted((photos / "gallery" / "test_resnet").iterdir())] == ["red.webp"]
    assert not list(photos.glob(".*part*"))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "no RUN or MODEL is named"),
        (["test_resnet", "--no-pretrained", "--out", "page.html"], "expected a Markdown file"),
        (["test_resnet", "--no-pretrained", "--images", "nowhere"], "no such file or folder"),
        (["test_resnet", "--no-pretrained", "--kinds", "super-tokens"], "stvit_small"),
        (["test_resnet", "--no-pretrained", "--out", "photos.md"], "is no gallery's"),
        (["test_resnet", "--no-pretrained", "--images", "bad.png"], "none of the images can be read"),
    ],
)
def test_bad_input__one_line_and_nothing_changed(photos, capsys, argv, said):
    (photos / "bad.png").write_bytes(b"no image")
    before = sorted(photos.rglob("*"))
    assert main(["gallery", *argv]) == 2
    words = capsys.readouterr().err.strip().splitlines()[-1]
    assert words.startswith("broadsight: ") and said in words
    assert sorted(photos.rglob("*")) == before


def test_page__names_are_text(tmp_path):
    """Whatever files, classes and models are called: as Markdown is read, there are our links and images alone."""
    options = {"html": True, "linkify": False, "xhtmlOut": False}
    reader = pytest.importorskip("markdown_it").MarkdownIt("gfm-like", options).enable("table")
    for name in NASTY:
        entry = {"file": name, "sheet": f"{name}.webp", "predictions": [{"class": name, "probability": 0.5}]}
        model = {"parameters": 1e6, "weights": name}
        one = dict(name=name, has=["gradcam"], model=model, untrained=False, images=[entry], failed={name: name})
        page = _page({"models": [one], "data": name, "command": name}, "seen")
        found = read(reader.render(page))
        count = Counter(element.tag for element in found.iter())
        assert [count[tag] for tag in ("a", "img", "h1", "h2", "tr", "td")] == [1, 1, 1, 1, 2, 4], name
        assert not count.keys() & {"script", "h3", "em", "strong", "blockquote", "li", "b"}
        (link,), (image,) = found.iter("a"), found.iter("img")
        assert link.get("href").startswith("#") and image.get("src").startswith("seen/")
        assert not any(key.startswith("on") for element in found.iter() for key in element.attrib)
        assert text(found).count(printable(name)) >= 4 or not name.strip()
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", page)


def test_sheets__of_odd_names_stay_in_their_folder(photos):
    """A file called `...png` has the stem `..`."""
    for name in ("...png", "[red] <b>.png", "=1.png"):
        shutil.copy(photos / "photos" / "red.png", photos / "photos" / name)
    (photos / "photos" / "blue.png").unlink()
    inside = photos / "deep" / "out"
    options = ["--size", "64", "--kinds", "gradcam", "--singles", "--out", str(inside)]
    assert main(["explain", "test_resnet", "photos", "photos/...png", "--no-pretrained", *options]) == 0
    assert [path.name for path in (photos / "deep").iterdir()] == ["out"]
    assert {path.name for path in inside.glob("*.png")} == {"image.png", "[red] _b_.png", "=1.png", "red.png"}
