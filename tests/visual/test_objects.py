"""Boxes, masks, skeletons and maps of classes on images, pixel by pixel, and classes as files."""

import numpy as np
import pytest
import torch
from PIL import Image

from broadsight.data.sources.mask_folders import MaskFolder, read_indices
from broadsight.visual import objects as drawing
from broadsight.visual.colours import colour, ink
from broadsight.visual.objects import draw_objects, draw_semantic, palette_png
from tests.refusals import refused

from .written import has_written

NAMES = ["cat", "dog", "Žába"]
GREY = (100, 150, 200)
CHIP = 17  # rows of a label on an image of this size


@pytest.fixture
def image():
    return Image.new("RGB", (400, 300), GREY)


def found(*boxes, labels=None, scores=None, **others):
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    labels = torch.tensor(labels if labels else [1] * len(boxes), dtype=torch.int64)
    scores = torch.tensor(scores if scores else [0.9] * len(boxes), dtype=torch.float32)
    return dict(boxes=boxes, labels=labels, scores=scores, **others)


def drawn(image, prediction, names=NAMES, legend=False, **options):
    return np.asarray(draw_objects(image, prediction, names, legend=legend, **options))


def letters(pixels, ground):
    """Pixels that belong to a letter on a label of that colour: neither the label nor the image."""
    return int(((pixels != GREY).any(2) & (pixels != ground).any(2)).sum())


def test_draw_objects__boxes_in_the_colour_of_the_class_and_masks_blended(image):
    pixels = drawn(image, found((50.2, 60.4, 149.6, 160.3), labels=[2]))
    edge = np.zeros((300, 400), bool)
    edge[60:160, 50:150], edge[62:158, 52:148] = True, False
    assert (pixels[edge] == colour(1)).all()
    edge[60 - CHIP : 60, 50:150] = True  # the label
    assert (pixels[~edge] == GREY).all()
    assert (pixels[60 - CHIP : 60] == ink(colour(1))).all(2).any()
    inside = np.zeros((300, 400), bool)
    inside[80:140, 70:130] = True
    probabilities = torch.from_numpy(np.where(inside, 0.6, 0.4)).float()[None, None]
    pixels = drawn(image, found((50, 60, 150, 160), masks=probabilities))
    # 0.55 * (100, 150, 200) + 0.45 * (0, 114, 178) = (55, 133.8, 190.1)
    assert (pixels[81:139, 71:129] == (55, 134, 190)).all()
    outline = inside.copy()
    outline[81:139, 71:129] = False
    assert (pixels[outline] == colour(0)).all()
    within = np.zeros_like(inside)
    within[62:158, 52:148] = True
    assert (pixels[within & ~inside] == GREY).all()
    assert np.array_equal(drawn(image, found((50, 60, 150, 160), masks=torch.from_numpy(inside)[None])), pixels)
    masks = torch.zeros(1, 300, 400)  # one that leaves the image has no outline at the frame
    masks[:, 200:, 300:] = 1
    pixels = drawn(image, found((100, 100, 120, 120), masks=masks))
    assert (pixels[201:, 301:] == (55, 134, 190)).all() and (pixels[200, 300:] == colour(0)).all()


def test_draw_objects__low_scores_are_dropped_and_what_is_more_certain_lies_on_top(image):
    boxes = (50, 60, 150, 160), (200, 60, 300, 160), (200, 200, 300, 290)
    some = found(*boxes, labels=[1, 2, 3], scores=[0.25, 0.75, 0.125])
    for options, first in ((dict(threshold=0.25), colour(0)), ({}, GREY)):
        pixels = drawn(image, some, **options)
        assert [tuple(pixels[y, x]) for y, x in ((100, 50), (100, 200), (250, 200))] == [first, colour(1), GREY]
    same = (50, 60, 150, 160)
    for scores, top in (([0.6, 0.9], 1), ([0.9, 0.6], 0)):
        masks = torch.ones(2, 1, 300, 400)
        pixels = drawn(image, found(same, same, labels=[1, 2], scores=scores, masks=masks))
        assert tuple(pixels[159, 100]) == colour(top)
        # blended twice, the last with the colour on top
        once = [0.55 * a + 0.45 * b for a, b in zip(GREY, colour(1 - top), strict=True)]
        twice = [0.55 * a + 0.45 * b for a, b in zip(once, colour(top), strict=True)]
        assert np.abs(pixels[250, 350] - twice).max() <= 1


