"""Words on images: fonts that have the letters, labels that stay inside the image and do not overlap, legends."""

import unicodedata
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .colours import WHITE, Colour, ink

# Tried in turn for letters that Pillow's own font, None, lacks: nearly all beyond English.
FONTS = (None, "DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "NotoSansCJK-Regular.ttc")
FONTS += ("wqy-microhei.ttc", "Arial Unicode.ttf", "PingFang.ttc", "segoeui.ttf", "msyh.ttc", "malgun.ttf")
PAPER, TEXT, MUTED, EDGE = WHITE, (27, 31, 36), (89, 98, 108), (223, 227, 231)  # the light theme of the reports
MOST = 20  # lines of a legend
WIDEST = 18  # letters' heights that a label or a line of a legend may be wide

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Entry(NamedTuple):
    """A line of a legend: a name, its amount, and the colours that share its swatch."""

    name: str
    amount: str
    colours: tuple[Colour, ...]


def letter_size(image: Image.Image) -> int:
    """A fortieth of the image's side, so that words look alike on small and large images, but 12 pixels at least."""
    return max(12, round((image.width * image.height) ** 0.5 / 40))


def fitting(text: str, size: int, width: float, ending: str = "") -> tuple[str, Font]:
    """The text, cut with "…" before its ending to fit into a width in pixels, and its font; "" if nothing fits."""
    whole, font = _font(" ".join(f"{text} {ending}".split()), size)
    if font.getlength(whole) <= width:
        return whole, font
    ending = f" {ending}" if ending else ""
    letters = whole.removesuffix(ending)
    counts = range(1, len(letters) + 1)
    most = bisect(counts, width, key=lambda count: font.getlength(f"{letters[:count]}…{ending}"))
    return (f"{letters[:most].rstrip()}…{ending}" if most else "", font)


def draw_labels(
    canvas: Image.Image,
    boxes: Sequence[tuple[int, int, int, int]],
    names: Sequence[str],
    amounts: Sequence[str],
    colours: Sequence[Colour],
    brief: bool = False,
) -> None:
    """Chips with a name and an amount at boxes (first column and row, last column and row), the most important first;
    if `brief`, a box that is narrower than its chip gets only the amount."""
    size = letter_size(canvas)
    room = min(canvas.width - 2 * (size // 3), WIDEST * size)
    fitted = [fitting(name, size, room, amount) for name, amount in zip(names, amounts, strict=True)]
    for i, (box, (text, font)) in enumerate(zip(boxes, fitted, strict=True)):
        if not text or (brief and box[2] - box[0] < chip_size(text, font, size)[0]):
            fitted[i] = fitting(amounts[i], size, room)
    sizes = [chip_size(text, font, size) for text, font in fitted]
    places = place_chips([(x1, y1, x2 + 1, y2 + 1) for x1, y1, x2, y2 in boxes], sizes, canvas.size).tolist()
    for i in reversed(range(len(boxes))):
        (text, font), (width, height) = fitted[i], sizes[i]
        if text and width <= canvas.width and height <= canvas.height:
            draw_chip(canvas, places[i], text, font, size, colours[i])


def place_chips(boxes: Sequence[tuple], sizes: Sequence[tuple[int, int]], bounds: tuple[int, int]) -> np.ndarray:
    """Left and top, (N, 2), of the chips of boxes, the most important first: above a box if there is room, else along
    its edges or in rows near it, where it covers least of those before it, and always inside the image."""
    placed = np.zeros((len(boxes), 4))
    for i, ((x1, y1, x2, y2), (width, height)) in enumerate(zip(boxes, sizes, strict=True)):
        places = [(left, top) for left in (x1, x2 - width) for top in (y1 - height, y1, y2 - height, y2)]
        places += [(x1, y1 + row * height) for step in range(1, 5) for row in (step, -1 - step)]
        asked, size = np.array(places), np.array((width, height))
        corners = asked.clip(0, np.maximum(bounds - size, 0))
        mine = np.concatenate([corners, corners + size], axis=1)  # P 4
        low, high = np.maximum(mine[:, None, :2], placed[:i, :2]), np.minimum(mine[:, None, 2:], placed[:i, 2:])
        covered = (high - low).clip(0).prod(2).sum(1)
        moved = abs(corners - asked).sum(1)  # a chip that is pushed inside may cover its object
        best = np.lexsort((np.arange(len(places)), moved, covered))[0]
        placed[i] = mine[best]
    return placed[:, :2].astype(int)


def chip_size(text: str, font: Font, size: int) -> tuple[int, int]:
    """Width and height of a text with its margin."""
    return int(np.ceil(font.getlength(text))) + 2 * (size // 3), round(1.4 * size)


def draw_chip(image: Image.Image, place: Sequence[int], text: str, font: Font, size: int, ground: Colour) -> None:
    (left, top), (width, height) = place, chip_size(text, font, size)
    pen = ImageDraw.Draw(image)
    pen.rounded_rectangle((left, top, left + width - 1, top + height - 1), size // 5, fill=ground)
    pen.text((left + size // 3, top + height / 2 + 0.35 * size), text, fill=ink(ground), font=font, anchor="ls")


def with_legend(image: Image.Image, entries: Sequence[Entry], nothing: str) -> Image.Image:
    """The image with a strip that lists the entries, or says `nothing`, below it, or to the right of a tall one."""
    size = letter_size(image)
    margin, row, swatch = size, round(1.7 * size), round(1.1 * size)
    lines = list(entries[:MOST]) or [Entry(nothing, "", ())]
    if len(entries) > MOST:
        lines.append(Entry(f"… {len(entries) - MOST:,} more", "", ()))
    beside = image.height > 1.2 * image.width
    most = max(round(0.6 * image.height), 8 * size) if beside else image.width - 2 * margin
    most = min(most, (WIDEST + 4) * size)
    widths = [swatch + size // 2 + _length(f"{line.name}  {line.amount}", size) for line in lines]
    column = min(most, max(widths))
    rows, columns = max(1, (image.height - 2 * margin) // row), max(1, (image.width - margin) // (column + margin))
    columns = -(-len(lines) // rows) if beside else min(len(lines), columns)
    rows = rows if beside else -(-len(lines) // columns)
    across, down = columns * (column + margin) + margin, min(rows, len(lines)) * row + margin
    whole = (image.width + across, max(image.height, down)) if beside else (image.width, image.height + down)
    canvas = Image.new("RGB", whole, PAPER)
    canvas.paste(image)
    left, top = (image.width, 0) if beside else (0, image.height)
    for i, line in enumerate(lines):
        place = left + margin + i // rows * (column + margin), top + margin // 2 + i % rows * row
        _draw_entry(canvas, place, line, size, column)
    return canvas


def side_by_side(images: Mapping[str, Image.Image]) -> Image.Image:
    """Images in a row under their titles, such as truth and prediction. torchvision's make_grid wants equal sizes."""
    if not images:
        raise ValueError("no images to put side by side; expected at least one, by its title")
    size = max(map(letter_size, images.values()))  # also of the gap
    widths, heights = zip(*(image.size for image in images.values()), strict=True)
    canvas = Image.new("RGB", (sum(widths) + size * (len(images) - 1), 2 * size + max(heights)), PAPER)
    pen, x = ImageDraw.Draw(canvas), 0
    for title, image in images.items():
        text, font = fitting(title, round(1.2 * size), image.width)
        pen.text((x, 1.4 * size), text, fill=TEXT, font=font, anchor="ls")
        canvas.paste(image.convert("RGB"), (x, 2 * size))
        x += image.width + size
    return canvas


def _draw_entry(canvas: Image.Image, place: tuple[int, int], entry: Entry, size: int, width: int) -> None:
    (x, y), side, count = place, round(1.1 * size), len(entry.colours)
    pen, top = ImageDraw.Draw(canvas), y + round(0.3 * size)
    for i, part in enumerate(entry.colours):
        left, right = x + side * i // count, x + side * (i + 1) // count - 1
        pen.rectangle((left, top, max(left, right), top + side - 1), fill=part)
    if entry.colours:
        pen.rectangle((x, top, x + side - 1, top + side - 1), outline=EDGE)
    start, base = x + side + size // 2 if entry.colours else x, y + round(1.2 * size)
    amount, amount_font = _font(entry.amount, size)
    room = x + width - start - (_length(f"  {amount}", size) if amount else 0)
    name, font = fitting(entry.name, size, room)
    pen.text((start, base), name, fill=TEXT if start > x else MUTED, font=font, anchor="ls")
    after = start + font.getlength(name) + _length("  ", size)
    pen.text((after, base), amount, fill=MUTED, font=amount_font, anchor="ls")


def _length(text: str, size: int) -> int:
    text, font = _font(text, size)
    return int(np.ceil(font.getlength(text)))


@lru_cache(maxsize=4096)
def _font(text: str, size: int) -> tuple[str, Font]:
    """The first font with all letters of a text; else the text without accents, with boxes for the fewest letters."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    there = [name for name in FONTS if _open(name, size) is not None]
    tried = [(words, name) for words in dict.fromkeys((text, plain)) for name in there]
    words, name = min(tried, key=lambda one: (sum(not _has(one[1], letter) for letter in one[0]), tried.index(one)))
    return words, _open(name, size) or ImageFont.load_default(size)


@lru_cache(maxsize=256)
def _open(name: str | None, size: int) -> Font | None:
    try:
        return ImageFont.load_default(size) if name is None else ImageFont.truetype(name, size)
    except OSError:
        return None


@lru_cache(maxsize=65536)
def _has(name: str | None, letter: str) -> bool:
    """Whether a font has a letter: it looks unlike U+FFFF, which no font has."""
    return letter.isspace() or _look(name, letter) != _look(name, "\uffff")


def _look(name: str | None, letter: str) -> bytes:
    image = Image.new("L", (32, 32))
    ImageDraw.Draw(image).text((4, 4), letter, fill=255, font=_open(name, 16))
    return image.tobytes()
