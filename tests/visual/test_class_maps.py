"""Maps of classes over images, and as files."""

import numpy as np
import pytest
import torch
from PIL import Image

from broadsight.data.sources.mask_folders import MaskFolder, read_indices
from broadsight.visual import objects as drawing
from broadsight.visual.colours import colour, ink
from broadsight.visual.objects import draw_semantic, palette_png
from tests.refusals import refused

from .written import has_written

NAMES = ["sky", "road", "tree"]


@pytest.fixture
def image():
    return Image.new("RGB", (400, 300), (100, 150, 200))


@pytest.fixture
def halves():  # sky on the left, road on the right; the lowest rows belong to no class
    classes = np.zeros((300, 400), np.int64)
    classes[:, 200:], classes[280:] = 1, 255
    return classes


def test_draw_semantic__blends_and_leaves_what_is_ignored(image, halves):
    pixels = np.asarray(draw_semantic(image, halves, NAMES, opacity=0.5, labels=False, legend=False))
    assert pixels[100, 100].tolist() == [50, 132, 189]  # halfway to (0, 114, 178)
    assert pixels[100, 300].tolist() == [165, 154, 100]  # halfway to (230, 159, 0), 154.5 rounded to even
    assert (pixels[280:] == (100, 150, 200)).all()
    assert (pixels[:279, 199] == 255).all() and (pixels[279, :] == 255).all()  # the contours
    assert (pixels[:279, :199] == (50, 132, 189)).all() and (pixels[:279, 200:] == (165, 154, 100)).all()
    for opacity, left in ((0, (100, 150, 200)), (1, colour(0))):
        assert draw_semantic(image, halves, NAMES, opacity=opacity, labels=False).getpixel((100, 100)) == left


def test_draw_semantic__legend_has_the_classes_that_occur_largest_first(image, monkeypatch):
    classes = np.full((300, 400), 2)
    classes[:30], classes[299, 0], classes[290:, 390:] = 0, 7, 255
    classes[290:, 300:303] = 1
    lines = []
    monkeypatch.setattr(drawing, "with_legend", lambda canvas, entries, nothing: lines.extend(entries))
    draw_semantic(image, classes, NAMES)
    expected = [("tree", "89.9 %", 2), ("sky", "10.0 %", 0), ("road", "< 0.1 %", 1), ("class 7", "< 0.1 %", 7)]
    assert [(e.name, e.amount, e.colours) for e in lines] == [(*pair, (colour(i),)) for *pair, i in expected]


def test_draw_semantic__legend_is_written(image, halves):
    one, other = (draw_semantic(image, torch.from_numpy(halves), NAMES) for _ in range(2))
    assert one.size == (400, 332) and one.tobytes() == other.tobytes()
    strip = one.crop((0, 300, 400, 332))
    assert [has_written(strip, name) for name in NAMES] == [True, True, False]
    nothing = draw_semantic(image, np.full((300, 400), 255), NAMES)
    assert has_written(nothing, "nothing found")
    assert nothing.crop((0, 0, 400, 300)).tobytes() == image.tobytes()


def test_draw_semantic__names_stand_in_the_middle_of_large_regions(image, halves):
    halves[10:15, 10:15] = 2  # too small for a name
    pixels = np.asarray(draw_semantic(image, halves, NAMES, opacity=0.5, legend=False))
    solid = [np.argwhere((pixels == colour(i)).all(2)) for i in range(3)]
    assert abs(solid[0].mean(0)[1] - 100) < 40 and abs(solid[1].mean(0)[1] - 300) < 40 and not len(solid[2])
    assert (pixels[:, :199] == ink(colour(0))).all(2).any()


def test_draw_semantic__small_grey_images_are_enlarged():
    classes = np.arange(2).repeat(16)[None].repeat(32, 0)
    result = draw_semantic(Image.new("L", (32, 32), 100), classes, NAMES, opacity=0.5, labels=False, legend=False)
    assert result.mode == "RGB" and result.size == (512, 512)
    assert result.getpixel((0, 0)) == (50, 107, 139) and result.getpixel((254, 0)) == (50, 107, 139)
    assert result.getpixel((255, 0)) == (255, 255, 255) and result.getpixel((256, 0)) == (165, 130, 50)


def test_draw_semantic__refuses_what_does_not_fit(image):
    for words, classes in (
        ("classes are 300 x 400, the image is 400 x 300; expected a class", np.zeros((400, 300), int)),
        ("classes hold -1; expected whole numbers from 0, or 255 for no class", np.full((300, 400), -1)),
        (r"classes have shape \(3, 300, 400\) and type float32; expected", torch.zeros(3, 300, 400)),
    ):
        refused(f"^{words}", draw_semantic, image, classes, NAMES)


def test_palette_png__classes_come_back_exactly(tmp_path):
    for most in (2, 4, 16, 256):
        classes = np.random.default_rng(0).integers(0, most, (37, 53))
        image = palette_png(torch.from_numpy(classes))
        image.save(tmp_path / "mask.png")
        assert image.mode == "P" and np.array_equal(read_indices(tmp_path / "mask.png"), classes)
    refused("^classes go from 0 to 256; a palette has 0 to 255", palette_png, np.array([[0, 256]]))


def test_palette_png__is_a_mask_of_a_folder_and_shows_our_colours(tmp_path):
    classes = np.array([[0, 1, 255], [2, 2, 0]])
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    Image.new("RGB", (3, 2)).save(tmp_path / "images" / "a.png")
    palette_png(classes).save(tmp_path / "masks" / "a.png", optimize=True)
    assert np.array_equal(MaskFolder(tmp_path / "images", tmp_path / "masks", classes=NAMES)[0][1], classes)
    seen = np.asarray(Image.open(tmp_path / "masks" / "a.png").convert("RGB"))
    expected = [[colour(0), colour(1), (255, 255, 255)], [colour(2), colour(2), colour(0)]]
    assert np.array_equal(seen, expected)
