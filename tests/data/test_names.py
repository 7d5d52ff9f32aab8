"""Names that others have chosen stay mere text in CSV files, Markdown, terminals and folders."""

import csv
import html
import io
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import broadsight
from broadsight.data.names import (
    CsvRows,
    address,
    csv_cell,
    csv_text,
    file_stem,
    markdown,
    markdown_block,
    markdown_code,
    printable,
    unique_stems,
)
from broadsight.data.sources import Options
from broadsight.data.sources.list_file import open_list, read_paths
from tests.data.nasty_names import NASTY
from tests.training.small_runs import png


def table(*rows):
    file = io.StringIO()
    writer = CsvRows(file)
    for row in rows:
        writer.write(row)
    return file.getvalue()


def test_csv__no_cell_is_a_formula_and_all_read_back():
    text = table(*([name, 1, name] for name in NASTY))
    for delimiter in ",;":  # as spreadsheets here and elsewhere read it
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
            assert not any(re.match("[=+\\-@\uff1d]", cell.lstrip()) for cell in row), row
    found = list(csv.reader(io.StringIO(text, newline="")))
    assert [[csv_text(cell) for cell in row] for row in found] == [[name, "1", name] for name in NASTY]
    file = io.StringIO()
    file.isatty = lambda: True  # a terminal, which may obey no cell
    CsvRows(file).write(NASTY)
    assert file.getvalue().rstrip("\n").isprintable()
    # numbers stay numbers
    assert table([-1.5, "-0.5", "+3", "-1e-05", "-inf", -2, "a"]) == "-1.5,-0.5,+3,-1e-05,-inf,-2,a\n"
    assert csv_cell("-1+2") == "'-1+2" and csv_cell("-") == "'-" and csv_cell("it's") == "it's"
    for text in ("=a", "'=a", "''=a", "a", "'a", "", "-1", "'-1", "-1x"):
        assert csv_text(csv_cell(text)) == text


def test_csv__a_table_of_ours_is_a_list_of_images(tmp_path):
    names = ["=1.png", "+a.png", "-b.png", "@c.png", "'=d.png", "''=e.png", "plain.png", "a;=1.png"]
    for name in names:
        (tmp_path / name).write_bytes(png(1, 2, 3))
    listed, classes = tmp_path / "list.csv", ["=x", "-y"] * 4
    listed.write_text(table(["file", "label"], *zip(names, classes, strict=True)), encoding="utf-8")
    assert read_paths(listed) == [str(tmp_path / name) for name in names]
    part = open_list(listed, Options())["all"]
    assert list(part.source.classes) == ["-y", "=x"] and part.source.labels.tolist() == [1, 0] * 4
    listed.write_text("file\n'=d.png\n", encoding="utf-8")  # somebody else's, who knows of no apostrophes
    (tmp_path / "=d.png").unlink(missing_ok=True)
    assert read_paths(listed) == [str(tmp_path / "'=d.png")]


@pytest.mark.parametrize("name", NASTY, ids=range(len(NASTY)))
def test_markdown__shows_the_name_and_nothing_else(name):
    """As a reader of Markdown takes it: a mark is a letter behind a backslash."""
    text = markdown(name)
    assert "\n" not in text and text.isprintable()
    bare = re.sub(r"\\.", "", text)
    assert not re.search(r"[<>`*_\[\]|&@]|://|www\.", bare)
    assert re.sub(r"\\([^\w\s]|_)", r"\1", text) == printable(name)
    assert printable(name).isprintable() and printable(name).encode("utf-8") is not None
    code = markdown_code(name)
    marks, inner = re.fullmatch(r"(`+)(?!`)(.*)(?<!`)\1", code).groups()
    assert marks not in re.findall("`+", inner) and inner.strip() == printable(name).strip()
    first, *lines, last = markdown_block(name)
    assert first == f"{last}text" and not any(line.startswith(last) for line in lines)
    assert re.fullmatch(r"[\w.~/%-]*", address(name))


def test_files__stay_in_their_folder(tmp_path):
    forms = ("{}", "{}.jpg", "x.tar/{}.jpg", "..{}", "{}/...jpg")
    names = [form.replace("{}", name) for name in NASTY for form in forms]
    stems = unique_stems(names, ["taken"])
    assert len({stem.casefold() for stem in stems}) == len(names)
    for stem in stems:
        file = tmp_path / "out" / stem / "x.png"
        assert Path(os.path.normpath(file)).parent.parent == tmp_path / "out"
        assert len(os.fsencode(f"{stem}.png")) < 255 and not re.search(r'[\x00-\x1f/\\:*?"<>|]', stem)
    assert file_stem("...jpg") == file_stem("..") == file_stem("") == "image"
    assert unique_stems(["a.jpg", "b/a.jpg", "a-2.jpg", "A.png"]) == ["a", "a-2", "a-2-2", "A-3"]
    assert unique_stems(["Taken.jpg"], ["taken"]) == ["Taken-2"]


def test_nasty__html_of_a_name_is_its_text():
    from broadsight.visual.html import environment

    template = environment().from_string("{{ name }}")
    for name in NASTY:
        shown = template.render(name=name)
        assert not re.search("[<>\"']", shown) and "\x1b" not in shown and "\u202e" not in shown
        left = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e\udcff]", "\ufffd", name)
        assert html.unescape(shown) == left


def test_csv__tables_of_predictions_boxes_and_evaluations(tmp_path):
    """They have one writer, that of `names`."""
    files = Path(broadsight.__file__).parent.rglob("*.py")
    assert [path.name for path in files if "csv.writer(" in path.read_text("utf-8")] == ["names.py"]
    from broadsight.evaluation.record import predictions_csv
    from broadsight.prediction.classification import Prediction, writing
    from broadsight.prediction.dense import Findings, write_findings

    names = [name for name in NASTY if name]
    with writing(str(tmp_path / "a.csv"), 1, "csv") as writer:
        for name in names:
            writer.write(Prediction(name, (name,), (0,), (0.5,), ""))
    ids = {number: number for number in range(1, 1 + len(names))}
    run: Any = SimpleNamespace(
        task="detect", classes=names, category_ids=ids, title="", source="", precision="fp32", parameters=1
    )
    box = dict(score=0.5, bbox=[-1.5, 2, 3, 4])
    boxes = [{"file_name": name, "category_id": number, **box} for number, name in enumerate(names, 1)]
    write_findings(Findings(entries=boxes), run, results=None, table=tmp_path / "b.csv", command="")
    count = len(names)
    said = dict.fromkeys(("rows", "labels", "predicted"), range(count))
    said |= dict(confidence=[0.5] * count, ranks=[0] * count, losses=[-0.5] * count)
    Said = type("Said", (SimpleNamespace,), {"__len__": lambda self: count})
    task = SimpleNamespace(source=SimpleNamespace(name=names.__getitem__), names=names)
    result: Any = SimpleNamespace(predictions=Said(**said), task=task)
    (tmp_path / "c.csv").write_text(predictions_csv(result), "utf-8", "surrogateescape", newline="")
    for file, texts in (("a.csv", (0, 1)), ("b.csv", (0, 1)), ("c.csv", (0, 1, 2))):
        with open(tmp_path / file, encoding="utf-8", errors="surrogateescape", newline="") as opened:
            _, *rows = csv.reader(opened)
        for name, row in zip(names, rows, strict=True):
            assert not any(re.match("[=+\\-@\t\r]", row[place]) for place in texts)
            assert [csv_text(row[place]) for place in texts] == [name] * len(texts)
    assert rows[0][5] == "-0.500000"
