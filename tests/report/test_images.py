"""Images of all kinds become small ones inside the page."""

import base64
import io

import pytest
from PIL import Image

from broadsight.report.images import SIDE, gallery, shrunk
from broadsight.visual.captioned import CaptionedImage

from .reading import read, text


def shown(image: Image.Image, caption: str = "a", alt: str = "b"):
    """The tag of an image, and what a browser makes of it."""
    (tag,) = read(gallery([CaptionedImage(image, caption, alt)])).iter("img")
    kind, _, data = tag.get("src").partition(";base64,")
    decoded = Image.open(io.BytesIO(base64.b64decode(data)))
    assert kind == f"data:image/{decoded.format.lower()}"
    assert (tag.get("width"), tag.get("height")) == tuple(map(str, decoded.size))
    return tag, decoded


def test_large__shrunk_to_a_jpeg():
    tag, image = shown(Image.new("RGB", (1000, 500), "teal"))
    assert image.format == "JPEG" and image.size == (SIDE, SIDE // 2) and tag.get("class") is None


def test_tiny__kept_exactly():
    original = Image.effect_noise((32, 32), 90).convert("RGB")
    tag, image = shown(original)
    assert image.format == "PNG" and image.tobytes() == original.tobytes() and tag.get("class") == "tiny"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"])
def test_every_mode(mode):
    assert shown(Image.new(mode, (40, 30)))[1].mode == "RGB"


def test_many_levels__are_brought_into_range():
    deep = Image.new("I;16", (2, 1))
    deep.putpixel((0, 0), 1000)
    deep.putpixel((1, 0), 3000)
    assert [shrunk(deep).getpixel((x, 0)) for x in (0, 1)] == [(0, 0, 0), (255, 255, 255)]


def test_transparent__becomes_white_and_the_original_stays():
    image = Image.new("RGBA", (4, 4), (200, 0, 0, 0))
    assert shrunk(image).getpixel((0, 0)) == (255, 255, 255)
    large = Image.new("RGB", (500, 500))
    shrunk(large)
    assert large.size == (500, 500)


def test_caption__first_line_stands_out():
    page = read(gallery([CaptionedImage(Image.new("L", (2, 2)), "cat & dog\n97 %\nx.jpg", '"alt"')]))
    caption = page.find(".//figcaption")
    assert text(caption.find("strong")) == "cat & dog" and len(caption.findall("br")) == 2
    assert page.find(".//img").get("alt") == '"alt"'
    assert read(gallery([CaptionedImage(Image.new("L", (2, 2)), "", "")])).find(".//strong") is None


def test_none__nothing():
    assert gallery([]) == ""