@pytest.mark.parametrize("box", [(0, 0, 30, 20), (370, 0, 400, 20), (0, 280, 30, 300), (370, 280, 400, 300)])
def test_draw_objects__labels_at_corners_are_whole(image, box):
    pixels = drawn(image, found(box, labels=[2]))
    middle = drawn(image, found((180, 140, 210, 160), labels=[2]))
    assert letters(pixels, colour(1)) == letters(middle, colour(1)) > 100


def test_draw_objects__legend_says_that_nothing_is_found_or_counts_by_class(image, monkeypatch):
    for prediction in (found(), found((1, 1, 9, 9), scores=[0.1]), found(masks=torch.zeros(0, 1, 300, 400))):
        assert (drawn(image, prediction) == GREY).all()
        result = draw_objects(image, prediction, NAMES)
        assert result.crop((0, 0, 400, 300)).tobytes() == image.tobytes() and result.height > 300
        assert has_written(result, "nothing found with a score of 0.5 or more")
    prediction = found(*[(10, 10, 50, 50)] * 5, labels=[3, 2, 3, 9, 1], scores=[0.9, 0.8, 0.7, 0.6, 0.1])
    lines = []
    monkeypatch.setattr(drawing, "with_legend", lambda canvas, entries, nothing: lines.extend(entries))
    draw_objects(image, prediction, NAMES)
    expected = [("Žába", "2", (colour(2),)), ("dog", "1", (colour(1),)), ("class 8", "1", (colour(8),))]
    assert [(e.name, e.amount, e.colours) for e in lines] == expected


def test_draw_objects__targets_without_scores_half_precision_and_values_that_are_no_numbers(image):
    target = found((50, 60, 150, 160), (60, 70, 160, 170), labels=[1, 2])
    target.pop("scores")
    one, other = (draw_objects(image, target, NAMES, threshold=1.0) for _ in range(2))
    assert one.tobytes() == other.tobytes() and one.getpixel((50, 100)) == colour(0)
    assert has_written(one, "cat") and has_written(one, "dog") and not has_written(one, "Žába")
    nan = float("nan")
    prediction = found((48, 64, 144, 160), (nan, 0, 9, 9), (0, 0, 9, 9), scores=[0.5, 0.9, nan])
    expected = drawn(image, found((48, 64, 144, 160), scores=[0.5]))
    assert np.array_equal(drawn(image, prediction), expected)
    half = {name: v.bfloat16() if v.is_floating_point() else v for name, v in prediction.items()}
    assert np.array_equal(drawn(image, half), expected)


def keypoints(*places):
    return torch.tensor(places, dtype=torch.float32)[None]


def test_draw_objects__keypoints_that_are_seen_and_persons_told_apart(image):
    points = keypoints((100, 150, 2), (200, 150, 1), (200, 250, 2), (300, 250, 0))
    limbs = ((0, 1), (1, 2), (2, 3))
    prediction = found((20, 60, 350, 290), keypoints=points)
    pixels = drawn(image, prediction, skeleton=limbs)
    for x, y in ((100, 150), (150, 150), (200, 150), (200, 200), (200, 250)):
        assert tuple(pixels[y, x]) == colour(0)
    assert (pixels[240:260, 220:320] == GREY).all()  # the last is not labelled
    assert ink(colour(0)) == (255, 255, 255) and pixels[140:160, 90:110].min(2).max() > 130  # the rim, smoothed
    no_limbs = drawn(image, prediction)
    assert tuple(no_limbs[150, 150]) == GREY and tuple(no_limbs[150, 100]) == colour(0)
    prediction["keypoints_scores"] = torch.tensor([[0.9, 0.2, 0.9, 0.9]])
    pixels = drawn(image, prediction, skeleton=limbs)
    assert tuple(pixels[150, 200]) == GREY == tuple(pixels[150, 150])
    assert tuple(drawn(image, prediction, skeleton=limbs, keypoint_threshold=0.1)[150, 200]) == colour(0)
    points = torch.cat([keypoints((100, 150, 2)), keypoints((300, 150, 2))])
    prediction = found((50, 60, 150, 290), (250, 60, 350, 290), scores=[0.6, 0.9], keypoints=points)
    for names, second in ((["person"], colour(1)), (["person", "horse"], colour(0))):
        pixels = drawn(image, prediction, names=names)
        assert tuple(pixels[150, 300]) == colour(0) == tuple(pixels[200, 250])  # the more certain is the first
        assert tuple(pixels[150, 100]) == second == tuple(pixels[200, 50])
    points, box = keypoints((-500, -500, 2), (900, 150, 2), (float("nan"), 3, 2)), (50, 60, 150, 290)
    assert drawn(image, found(box, keypoints=points), skeleton=((0, 1), (1, 2))).shape == (300, 400, 3)
    assert np.array_equal(drawn(image, found(box, keypoints=points[:, :1])), drawn(image, found(box)))  # outside


