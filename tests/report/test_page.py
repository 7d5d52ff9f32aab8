"""The page as a whole: complete in itself, well-formed, safe whatever the data hold, and quick."""

import base64
import io
import json
import re
import time
from itertools import pairwise

import pytest
from PIL import Image

from broadsight.report import CaptionedImage, render
from broadsight.report.page import SECTIONS, SIDE, shrunk
from tests.data.nasty_names import NASTY as NASTY_NAMES

from .reading import of_class, read, section, text

NASTY = '<b>&"x"</b><script>alert(1)</script>'
BIN = dict(low=0.5, high=1.0, count=10, confidence=80.0, accuracy=70.0)
IMAGE = CaptionedImage(Image.new("RGB", (8, 8), "teal"), "cat taken for dog\n97 % sure", "a cat")


def whole_record(name: str = "cat") -> dict:
    """A record with everything, in which all texts are `name`."""
    rows = [{"case": f"{name}{i}", "at": at, "top1": 50.0, "images": 3} for i in range(2) for at in (1, 2)]
    words = [{"case": name, "at": word, "top1": 50.0} for word in (name, "b")]
    return dict(
        **dict(title=name, kind="run", subtitle=name, notes=[name], command=name, commit=name, seed=0),
        headline=[dict(label=name, value=name, note=name)],
        figures={"top1": 50.0, name: 1.0, "text": name},
        absent={"auroc": name, f"{name}2": "why", "samples": name},
        classes=[name, "dog"],
        class_figures=[{"name": name, "objects": 2, "box_ap": 50.0}],
        per_class=[{"class": name, "images": 2, "recall": 50.0, "most_confused_with": name, "confused": 1}],
        confusion=[[1, 1], [0, 2]],
        confused=[{"class": name, "as": name, "count": 1, "share": 50.0}],
        calibration={"ece": 10.0, "mce": 10.0, "bins": [BIN]},
        suites=[
            dict(name=name, title=name, about=name, axis=name, model=name, rows=rows, summary={name: 1.0}),
            dict(name="words", axis=name, model=name, rows=words),
        ],
        beside=[dict(title=name, parameters=1, macs=1e9, figures={"top1": 40.0}), dict(title="b", macs=2e9)],
        runs=dict(heads=["run", name], rows=[[name, name]]),
        twins=[dict(title=name, top1=50.0, folder=name)],
        skipped={name: name},
        facts=[dict(group=name, rows=[[name, name]])],
        versions={name: name, "broadsight": name},
    )


# What makes each section appear: keys of the record, or arguments
DATA = {key: {key: whole_record()[key]} for key in whole_record().keys() & SECTIONS.keys()}
ARGUMENTS = {key: {key: [IMAGE]} for key in ("mistakes", "samples", "findings")}
ARGUMENTS["curves"] = dict(curves=[{"kind": "epoch", "epoch": 1, "updates": 3, "train_loss": 1.0, "val_loss": 1.0}])


def whole(name: str = "cat") -> str:
    images = [CaptionedImage(Image.new("RGB", (8, 8)), f"{name}\n{name}", name)]
    lines = [{"kind": "epoch", "epoch": 1, "updates": 3, "train_loss": 1.0, f"val_{name}": 1.0}]
    return render(whole_record(name), curves=lines, mistakes=images, samples=images, findings=images)


def sections(html: str) -> list[str]:
    return [element.get("id") for element in read(html).iter("section") if element.get("id")]


@pytest.mark.parametrize("key", SECTIONS)
def test_section__is_there_or_says_why_not(key):
    record, arguments = dict(title="x") | DATA.get(key, {}), ARGUMENTS.get(key, {})
    assert sections(render(record, **arguments)) == [key]
    empty = {name: type(value)() for name, value in record.items() if name != "title"}
    assert sections(render(dict(title="x") | empty, **{name: [] for name in arguments})) == []
    html = render(dict(title="x", absent={key: "too few images"}))
    assert sections(html) == [key] and "Not measured: too few images." in text(read(html).find(".//main"))


