"""One overview sheet of an image: the image, the answers, and all looks inside the model, by depth."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw

from ..visual.colours import Colour, colour
from ..visual.lettering import EDGE, MUTED, PAPER, TEXT, fitting
from .maps.map import KNOWN, Look
from .overlay import colour_bar, is_flat, overlay

COLUMNS, ROWS = 8, 4  # the most that a kind takes
TILE, GAP, MARGIN = 150, 10, 28
BIG = 2 * TILE + GAP
WIDTH = 2 * MARGIN + COLUMNS * TILE + (COLUMNS - 1) * GAP
TITLE, HEADING, WORDS, SMALL = 26, 19, 15, 12  # sizes of letters
ANSWERS = 5
WARNING = (140, 58, 0)  # text on white, in the orange of the palette but dark enough to be read


class Row(NamedTuple):
    """Looks side by side, under a line of words."""

    words: str
    looks: Sequence[Look]


def overview_sheet(
    image: Image.Image,
    looks: Sequence[Look],
    answers: Sequence[tuple[str, float]] = (),
    title: str = "",
    *,
    subtitle: str = "",
    explained: str | None = None,
    warning: str = "",
) -> Image.Image:
    """A sheet to print or to put on a page, RGB; at most 8 columns of every kind, evenly chosen from its layers.

    Args:
        image: What the model sees: resized and cropped.
        looks: As `look_inside` gives them; the last Grad-CAM stands beside the image.
        answers: Names of classes with their probabilities, 0 to 1, the most probable first; five are shown.
        explained: Name of the class that Grad-CAM explains; marked among the answers.
        warning: A line in another colour, such as that the model is untrained.
    """
    if min(image.size) < 1:
        raise ValueError(f"the image has {image.width} x {image.height} pixels; expected 1 or more")
    parts = [_head(title, subtitle, warning), _first(image, looks, answers, explained)]
    for kind in dict.fromkeys(look.kind for look in looks):
        parts.append(_section(image, kind, [look for look in looks if look.kind == kind]))
    sheet = Image.new("RGB", (WIDTH, MARGIN + sum(part.height for part in parts)), PAPER)
    top = 0
    for part in parts:
        sheet.paste(part, (0, top))
        top += part.height
    return sheet


def arranged(looks: Sequence[Look]) -> list[Row]:
    """How the looks of one kind are laid out: depth left to right, a row for each thing, or only the first of many.

    Of few layers with many things, as in a pooling, all looks of the last one are shown.
    """
    depths = sorted({look.depth for look in looks})
    things: dict[str, list[Look]] = {}
    for look in sorted(looks, key=lambda look: look.depth):
        counts = len(depths) > 1 and len({other.depth for other in looks if other.title == look.title}) == 1
        thing = re.sub(r"\d+$", "…", look.title) if counts else look.title  # without the number of its layer
        things.setdefault(thing, []).append(look)
    most = len(things) if all(look.mark for look in looks) else ROWS  # each place was asked for
    if (len(things) > most and len(depths) <= 3) or len(depths) == 1:
        last = [look for look in looks if look.depth == depths[-1]]
        of = f"the last of {len(depths)} layers" if len(depths) > 1 else ""
        return [Row(", ".join(filter(None, (row.words, of))), row.looks) for row in _grouped(last)]
    rest = f" (1 of {len(things)} such maps)" if len(things) > most else ""
    shown = list(things.items())[: 1 if rest else most]
    return [Row(f"{words}{rest}", spread(found, COLUMNS)) for words, found in shown]


def spread(items: Sequence[Look], most: int) -> list[Look]:
    """At most that many, evenly chosen, the first and the last among them."""
    count = min(len(items), most)
    return [items[round(place * (len(items) - 1) / max(count - 1, 1))] for place in range(count)]


def _grouped(looks: Sequence[Look]) -> list[Row]:
    """Rows of looks of one layer: by the part of their titles before the comma, or as many as fit."""
    groups: dict[str, list[Look]] = {}
    for look in looks:
        groups.setdefault(look.title.rpartition(", ")[0], []).append(look)
    if not 1 < len(groups) < len(looks) or max(map(len, groups.values())) > COLUMNS:
        chosen = spread(looks, ROWS * COLUMNS)
        return [Row("", chosen[at : at + COLUMNS]) for at in range(0, len(chosen), COLUMNS)]
    packed: list[Row] = []
    for words, found in groups.items():
        if packed and len(packed[-1].looks) + len(found) <= COLUMNS:  # short rows share a line
            packed[-1] = Row("", [*packed[-1].looks, *found])
        else:
            packed.append(Row(words, found))
    return packed[: 2 * ROWS]


def _head(title: str, subtitle: str, warning: str) -> Image.Image:
    lines = [(title, TITLE, TEXT), (subtitle, WORDS, MUTED), (warning, WORDS, WARNING)]
    lines = [line for line in lines if line[0]]
    part = Image.new("RGB", (WIDTH, MARGIN + sum(round(1.5 * size) for _, size, _ in lines)), PAPER)
    top = MARGIN
    for words, size, ink in lines:
        _write(part, (MARGIN, top + size), words, size, WIDTH - 2 * MARGIN, ink)
        top += round(1.5 * size)
    return part


def _first(
    image: Image.Image, looks: Sequence[Look], answers: Sequence[tuple[str, float]], explained: str | None
) -> Image.Image:
    """The image, Grad-CAM beside it, and the answers with what the colours mean."""
    big, top = _fitted(image, BIG), GAP + round(1.9 * WORDS)
    part = Image.new("RGB", (WIDTH, top + max(big.height, 260) + GAP), PAPER)
    shown, left = {"what the model sees": big}, MARGIN
    if cams := [look for look in looks if look.kind == "gradcam"]:
        words = f"Grad-CAM for {explained}" if explained else f"Grad-CAM, {cams[-1].title}"
        shown[words] = overlay(big, cams[-1])
    for words, one in shown.items():
        _write(part, (left, top - 8), words, WORDS, BIG, TEXT)
        part.paste(one, (left, top))
        left += BIG + GAP
    left += 2 * GAP
    _write(part, (left, top - 8), "answers", WORDS, BIG, TEXT)
    _bars(part, left, top, answers, explained)
    if any(look.form == "heat" for look in looks):
        top = part.height - 46 - GAP
        part.paste(colour_bar(200, 14), (left + 30, top + 2))
        words = "every map from its own smallest value to its largest"
        for x, y, text in ((0, 13, "low"), (238, 13, "high"), (0, 34, words)):
            _write(part, (left + x, top + y), text, SMALL, part.width - MARGIN - left - x, MUTED)
    return part


def _bars(part: Image.Image, left: int, top: int, answers: Sequence[tuple[str, float]], explained: str | None) -> None:
    pen, names, figures = ImageDraw.Draw(part), 200, 62
    room = part.width - MARGIN - left - names - figures
    for name, share in answers[:ANSWERS]:
        share = min(max(share, 0.0), 1.0) if share == share else 0.0
        _write(part, (left, top + 20), name, WORDS, names - 12, TEXT)
        pen.rounded_rectangle((left + names, top + 6, left + names + room, top + 24), 4, fill=EDGE)
        long = max(share * room, 5)  # the smallest are seen too
        bar = (left + names, top + 6, left + names + long, top + 24)
        pen.rounded_rectangle(bar, min(4, int(long / 2)), fill=colour(5 if name == explained else 0))
        _write(part, (left + names + room + 8, top + 20), f"{100 * share:.1f} %", WORDS, figures, MUTED)
        top += 34
    if explained and explained not in [name for name, _ in answers[:ANSWERS]]:
        _write(part, (left, top + 14), f"explained: {explained}, not among these", SMALL, 480, MUTED)
    elif explained:
        pen.rounded_rectangle((left, top + 4, left + 12, top + 16), 3, fill=colour(5))
        _write(part, (left + 18, top + 14), "the class that Grad-CAM explains", SMALL, 400, MUTED)


def _section(image: Image.Image, kind: str, looks: Sequence[Look]) -> Image.Image:
    known = KNOWN.get(kind, dict(name=kind, about=""))
    rows = arranged(looks)
    small = _fitted(image, TILE)
    head, line, caption = round(2.6 * HEADING), round(1.9 * SMALL), round(1.7 * SMALL)
    titled = len({look.depth for row in rows for look in row.looks}) == 1
    words = []
    for row in rows:  # and the clauses that the notes of all its looks have in common
        clauses, *others = (look.note.split("; ") for look in row.looks)
        shared = "; ".join(clause for clause in clauses if all(clause in other for other in others))
        words.append(": ".join(filter(None, (row.words, shared))))
    heights = [(line if text else 0) + small.height + caption + GAP for text in words]
    part = Image.new("RGB", (WIDTH, head + sum(heights)), PAPER)
    pen = ImageDraw.Draw(part)
    pen.line((MARGIN, GAP, WIDTH - MARGIN, GAP), fill=EDGE, width=1)
    end = _write(part, (MARGIN, round(1.9 * HEADING)), known["name"], HEADING, 400, TEXT)
    count = len({look.depth for look in looks})
    depth = f";  {count} layers, the first at the left" if count > 1 and not titled else ""
    _write(part, (end + 14, round(1.9 * HEADING)), known["about"] + depth, WORDS, WIDTH - end, MUTED)
    top = head
    for row, text, height in zip(rows, words, heights, strict=True):
        _write(part, (MARGIN, top + SMALL), text, SMALL, WIDTH - 2 * MARGIN, TEXT)
        bottom = top + height - GAP - caption
        for column, look in enumerate(row.looks):
            left = MARGIN + column * (TILE + GAP)
            part.paste(overlay(small, look), (left, bottom - small.height))
            named = look.title.removeprefix(f"{row.words}, ") if titled else look.layer
            flat = "flat: " if is_flat(look) else ""
            _write(part, (left, bottom + round(1.2 * SMALL)), flat + named, SMALL, TILE, MUTED)
        top += height
    return part


def _fitted(image: Image.Image, side: int) -> Image.Image:
    """As wide as that, and not much taller."""
    image = image.convert("RGB")
    factor = min(side / image.width, 1.5 * side / image.height)
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    return image.resize(size, Image.Resampling.BICUBIC if factor > 1 else Image.Resampling.LANCZOS)


def _write(part: Image.Image, place: tuple[float, float], words: str, size: int, width: float, ink: Colour) -> float:
    """Write words from the left end of their base line, cut to a width; returns their right end."""
    text, font = fitting(words, size, width)
    ImageDraw.Draw(part).text(place, text, fill=ink, font=font, anchor="ls")
    return place[0] + font.getlength(text)