@pytest.mark.parametrize("side, factor", [(32, 16), (100, 5), (200, 3), (255, 2), (256, 1)])
def test_draw_objects__small_images_are_enlarged(side, factor):
    pixels = drawn(Image.new("L", (side, side), 100), found((4, 20, 20, 30), masks=torch.ones(1, side, side)))
    assert pixels.shape == (side * factor, side * factor, 3)
    assert tuple(pixels[25 * factor, 4 * factor]) == colour(0) == tuple(pixels[30 * factor - 1, 10 * factor])
    assert tuple(pixels[25 * factor, 10 * factor]) == (55, 106, 135)  # 0.55 * 100 + 0.45 * (0, 114, 178)


def test_draw_objects__tiny_images_keep_their_pixels_and_grey_is_the_same_as_its_rgb():
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    assert np.array_equal(drawn(Image.fromarray(noise[:32, :32]), found()), noise[:32, :32].repeat(16, 0).repeat(16, 1))
    grey, prediction = Image.fromarray(noise[..., 0]), found((50, 60, 150, 160), masks=torch.ones(1, 1, 300, 400))
    assert np.array_equal(drawn(grey, prediction, legend=True), drawn(grey.convert("RGB"), prediction, legend=True))


@pytest.mark.parametrize("size", [(2000, 40), (40, 2000), (900, 5), (1, 1), (3, 300)])
def test_draw_objects__any_shape_with_a_thousand_classes(size):
    width, height = size
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(30, 2, 2, generator=generator).sort(1).values * torch.tensor([width, height])
    scores = torch.rand(30, generator=generator)
    prediction = dict(boxes=corners.flatten(1), labels=torch.arange(30) * 33 + 1, scores=scores)
    image, names = Image.new("RGB", size), [f"class number {i}" for i in range(1000)]
    down, across, _ = drawn(image, prediction, names).shape
    assert down * width == across * height
    assert draw_objects(image, prediction, names, threshold=0).width >= width


def test_draw_objects__a_crowd_has_names_in_the_legend_alone(image):
    boxes = [(20 + 28 * i, 150, 40 + 28 * i, 170) for i in range(13)]
    few, many = (drawn(image, found(*some), legend=True)[:300] for some in (boxes[:12], boxes))
    assert letters(many, colour(0)) < letters(few, colour(0))  # although there is one more
    assert letters(drawn(image, found(*boxes)), colour(0)) > letters(few, colour(0))  # no legend: each has its name


def test_draw_objects__refuses_what_does_not_fit(image):
    points = dict(keypoints=keypoints((1, 1, 1)))
    for words, wrong in (
        ("masks are 300 x 400, the image is 400 x 300; expected masks", dict(masks=torch.zeros(1, 1, 400, 300))),
        ("prediction has 1 boxes, 2 labels, 1 scores; expected as many", dict(labels=[1, 2])),
        ("prediction has label 0; expected labels from 1", dict(labels=[0])),
        ("skeleton joins keypoint 4; there are 1, from 0", points),
    ):
        refused(f"^{words}", drawn, image, found((50, 60, 150, 160), **wrong), skeleton=((0, 4),))


KINDS = ["sky", "road", "tree"]


@pytest.fixture
def halves():  # sky on the left, road on the right; the lowest rows belong to no class
    classes = np.zeros((300, 400), np.int64)
    classes[:, 200:], classes[280:] = 1, 255
    return classes


