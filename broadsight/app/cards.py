"""Answers as HTML: a card for each model."""

from collections.abc import Sequence

from PIL import Image

from ..visual import html
from ..visual.plots import PALETTE
from .answers import Answer

TASKS = {"classify": "classification", "detect": "detection", "instances": "instance segmentation"}
TASKS |= {"segment": "semantic segmentation", "keypoints": "keypoints"}
OBJECTS, SHARES = ("class", "score", "x, y", "size"), ("class", "share of the image")


def cards(answers: Sequence[Answer], order: Sequence[str]) -> str:
    """Write all answers side by side; a model has the colour of its place in `order`, here and in the comparison."""
    shown = []
    for one in answers:
        columns = SHARES if one.task == "segment" else OBJECTS
        look = dict(task=TASKS[one.task], colour=colour_of(one.name, order), columns=columns)
        shown.append(vars(one) | look | dict(drawn=one.drawn and data_uri(one.drawn)))
    return html.render("app/cards", cards=shown)


def colour_of(name: str, order: Sequence[str]) -> str:
    """Colour of a model by its place in `order`; the first for a name that is not there."""
    return PALETTE[order.index(name) % len(PALETTE)] if name in order else PALETTE[0]


def hint(text: str) -> str:
    """Write a quiet line for a place where something will appear."""
    return html.render("app/hint", text=text)


def data_uri(image: Image.Image) -> str:
    """Encode an image, at most 900 pixels wide and high, inside the page itself: nothing of it is left on the disk."""
    small = image.copy()
    small.thumbnail((900, 900))
    return html.data_uri(small, "WEBP", quality=90)
