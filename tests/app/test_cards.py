"""Answers as HTML: complete, and with nothing in it that a name has smuggled in."""

import base64
import io
import re
from html.parser import HTMLParser

from PIL import Image

from broadsight.app.answers import Answer
from broadsight.app.cards import cards, colour_of, data_uri
from broadsight.benchmark.timing import Summary
from broadsight.visual.plots import PALETTE

EVIL = "<img src=x onerror=alert(1)>\"'&"


def an_answer(**more) -> Answer:
    usual = dict(name="net", task="classify", trained=True, latency=Summary(3.456, 3.0, 0.1), rounds=7, threads=2)
    return Answer(**usual | dict(device="cpu", top=(("crab", 0.75), ("fish", 0.25))) | more)


def tags(text: str) -> list[str]:
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list) -> None:
            found.append(tag)

    Reader().feed(text)
    return found


def test_cards__classes_bars_and_time():
    text = cards([an_answer()], ["other", "net"])
    assert re.findall(r"width:([\d.]+)%", text) == ["75.00", "25.00"]
    assert "75.0 %" in text and "crab" in text
    assert "3.46 ms" in text and "median of 7 passes in turns, 2 threads" in text
    assert f"--accent:{PALETTE[1]}" in text
    assert "random weights" not in text and "random weights" in cards([an_answer(trained=False)], ["net"])


def test_cards__names_and_what_was_found_are_text():
    def found(words):
        rows = ((words, "0.5", "1, 2", "3 x 4"),)
        seen = an_answer(top=(), task="detect", name=words, words=words, rows=rows, drawn=Image.new("RGB", (8, 8)))
        return tags(cards([an_answer(name=words, top=((words, 0.75), (words, 0.25))), seen], [words]))

    assert found(EVIL) == found("cat")


def test_cards__images_lie_in_the_page_and_colours_go_round():
    head, _, data = data_uri(Image.new("RGB", (2000, 1000), (9, 8, 7))).partition(",")
    assert head == "data:image/webp;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (900, 450)
    names = [str(number) for number in range(8)]
    assert [colour_of(name, names) for name in names] == [*PALETTE, *PALETTE[:2]]
