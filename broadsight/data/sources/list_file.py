"""Images that a text file lists: a path and a label on each line, with or without names for the columns."""

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from ..inside import refuse_outside
from ..names import csv_text
from .folder import FolderSource
from .registry import LISTS, Options, register_source
from .sample_table import PARTS, TRAIN, VAL, Part, Parts, in_order, is_image, noted, some
from .walking import missing_files

# What columns may be called.
PATH, LABEL, SPLIT = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")).values()

Line = tuple[int, list[str]]  # its number in the file, and its fields


class Columns(NamedTuple):
    """The places of the fields in a line, their number, the names of unused ones, and whether line 1 has the names."""

    path: int
    label: int = 0
    split: int | None = None
    count: int = 2
    unused: tuple[str, ...] = ()
    header: bool = False


@register_source("list", *LISTS)
def open_list(data: str, options: Options) -> Parts:
    """The images of a .csv, .tsv or .txt list, with paths relative to the list's folder, or absolute ones into it.

    Fields of a .csv are separated by commas, or else semicolons, those of a .txt by tabs, or else by white space before
    the last word, the label. Lines of a .txt that begin with # are comments; the first line may name the columns. A
    column called `split` or `part` tells training from validation images; of several of these, the first of `VAL`.
    """
    path = Path(data)
    columns, lines = _table(path, labelled=True)
    splits: list[str | None] = ["all"] * len(lines)
    for row, (number, fields) in enumerate(lines):
        if not fields[columns.path] or not fields[columns.label]:
            what = "label" if fields[columns.path] else "path"
            raise ValueError(f"{path} line {number} has no {what}; expected a path and a label on each line")
        if columns.split is not None:
            splits[row] = fields[columns.split].lower()
            if splits[row] not in PARTS:
                raise ValueError(f"{path} line {number} is of part {fields[columns.split]!r}; expected train or val")
    names, labels = ([fields[place] for _, fields in lines] for place in (columns.path, columns.label))
    _check_files(path, names)
    numbers = all(re.fullmatch("[+-]?[0-9]+", label) for label in labels)
    labels = [str(int(label)) for label in labels] if numbers else labels
    parts: Parts = {}
    unused = []
    for key, words in (("all", ("all",)), ("train", TRAIN), ("val", VAL)):
        used, *others = [word for word in words if word in splits] or [None]
        rows = [row for row, word in enumerate(splits) if word == used]
        unused += [f"{splits.count(word):,} images of {word}" for word in others]
        if rows:
            present = {labels[row] for row in rows}
            classes = sorted(present, key=int) if numbers else in_order(present)
            index = {name: place for place, name in enumerate(classes)}
            given = [index[labels[row]] for row in rows]
            source = FolderSource(path.parent, [names[row] for row in rows], given, classes, options.channels)
            parts[key] = Part(source, str(path) if key == "all" else f"{path} ({used})")
    notes = next(iter(parts.values())).notes
    notes += noted(f"not used in {path}", unused) + noted(f"columns not used in {path}", columns.unused)
    if twice := len(names) - len(set(names)):
        notes.append(f"{path} lists images that it has listed before: {twice:,} lines")
    return parts


def read_paths(path: Path) -> list[str]:
    """The images, by absolute paths, of a list of lines or of a column of that name or with images; no labels."""
    columns, lines = _table(path, labelled=False)
    names = [fields[columns.path] for _, fields in lines]
    if "" in names:
        raise ValueError(f"{path} line {lines[names.index('')][0]} has no path; expected one on each line")
    _check_files(path, names)
    return [_place(path, name) for name in names]


def _table(path: Path, labelled: bool) -> tuple[Columns, list[Line]]:
    """The columns of a list, and the lines below their names, each with a field for every column."""
    lines = list(_lines(path, whole=not labelled))
    columns = _columns(path, lines, labelled)
    for number, fields in lines[columns.header :]:
        if any(fields[columns.count :]):
            what = f"{path} line {number} has {len(fields)} fields, the first line {columns.count}"
            raise ValueError(f"{what}; put those with separators in them in quotation marks")
        fields += [""] * (columns.count - len(fields))
    return columns, lines[columns.header :]