def test_page__is_well_made():
    plain = read(whole())
    assert [a.get("href") for a in plain.iter("a")] == [f"#{key}" for key in SECTIONS]
    assert sections(whole()) == list(SECTIONS)
    ids = [element.get("id") for element in plain.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert {e.get("aria-labelledby") for e in plain.iter() if e.get("aria-labelledby")} <= set(ids)
    levels = [int(element.tag[1]) for element in plain.iter() if re.fullmatch("h[1-6]", element.tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    boxed = [table for box in of_class(plain, "scroll") for table in box.findall("table")]
    assert boxed == list(plain.iter("table"))
    assert plain.find("html").get("lang") == "en"
    assert all(th.get("scope") in ("col", "row") for th in plain.iter("th"))
    assert all(table.find("caption") is not None for table in plain.iter("table"))
    for drawing in plain.iter("svg"):
        named = drawing.get("role") == "img" and drawing.get("aria-label") == drawing.find("title").text
        assert named or drawing.get("aria-hidden") == "true"
    assert all("alt" in image.attrib for image in plain.iter("img"))
    assert all(figure.find("figcaption") is not None for figure in plain.iter("figure"))


def test_page__loads_nothing_and_is_utf8():
    html = render(dict(title="a\udcff\x00b", skipped={"\udc80.jpg": "\x1b[0m"}))
    assert text(read(html).find(".//h1")) == "a\ufffd\ufffdb" and html.encode("utf-8")
    html = whole()
    for element in read(html).iter():
        for name in ("src", "href"):
            assert element.get(name, "#").startswith(("#", "data:"))
        assert not element.attrib.keys() & {"srcset", "action", "xlink:href", "data", "poster", "background"}
        assert not [name for name in element.attrib if name.startswith("on")]
    assert "url(" not in html and "@import" not in html and "http" not in html.replace("http-equiv", "")
    (policy,) = (e.get("content") for e in read(html).iter("meta") if "http-equiv" in e.attrib)
    assert policy.startswith("default-src 'none'; img-src data:;") and "script-src 'sha256-" in policy


NAMES = [NASTY, *(one for one in NASTY_NAMES if one and not re.search("[\r\n]", one))]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:12])
def test_text__of_any_name_is_escaped(name):
    """All elements and attributes are those of a harmless name."""
    page, plain = read(whole(name)), read(whole())
    assert [element.tag for element in page.iter()] == [element.tag for element in plain.iter()]
    assert [list(element.attrib) for element in page.iter()] == [list(element.attrib) for element in plain.iter()]
    shown = text(page.find(".//h1"))
    assert shown == text(page.find(".//title")) and {image.get("alt") for image in page.iter("img")} == {shown}
    assert shown == name or "\ufffd" in shown


def test_title_and_headline__the_same_data_give_the_same_text():
    card = dict(label="top-1", value="34.5 %", note="epoch 8 of 8")
    page = read(render(dict(title="x", kind="evaluation", headline=[card, dict(label="a", value="b")])))
    (headline,) = of_class(page, "headline")
    assert [text(div).strip() for div in headline] == ["top-134.5 %epoch 8 of 8", "ab"]
    assert "Evaluation" in text(page.find(".//header"))
    assert whole() == whole() and render(json.loads(json.dumps(whole_record()))) == render(whole_record())
    with pytest.raises(ValueError, match=r"^a report needs a title; expected record\['title'\], e.g. 'resnet18 on"):
        render(dict(kind="run"))


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 0, -1.0, 1e-30, 1e30, "text"])
def test_any_number__anywhere(value):
    def with_value(part):
        if isinstance(part, dict):
            return {key: with_value(entry) for key, entry in part.items()}
        if isinstance(part, list):
            return [with_value(entry) for entry in part]
        return part if isinstance(part, str) else value

    record = with_value(whole_record()) | dict(confusion=[[1, 1], [0, 2]])
    lines = [dict(kind="updates", updates=value, loss=value, lr=value), dict(kind="epoch", epoch=value, val_top1=value)]
    html = render(record, curves=[*lines, {}, dict(kind="epoch")])
    assert sections(html) and "nan" not in text(read(html).find(".//main")).lower().split()


def test_size__of_many_classes_and_images():
    names = [f"class {i} of a thousand, with a name" for i in range(1000)]
    same = dict(images=50, precision=50.0, f1=50.0, most_confused_with=names[0])
    classes = [{"class": name, "recall": i / 10, **same} for i, name in enumerate(names)]
    began = time.process_time()
    html = render(dict(title="x", classes=names, per_class=classes, confusion=[[1] * 1000 for _ in range(1000)]))
    assert time.process_time() - began < 1.5 and len(html) < 1_000_000
    noise = Image.effect_noise((400, 300), 80).convert("RGB")  # the worst that a JPEG can meet
    images = [CaptionedImage(noise, "a", "b")] * 24
    assert len(render(dict(title="x"), mistakes=images, samples=images)) < 2_500_000


def shown(image: Image.Image):
    """The tag of an image, and what a browser makes of it."""
    (tag,) = section("mistakes", mistakes=[CaptionedImage(image, "a", "b")]).iter("img")
    kind, _, data = tag.get("src").partition(";base64,")
    decoded = Image.open(io.BytesIO(base64.b64decode(data)))
    assert kind == f"data:image/{decoded.format.lower()}"
    assert (tag.get("width"), tag.get("height")) == tuple(map(str, decoded.size))
    return tag, decoded


def test_images__large_ones_are_shrunk_to_a_jpeg_and_tiny_ones_kept_exactly():
    tag, image = shown(Image.new("RGB", (1000, 500), "teal"))
    assert image.format == "JPEG" and image.size == (SIDE, SIDE // 2) and tag.get("class") is None
    original = Image.effect_noise((32, 32), 90).convert("RGB")
    tag, image = shown(original)
    assert image.format == "PNG" and image.tobytes() == original.tobytes() and tag.get("class") == "tiny"
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"):
        assert shown(Image.new(mode, (40, 30)))[1].mode == "RGB", mode
    deep = Image.new("I;16", (2, 1))
    deep.putpixel((0, 0), 1000)
    deep.putpixel((1, 0), 3000)
    assert [shrunk(deep).getpixel((x, 0)) for x in (0, 1)] == [(0, 0, 0), (255, 255, 255)]
    assert shrunk(Image.new("RGBA", (4, 4), (200, 0, 0, 0))).getpixel((0, 0)) == (255, 255, 255)
    large = Image.new("RGB", (500, 500))
    shrunk(large)
    assert large.size == (500, 500)


def test_caption__first_of_several_lines_stands_out():
    image = CaptionedImage(Image.new("L", (2, 2)), "cat & dog\n97 %\nx.jpg", '"alt"')
    several, none = (section("samples", samples=[one]) for one in (image, image._replace(caption="")))
    caption = several.find(".//figcaption")
    assert text(caption.find("strong")) == "cat & dog" and len(caption.findall("br")) == 2
    assert several.find(".//img").get("alt") == '"alt"' and none.find(".//strong") is None