def test_draw_semantic__blends_leaves_what_is_ignored_and_names_large_regions(image, halves):
    pixels = np.asarray(draw_semantic(image, halves, KINDS, opacity=0.5, labels=False, legend=False))
    assert pixels[100, 100].tolist() == [50, 132, 189]  # halfway to (0, 114, 178)
    assert pixels[100, 300].tolist() == [165, 154, 100]  # halfway to (230, 159, 0), 154.5 rounded to even
    assert (pixels[280:] == GREY).all()
    assert (pixels[:279, 199] == 255).all() and (pixels[279, :] == 255).all()  # the contours
    assert (pixels[:279, :199] == (50, 132, 189)).all() and (pixels[:279, 200:] == (165, 154, 100)).all()
    for opacity, left in ((0, (100, 150, 200)), (1, colour(0))):
        assert draw_semantic(image, halves, KINDS, opacity=opacity, labels=False).getpixel((100, 100)) == left
    halves[10:15, 10:15] = 2  # too small for a name
    pixels = np.asarray(draw_semantic(image, halves, KINDS, opacity=0.5, legend=False))
    solid = [np.argwhere((pixels == colour(i)).all(2)) for i in range(3)]
    assert abs(solid[0].mean(0)[1] - 100) < 40 and abs(solid[1].mean(0)[1] - 300) < 40 and not len(solid[2])
    assert (pixels[:, :199] == ink(colour(0))).all(2).any()


def test_draw_semantic__legend_has_the_classes_that_occur_largest_first(image, halves, monkeypatch):
    one, other = (draw_semantic(image, torch.from_numpy(halves), KINDS) for _ in range(2))
    assert one.size == (400, 332) and one.tobytes() == other.tobytes()
    strip = one.crop((0, 300, 400, 332))
    assert [has_written(strip, name) for name in KINDS] == [True, True, False]
    nothing = draw_semantic(image, np.full((300, 400), 255), KINDS)
    assert has_written(nothing, "nothing found")
    assert nothing.crop((0, 0, 400, 300)).tobytes() == image.tobytes()
    classes = np.full((300, 400), 2)
    classes[:30], classes[299, 0], classes[290:, 390:] = 0, 7, 255
    classes[290:, 300:303] = 1
    lines = []
    monkeypatch.setattr(drawing, "with_legend", lambda canvas, entries, nothing: lines.extend(entries))
    draw_semantic(image, classes, KINDS)
    expected = [("tree", "89.9 %", 2), ("sky", "10.0 %", 0), ("road", "< 0.1 %", 1), ("class 7", "< 0.1 %", 7)]
    assert [(e.name, e.amount, e.colours) for e in lines] == [(*pair, (colour(i),)) for *pair, i in expected]


def test_draw_semantic__enlarges_small_grey_images_and_refuses_what_does_not_fit(image):
    classes = np.arange(2).repeat(16)[None].repeat(32, 0)
    result = draw_semantic(Image.new("L", (32, 32), 100), classes, KINDS, opacity=0.5, labels=False, legend=False)
    assert result.mode == "RGB" and result.size == (512, 512)
    assert result.getpixel((0, 0)) == (50, 107, 139) and result.getpixel((254, 0)) == (50, 107, 139)
    assert result.getpixel((255, 0)) == (255, 255, 255) and result.getpixel((256, 0)) == (165, 130, 50)
    for words, classes in (
        ("classes are 300 x 400, the image is 400 x 300; expected a class", np.zeros((400, 300), int)),
        ("classes hold -1; expected whole numbers from 0, or 255 for no class", np.full((300, 400), -1)),
        (r"classes are float32 \(3, 300, 400\); expected", torch.zeros(3, 300, 400)),
    ):
        refused(f"^{words}", draw_semantic, image, classes, KINDS)


def test_palette_png__classes_come_back_exactly_as_a_mask_in_our_colours(tmp_path):
    for most in (2, 4, 16, 256):
        classes = np.random.default_rng(0).integers(0, most, (37, 53))
        image = palette_png(torch.from_numpy(classes))
        image.save(tmp_path / "mask.png")
        assert image.mode == "P" and np.array_equal(read_indices(tmp_path / "mask.png"), classes)
    refused("^classes go from 0 to 256; a palette has 0 to 255", palette_png, np.array([[0, 256]]))
    classes = np.array([[0, 1, 255], [2, 2, 0]])
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    Image.new("RGB", (3, 2)).save(tmp_path / "images" / "a.png")
    palette_png(classes).save(tmp_path / "masks" / "a.png", optimize=True)
    assert np.array_equal(MaskFolder(tmp_path / "images", tmp_path / "masks", classes=KINDS)[0][1], classes)
    seen = np.asarray(Image.open(tmp_path / "masks" / "a.png").convert("RGB"))
    expected = [[colour(0), colour(1), (255, 255, 255)], [colour(2), colour(2), colour(0)]]
    assert np.array_equal(seen, expected)