def _lines(path: Path, whole: bool) -> Iterator[Line]:
    """The fields of lines that are no comments; if `whole`, a line of words is a path, not a path and a label."""
    text, comments = _text(path), path.suffix.lower() not in (".csv", ".tsv")
    separator = _separator(path, text)
    if separator is None:
        for number, line in enumerate(map(str.strip, text.split("\n")), 1):
            if line and not line.startswith("#"):
                words = line.rsplit(None, 1)
                yield number, [line] if is_image(line) or (whole and not is_image(words[0])) else words
        return
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    try:
        for fields in reader:
            fields = [_said(path, field.strip()) for field in fields]
            if any(fields) and not (comments and fields[0].startswith("#")):
                yield reader.line_num, fields
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num}: {error}; see to its quotation marks") from None


def _said(path: Path, field: str) -> str:
    """A field without the apostrophe of our own tables (`csv_cell`); a file that has one in its name keeps it."""
    text = csv_text(field)
    named_so = text != field and os.path.isfile(_place(path, field)) and not os.path.isfile(_place(path, text))
    return field if named_so else text


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
        good = data.partition(b"\0")[0]
    except OSError as error:
        raise ValueError(f"{path}: {(error.strerror or str(error)).lower()}; give a list of images") from None
    except UnicodeDecodeError as error:
        good = data[: error.start]
    if good != data:
        raise ValueError(f"{path} line {good.count(10) + 1} is no text in UTF-8; save the list as such")
    return text


def _separator(path: Path, text: str) -> str | None:
    """What is between the fields; None if any white space is. Where the name does not tell, the first line does."""
    suffix, lines = path.suffix.lower(), map(str.strip, text.split("\n"))
    first = next((line for line in lines if line and not (line.startswith("#") and suffix != ".csv")), "")
    if suffix == ".csv":
        return next((mark for mark in ",;\t" if mark in first), ",")
    if suffix == ".tsv" or "\t" in first:
        return "\t"
    return "," if "," in first and len(first.split()) == 1 and not is_image(first) else None


def _place(path: Path, name: str) -> str:
    return os.path.join(os.path.abspath(path.parent), name)


def _columns(path: Path, lines: Sequence[Line], labelled: bool) -> Columns:
    """The columns by the first line: it names them, or its own fields show what they are."""
    expected = "expected a path and a label on each line" if labelled else "expected a path on each line"
    if not lines:
        raise ValueError(f"{path} lists no images; {expected}")
    number, fields = lines[0]
    at, count = f"{path} line {number}", len(fields)
    images = [place for place, field in enumerate(fields) if is_image(field) or os.path.isfile(_place(path, field))]
    images = images or [place for place, field in enumerate(fields) if "/" in field]
    called = [re.sub("[^a-z]", "", field.lower()) for field in fields]
    if not images and (labelled or count > 1 or called[0] in PATH):
        name, label, split = (
            next((called.index(word) for word in words if word in called), None) for words in (PATH, LABEL, SPLIT)
        )
        if name is None:
            wanted = "call one path" + ", one label" * labelled
            raise ValueError(f"{at} has no image and no column of paths: {some(fields)}; {wanted}")
        if label is None and labelled:
            raise ValueError(f"{at} has no column of labels: {some(fields)}; call one label")
        if len(lines) == 1:
            raise ValueError(f"{path} lists no images below the names of its columns; {expected}")
        unused = [field for place, field in enumerate(fields) if place not in (name, label, split)]
        return Columns(name, label or 0, split, count, tuple(unused) if labelled else (), header=True)
    if not labelled:
        return Columns(images[0] if images else 0, count=count)
    if count == 1:
        raise ValueError(f"{at} has no label; {expected}")
    if count > 2:
        raise ValueError(f"{at} has {count} fields, and no line above says what they are; add one: path,label,…")
    if len(images) == 2:
        raise ValueError(f"{at} has two images; a list gives each image a class")
    return Columns(images[0], 1 - images[0])


def _check_files(path: Path, names: Sequence[str]) -> None:
    """Refuse images outside of the list's folder, and in one line all that do not exist."""
    refuse_outside(path, names, [path.parent])
    if shown := missing_files(folder := os.path.abspath(path.parent), names):
        here = "; these are relative to the working directory" if os.path.isfile(shown[0]) else ""
        hint = "correct the paths" if os.path.isabs(shown[0]) else f"paths are relative to {folder}{here}"
        what = f"{len(shown):,} of {len(set(names)):,} images in {path} do not exist: {some(shown, 3)}"
        raise ValueError(f"{what}; {hint}")
