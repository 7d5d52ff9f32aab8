"""Masks from polygons and run lengths: by hand on small grids, and pixel by pixel against pycocotools."""

import json

import numpy as np
import pytest

from broadsight.data.sources.coco_masks import MaskPool, expand_text
from tests.refusals import refused

from ..reading import shared


def draw(segmentation, height: int, width: int) -> np.ndarray:
    pool = MaskPool()
    assert pool.add(segmentation, height, width)
    return pool.draw(0, height, width)


def grid(text: str) -> list[list[bool]]:
    return [[letter == "#" for letter in line] for line in text.split()]


@pytest.mark.parametrize(
    ("polygons", "expected"),
    [
        ([[1, 1, 4, 1, 4, 3, 1, 3]], "..... .###. .###. ....."),
        ([[1.4, 0, 3, 0, 3, 2, 1.4, 2]], ".##. .##."),  # 1.4 < 1.5 < 1.6: the left edge decides about column 1
        ([[1.6, 0, 3, 0, 3, 2, 1.6, 2]], "..#. ..#."),
        ([[0, 0, 2, 8, 4, 0]], "#### #### .##. .##. .##. .##. .... ...."),  # a steep triangle, whichever way round
        ([[4, 0, 2, 8, 0, 0]], "#### #### .##. .##. .##. .##. .... ...."),
        ([[0, 0, 2, 0, 2, 2, 0, 2], [1, 1, 3, 1, 3, 3, 1, 3]], "##.. ###. .##."),  # parts that overlap
        ([[-5, -5, 2, -5, 2, 9, -5, 9]], "##. ##. ##."),  # it ends at the image
        ([[10, 10, 12, 10, 12, 12]], "... ... ..."),
    ],
)
def test_polygon__by_hand(polygons, expected):
    rows = grid(expected)
    assert draw(polygons, len(rows), len(rows[0])).tolist() == rows


def test_polygon__of_fewer_than_three_corners_outlines_nothing():
    pool = MaskPool()
    assert not any(pool.add(one, 4, 4) for one in ([[1, 1, 2, 2], []], [], None)) and len(pool) == 0
    assert pool.add([[1, 1, 2, 2], [0, 0, 2, 0, 2, 2, 0, 2]], 4, 4)  # the second counts
    assert pool.draw(0, 4, 4).sum() == 4


def test_runs__go_down_the_columns_and_come_as_text():
    assert draw(dict(size=[2, 3], counts=[1, 2, 1, 2]), 2, 3).tolist() == grid(".## #.#")
    assert draw(dict(size=[2, 3], counts=[0, 6]), 2, 3).all()
    # 1 -> "1"; 2 -> "2"; 3 -> "3"; then 2 - 2 = 0 -> "0" and 1 - 3 = -2 -> 30 = 0b11110 -> chr(48 + 30) = "N"
    # 100 = 0b00011_00100: 4 with more to come (36 + 48 = "T"), then 3; 16 needs a second letter to stay positive
    for text, runs in (("1230N", [1, 2, 3, 2, 1]), ("T3", [100]), ("`0", [16]), ("8", [8])):
        assert expand_text(text).tolist() == runs


def test_pool__keeps_masks_of_both_kinds_apart():
    pool, parts = MaskPool(), [[0, 0, 1, 0, 1, 2, 0, 2], [1, 0, 2, 0, 2, 1, 1, 1]]
    for one in ([[0, 0, 1, 0, 1, 1, 0, 1]], dict(size=[2, 2], counts="31"), parts):
        pool.add(one, 2, 2)
    masks = [pool.draw(i, 2, 2).tolist() for i in range(len(pool))]
    assert masks == [grid("#. .."), grid(".. .#"), grid("## #.")]


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ([1, 2, 3, 4, 5, 6], "expected a list .* inside of a list"),
        ([[1, 2, 3, 4, 5, 6, 7]], "has 7 numbers; expected pairs"),
        ([[1, 2, float("nan"), 4, 5, 6]], "no number or far outside"),
        ([[1, 2, 1e9, 4, 5, 6]], "no number or far outside"),
        ([[90_000.0, 5.0, -90_000.0, 5.0] * 500], "an outline of 180,000,000 pixels; expected up to 1,000,000$"),
        ("text", "is a str; expected polygons or run lengths"),
        (dict(counts=[6]), 'without "size" and "counts"'),
        (dict(size=[3, 2], counts=[6]), r"size \[3, 2\] but its image \[2, 3\]"),
        (dict(size=[2, 3], counts=[1, 4]), "add up to 5 pixels; the image has 2 x 3"),
        (dict(size=[2, 3], counts=[-1, 7]), "whole numbers from 0 up"),
        (dict(size=[2, 3], counts=[0.5, 5.5]), "whole numbers from 0 up"),
        (dict(size=[2, 3], counts=""), "cut off"),
        (dict(size=[2, 3], counts="T"), "cut off"),
        (dict(size=[2, 3], counts="6 "), "other letters"),
        (dict(size=[2, 3], counts="oooooooo0"), "too large"),
    ],
)
def test_add__refuses(segmentation, message):
    pool = MaskPool()
    refused(message, pool.add, segmentation, 2, 3)
    assert len(pool) == 0


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools' own
def test_polygon__equals_pycocotools_whatever_its_corners():
    oracle = pytest.importorskip("pycocotools.mask")
    random, different = np.random.default_rng(0), []
    for trial in range(1500):
        height, width, corners = int(random.integers(1, 40)), int(random.integers(1, 40)), random.integers(3, 9)
        points = random.uniform(-20, 60, (corners, 2))
        if trial % 3:  # corners on the grid and between, where rounding matters, and twice the same
            points = np.repeat((points * (trial % 3)).round() / (trial % 3), 1 + trial % 2, axis=0)
        polygon = points.ravel().tolist()
        expected = oracle.decode(oracle.merge(oracle.frPyObjects([polygon], height, width)))
        if not np.array_equal(draw([polygon], height, width), expected):
            different.append((height, width, polygon))
    assert different == []


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_masks__of_real_annotations_equal_pycocotools():
    oracle = pytest.importorskip("pycocotools.mask")
    content = json.loads(shared("coco/instances.json").read_text())
    sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    different, kinds = [], {list: 0, dict: 0}
    for item in content["annotations"]:
        size, segmentation = sizes[item["image_id"]], item["segmentation"]
        kinds[type(segmentation)] += 1
        rle = oracle.frPyObjects(segmentation, *size)
        rle = oracle.merge(rle) if isinstance(rle, list) else rle
        text = dict(size=rle["size"], counts=rle["counts"].decode())
        if not all(np.array_equal(draw(one, *size), oracle.decode(rle)) for one in (segmentation, text)):
            different.append(item["id"])
    assert different == [] and kinds == {list: 887, dict: 13}
