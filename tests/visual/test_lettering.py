"""Labels and legends: inside of the image, out of each other's way, in fonts that have the letters."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from broadsight.visual.colours import colour
from broadsight.visual.lettering import Entry, chip_size, draw_chip, fitting, place_chips, side_by_side, with_legend
from tests.refusals import refused

from .written import has_written

BOUNDS = (400, 300)


def overlap(places, size):
    total = 0
    for i, (x, y) in enumerate(places):
        for left, top in places[:i]:
            total += max(0, size[0] - abs(x - left)) * max(0, size[1] - abs(y - top))
    return total


def test_chips__above_the_box_or_at_its_top_side_by_side_and_as_large_as_told():
    for x, y in ((0, 0), (370, 0), (0, 280), (370, 280), (150, 100), (-20, -20), (395, 295)):
        left, top = place_chips([(x, y, x + 30, y + 20)], [(90, 17)], BOUNDS)[0]
        assert 0 <= left <= 400 - 90 and 0 <= top <= 300 - 17
    assert place_chips([(50, 60, 200, 160)], [(90, 17)], BOUNDS).tolist() == [[50, 43]]
    assert place_chips([(50, 5, 200, 160)], [(90, 17)], BOUNDS).tolist() == [[50, 5]]
    places = place_chips([(100, 100, 180, 200)] * 8, [(90, 17)] * 8, BOUNDS).tolist()
    assert overlap(places, (90, 17)) == 0 and places[0] == [100, 83]
    # No room for all: 2 chips fit into the image, the third covers one of them wholly at worst.
    places = place_chips([(0, 0, 90, 34)] * 3, [(90, 17)] * 3, (90, 34)).tolist()
    assert overlap(places, (90, 17)) == 90 * 17
    assert place_chips([], [], BOUNDS).shape == (0, 2)
    image = Image.new("RGB", (200, 60), (9, 9, 9))
    text, font = fitting("gyroscope (Å) 0.87", 14, 150)
    draw_chip(image, (20, 10), text, font, 14, (0, 114, 178))
    changed = np.argwhere((np.asarray(image) != 9).any(2))
    width, height = chip_size(text, font, 14)
    assert changed.min(0).tolist() == [10, 20] and changed.max(0).tolist() == [10 + height - 1, 20 + width - 1]


def test_fitting__cuts_the_name_keeps_the_score_and_finds_letters():
    text, font = fitting("a name far too long for its place", 12, 100, "0.87")
    assert text.startswith("a name") and text.endswith("… 0.87") and font.getlength(text) <= 100
    assert font.getlength(text.replace("…", "mm…")) > 100  # no more than needed
    assert fitting("cat", 12, 100, "0.87")[0] == "cat 0.87"
    assert fitting("cat\n dog", 12, 100)[0] == "cat dog"
    assert fitting("cat", 12, 3)[0] == ""
    text, font = fitting("Žába", 16, 1000)
    looks = []
    for letters in (text, "\uffff" * 4):
        image = Image.new("L", (80, 30))
        ImageDraw.Draw(image).text((2, 2), letters, fill=255, font=font)
        looks.append(image.tobytes())
    assert text in ("Žába", "Zaba") and looks[0] != looks[1]


@pytest.mark.parametrize("size, grows", [((400, 300), 1), ((200, 500), 0)])
def test_with_legend__below_the_image_or_beside_a_tall_one(size, grows):
    image = Image.new("RGB", size, (1, 2, 3))
    result = with_legend(image, [Entry("zebra", "3", (colour(7),)), Entry("owl", "12", (colour(8),))], "")
    assert result.size[1 - grows] == image.size[1 - grows]
    assert result.size[grows] > image.size[grows]
    assert result.crop((0, 0, *size)).tobytes() == image.tobytes()
    assert has_written(result, "zebra") and has_written(result, "owl") and not has_written(result, "cat")
    colours = {tuple(c) for c in np.asarray(result).reshape(-1, 3).tolist()}
    assert {colour(7), colour(8), colour(9)} & colours == {colour(7), colour(8)}


def test_sheets__twenty_entries_and_how_many_more_and_images_side_by_side():
    image = Image.new("RGB", (600, 300))
    entries = [Entry(f"name{i}", "1", (colour(i),)) for i in range(1000)]
    result = with_legend(image, entries, "")
    assert has_written(result, "name19", 12) and not has_written(result, "name20")
    assert has_written(result, "… 980 more")
    assert not has_written(with_legend(image, entries[:20], ""), "… 0 more")
    result = with_legend(Image.new("RGB", (150, 150)), [Entry("long " * 50, "17", (colour(0),))], "")
    assert result.width == 150
    assert (np.asarray(result)[150:, 145:] == 255).all()
    one, other = Image.new("RGB", (300, 200), (10, 20, 30)), Image.new("L", (250, 240), 77)
    result = side_by_side({"truth": one, "prediction": other})
    assert result.size == (300 + 12 + 250, 24 + 240)
    pixels = np.asarray(result)
    assert (pixels[24:224, :300] == (10, 20, 30)).all() and (pixels[24:, 312:] == 77).all()
    assert has_written(result, "truth", 14) and has_written(result, "prediction", 14)
    refused("^no images to put side by side; expected", side_by_side, {})
