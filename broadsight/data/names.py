"""Names of files, classes and runs as mere text: no formula, link, HTML, command or way out of a folder."""

import csv
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from ..errors import printable

MOST_BYTES = 200  # of a file name, which gets a number and an ending too
# Where a spreadsheet may see a formula begin: in a cell, and behind what parts cells in some countries; also in wide
# letters, which some of them read alike
_BEGIN, _SIGN = "(?:^|(?<=[;\t\r\n]))", "'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]"
_FORMULA, _QUOTED_FORMULA = re.compile(f"{_BEGIN}(?={_SIGN})"), re.compile(f"{_BEGIN}'(?={_SIGN})")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
# An address needs no brackets to become a link: it has :// or www.
_MARKS = re.compile(r"([\\`*_\[\]<>#|~&@$]|:(?=//)|(?<=www)\.)", re.IGNORECASE)
_NO_FILE = re.compile(r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|\u200e\u200f\u2028-\u202e\u2066-\u2069]')


class CsvRows:
    """Writes rows of a CSV file for programs and spreadsheets alike: see `csv_cell`."""

    def __init__(self, file: TextIO):
        self.watched = file.isatty()  # a terminal would obey what a file keeps
        self.plain = csv.writer(file, lineterminator="\n")
        self.quoted = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)

    def write(self, row: Iterable[Any]) -> None:
        cells = [csv_cell(printable(cell) if self.watched and isinstance(cell, str) else cell) for cell in row]
        # Python before 3.13 quotes a carriage return only where lines end in one; some countries' spreadsheets part
        # fields at semicolons
        odd = any(isinstance(cell, str) and re.search("[\r\t;]", cell) for cell in cells)
        (self.quoted if odd else self.plain).writerow(cells)


def csv_cell(value: Any) -> Any:
    """A cell as it is written: text that would be a formula behind an apostrophe, which spreadsheets remove."""
    return value if not isinstance(value, str) or _NUMBER.fullmatch(value) else _FORMULA.sub("'", value)


def csv_text(cell: str) -> str:
    """The text of a cell: the inverse of `csv_cell`."""
    return _QUOTED_FORMULA.sub("", cell)


def markdown(text: object) -> str:
    """Any text as one line of Markdown without links, HTML or further columns."""
    return _MARKS.sub(r"\\\1", printable(str(text)))


def markdown_code(text: object) -> str:
    """The same as inline code; not for tables, where a bar would end the column."""
    text = printable(str(text))
    marks, space = _fence(text), " " if text[:1] in ("`", " ", "") or text[-1:] in ("`", " ") else ""
    return f"{marks}{space}{text}{space}{marks}"


def markdown_block(text: str) -> list[str]:
    """The lines of a code block for any text."""
    marks = max(_fence(text), "```", key=len)
    return [f"{marks}text", *map(printable, text.split("\n")), marks]


def _fence(text: str) -> str:
    """More backticks than the text has in a row."""
    return "`" * (1 + max(map(len, re.findall("`+", text)), default=0))


def address(path: str) -> str:
    """A relative path as the address of a link in Markdown or HTML."""
    return quote(os.fsencode(path), safe="/")


def file_stem(name: str) -> str:
    """The name of a file without folders and ending, valid for a new file on any system."""
    stem = _NO_FILE.sub("_", Path(name).stem).rstrip(" .")
    while len(os.fsencode(stem)) > MOST_BYTES:
        stem = stem[:-1]
    return stem.rstrip(" .") or "image"


def unique_stems(names: Sequence[str], taken: Iterable[str] = ()) -> list[str]:
    """File names for images: theirs, with a number where two would be the same or in `taken`."""
    used = {name.casefold() for name in taken}
    numbers: dict[str, int] = defaultdict(lambda: 1)
    stems = []
    for name in names:
        stem = first = file_stem(name)
        while stem.casefold() in used:  # to some disks, Dog and dog are the same
            numbers[first.casefold()] += 1
            stem = f"{first}-{numbers[first.casefold()]}"
        used.add(stem.casefold())
        stems.append(stem)
    return stems
