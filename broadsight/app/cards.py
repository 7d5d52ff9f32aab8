"""Answers as HTML: a card for each model. All that others have named is escaped."""

import base64
import io
from collections.abc import Sequence
from html import escape

from PIL import Image

from ..visual.plots import PALETTE
from .answers import Answer

TASKS = {
    "classify": "classification",
    "detect": "detection",
    "instances": "instance segmentation",
    "segment": "semantic segmentation",
    "keypoints": "keypoints",
}
OBJECTS = ("class", "score", "x, y", "size")


def cards(answers: Sequence[Answer], order: Sequence[str]) -> str:
    """All answers side by side; a model has the colour of its place in `order`, here and in the comparison."""
    return f'<div class="bs-cards">{"".join(_card(one, order) for one in answers)}</div>'


def colour_of(name: str, order: Sequence[str]) -> str:
    return PALETTE[order.index(name) % len(PALETTE)] if name in order else PALETTE[0]


def hint(text: str) -> str:
    """A quiet line where something will appear."""
    return f'<p class="bs-hint">{escape(text)}</p>'


def _card(one: Answer, order: Sequence[str]) -> str:
    unsure = '<span class="bs-tag bs-random">random weights</span>' if not one.trained else ""
    body = _bars(one) if one.top else _found(one)
    return (
        f'<article class="bs-card" style="--accent:{colour_of(one.name, order)}" aria-label="{escape(one.name)}">'
        f"<header><h3>{escape(one.name)}</h3><p><span class='bs-tag'>{escape(TASKS[one.task])}</span>{unsure}</p>"
        f"</header>{body}<footer>{_time(one)}</footer></article>"
    )


def _bars(one: Answer) -> str:
    rows = "".join(
        f'<li><span class="bs-name">{escape(name)}</span><span class="bs-share">{100 * share:.1f} %</span>'
        f'<span class="bs-bar" aria-hidden="true"><i style="width:{100 * share:.2f}%"></i></span></li>'
        for name, share in one.top
    )
    return f'<ol class="bs-bars">{rows}</ol>'


def _found(one: Answer) -> str:
    image = ""
    if one.drawn is not None:
        alt = f"The image with what {one.name} found: {one.words}"
        image = f'<img class="bs-drawn" alt="{escape(alt)}" src="{data_address(one.drawn)}">'
    heads = ("class", "share of the image") if one.task == "segment" else OBJECTS
    table = ""
    if one.rows:
        head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in one.rows)
        table = (
            '<div class="bs-scroll" tabindex="0" role="region" aria-label="What was found">'
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        )
    return f'{image}<p class="bs-words">{escape(one.words)}</p>{table}'


def _time(one: Answer) -> str:
    passes = f"median of {one.rounds} passes in turns" if one.rounds > 1 else "one pass"
    threads = f"{one.threads} thread{'s' if one.threads > 1 else ''}"
    where = threads if one.device == "cpu" else one.device
    return f'<strong class="bs-time">{milliseconds(one.latency.median)}</strong> <span>{passes}, {where}</span>'


def milliseconds(value: float) -> str:
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def data_address(image: Image.Image, side: int = 900) -> str:
    """An image inside the page itself: nothing of it is left on the disk."""
    small = image.copy()
    small.thumbnail((side, side))
    file = io.BytesIO()
    small.save(file, "WEBP", quality=90)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
