"""The overview sheet: what is shown where, and that it holds for whatever comes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from broadsight.explanation.maps.map import Look
from broadsight.explanation.overlay import overlay
from broadsight.explanation.sheet import BIG, COLUMNS, GAP, MARGIN, ROWS, TILE, WIDTH, arranged, overview_sheet
from broadsight.visual.colours import colour


def look(kind="attention", title="head mean", depth=0, form="heat", values=None, note=""):
    values = torch.rand(4, 4) if values is None else values
    return Look(kind, title, f"blocks.{depth}", depth, form, values, note)


def image(width=64, height=64):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def count(sheet, ink):
    return int((np.asarray(sheet) == ink).all(-1).sum())


def holds(sheet, part):
    """The left edge of an image that is in the sheet, pixel for pixel, or None."""
    whole, wanted = np.asarray(sheet), np.asarray(part)
    (height, width), places = wanted.shape[:2], np.argwhere((whole == wanted[0, 0]).all(-1)).tolist()
    found = (x for y, x in places if np.array_equal(whole[y : y + height, x : x + width], wanted))
    return next(found, None)


def test_arranged__depth_left_to_right_a_row_for_each_thing_or_the_mean_of_many_heads():
    rows = arranged([look(title=title, depth=depth) for depth in (1, 0, 2) for title in ("mean", "largest")])
    found = [(row.words, [one.depth for one in row.looks]) for row in rows]
    assert found == [("mean", [0, 1, 2]), ("largest", [0, 1, 2])]
    looks = [look(title=f"history up to layer {depth + 1}", depth=depth) for depth in range(6)]
    (row,) = arranged(looks)  # titles that count layers are one thing
    assert row.words == "history up to layer …" and [one.depth for one in row.looks] == [*range(6)]
    titles = ["head mean", *(f"head {number}" for number in range(1, 6))]
    (row,) = arranged([look(title=title, depth=depth) for depth in range(12) for title in titles])
    assert row.words == "head mean (1 of 6 such maps)" and {one.title for one in row.looks} == {"head mean"}
    assert [one.depth for one in row.looks] == [0, 2, 3, 5, 6, 8, 9, 11] and len(row.looks) == COLUMNS


def test_arranged__every_place_that_was_asked_for():
    places = [(f"({x},9)", depth) for depth in range(5) for x in range(6)]
    rows = arranged([replace(look("query", title, depth), mark=(0.5, 0.5)) for title, depth in places])
    assert [(row.words, len(row.looks)) for row in rows] == [(f"({x},9)", 5) for x in range(6)]


def test_arranged__tokens_of_one_layer_by_group():
    tokens = [look(title=f"group {group}, token {token}") for group in (1, 2) for token in (1, 2, 3)]
    (row,) = arranged(tokens)  # short groups share a line
    assert row.words == "" and len(row.looks) == 6
    tokens = [look(title=f"group {group}, token {token}") for group in (1, 2) for token in range(6)]
    assert [(row.words, len(row.looks)) for row in arranged(tokens)] == [("group 1", 6), ("group 2", 6)]
    assert [len(row.looks) for row in arranged([look(title=str(n)) for n in range(200)])] == [COLUMNS] * ROWS
    (row,) = arranged([look(title=f"group 1, token {token}", depth=depth) for depth in (0, 1) for token in range(7)])
    assert row.words == "the last of 2 layers" and {one.depth for one in row.looks} == {1}


def test_sheet__holds_the_image_and_the_maps():
    under = image()
    cams = [look("gradcam", "dog", depth) for depth in range(3)]
    sheet = overview_sheet(under, cams, [("dog", 0.5)], "a model", explained="dog")
    big, small = (under.resize((side, side), Image.Resampling.BICUBIC) for side in (BIG, TILE))
    assert sheet.width == WIDTH and sheet.mode == "RGB"
    assert holds(sheet, big) == MARGIN
    assert holds(sheet, overlay(big, cams[-1])) == MARGIN + BIG + GAP  # the last is the usual one
    assert [holds(sheet, overlay(small, cam)) for cam in cams] == [MARGIN + n * (TILE + GAP) for n in range(3)]


def test_sheet__has_bars_as_long_as_answers_are_probable_warns_and_tells_of_flat_maps():
    bars = {}
    for share in (0.2, 0.4):
        sheet = overview_sheet(image(), [], [("cat", 0.1), ("dog", share)], explained="dog")
        bars[share] = count(sheet, colour(5)) - 150, count(sheet, colour(0))  # the mark in the legend is as large
    assert 1.9 < bars[0.4][0] / bars[0.2][0] < 2.1 and bars[0.4][1] == bars[0.2][1]
    assert 1.85 < bars[0.2][0] / bars[0.2][1] < 2.15
    plain, warned = (overview_sheet(image(), [], title="x", warning=text) for text in ("", "untrained"))
    assert warned.height > plain.height and count(warned, (140, 58, 0)) > 20 and count(plain, (140, 58, 0)) == 0
    sheets = (overview_sheet(image(), [look(values=values)]) for values in (torch.ones(2, 2), torch.eye(2)))
    flat, other = ((np.asarray(sheet)[-60:] < 128).sum() for sheet in sheets)  # of the words below the map
    assert flat > other
    kinds = ["gradcam", "attention", "map-tokens", "my-own"]
    heights = [overview_sheet(image(), [look(kind) for kind in kinds[:n]]).height for n in range(5)]
    assert heights == sorted(set(heights))


@pytest.mark.parametrize("size", [(1, 1), (500, 20), (20, 500)])
def test_sheet__of_any_image(size):
    looks = [
        look("gradcam", "x", values=torch.full((1, 1), float("nan"))),
        look("super-tokens", "association", form="labels", values=torch.arange(16).view(4, 4)),
        look("foreground", "foreground", form="mask", values=torch.zeros(4, 4, dtype=torch.bool)),
    ]
    answers = [("狗 ñ ∑ " * 40, 0.7), ("\n\t", float("nan")), ("", 2.0)]
    sheet = overview_sheet(image(*size), looks, answers, "n" * 900, subtitle="s" * 900, explained="not there")
    assert sheet.width == WIDTH and sheet.height < 3000
