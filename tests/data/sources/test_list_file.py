"""Lists of images: every way to write one that is taken, and what is said of those that are not."""

import pickle
from pathlib import Path

import pytest

from broadsight.data.inside import outside_allowed
from broadsight.data.sources import Options, walking
from broadsight.data.sources.list_file import open_list, read_paths
from broadsight.data.sources.sample_table import Part
from tests.refusals import refused

from ..reading import grey, greys, put, rows


@pytest.fixture
def folder(tmp_path) -> Path:
    """Six images, each of its own brightness."""
    for number, name in enumerate(("cats/1.png", "cats/2.png", "dogs/1.png", "dogs/a b.png", "x,y.png", "10.png")):
        put(tmp_path / name, number)
    return tmp_path


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def opened(folder: Path, name: str, text: str) -> Part:
    """The one part of a list."""
    parts = open_list(write(folder, name, text), Options())
    assert list(parts) == ["all"]
    return parts["all"]


CATS_AND_DOGS = {"cats/1.png": "cat", "dogs/a b.png": "dog", "cats/2.png": "cat"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("l.csv", "cats/1.png,cat\ndogs/a b.png,dog\ncats/2.png,cat\n"),
        ("l.csv", "path,label\ncats/1.png,cat\ndogs/a b.png,dog\ncats/2.png,cat"),
        ("l.CSV", '\ufeffFile Name, CLASS\r\n"cats/1.png",cat\r\n\r\n"dogs/a b.png", "dog"\r\ncats/2.png,cat,\r\n'),
        ("l.csv", "label;image_path\ncat;cats/1.png\ndog;dogs/a b.png\ncat;cats/2.png"),
        ("l.csv", "cat,cats/1.png\ndog,dogs/a b.png\ncat,cats/2.png"),
        ("l.tsv", "cats/1.png\tcat\ndogs/a b.png\tdog\ncats/2.png\tcat"),
        ("l.tsv", "category\timg\ncat\tcats/1.png\ndog\tdogs/a b.png\ncat\tcats/2.png"),
        ("l.txt", "# two\ncats/1.png cat\n  dogs/a b.png   dog\n\n#x\ncats/2.png\tcat\n"),
        ("l.txt", "filename label\ncats/1.png cat\ndogs/a b.png dog\ncats/2.png cat"),
        ("l.txt", "# tabs\ncats/1.png\tcat\n# more\ndogs/a b.png\tdog\ncats/2.png\tcat"),
        ("l.txt", "cats/1.png,cat\ndogs/a b.png,dog\ncats/2.png,cat"),
    ],
)
def test_list__ways_to_write_it(folder, name, text):
    part = opened(folder, name, text)
    assert rows(part.source) == CATS_AND_DOGS and list(rows(part.source)) == list(CATS_AND_DOGS)
    assert part.source.classes == ("cat", "dog") and greys(part.source) == [0, 3, 1]
    assert part.place == str(folder / name) and part.notes == []


def test_list__quoted_separators_and_absolute_paths(folder):
    text = f'"x,y.png","a, b"\n{folder / "10.png"},"say ""c"""\n./cats//1.png,ü\n'
    part = opened(folder, "l.csv", text)
    assert rows(part.source) == {"x,y.png": "a, b", str(folder / "10.png"): 'say "c"', "./cats//1.png": "ü"}
    assert greys(part.source) == [4, 5, 0]


def test_list__numbers_by_value_and_the_same_image_twice(folder):
    part = opened(folder, "l.txt", "cats/1.png 10\ncats/2.png 9\ndogs/1.png 010\n10.png -1\n")
    assert part.source.classes == ("-1", "9", "10") and part.source.labels.tolist() == [2, 1, 2, 0]
    assert opened(folder, "l.txt", "cats/1.png 10\ncats/2.png 9\n10.png x").source.classes == ("9", "10", "x")
    part = opened(folder, "l.txt", "10.png a\n10.png a\ncats/1.png b")
    said = f"{folder / 'l.txt'} lists images that it has listed before: 1 lines"
    assert (len(part.source), part.notes) == (3, [said])


def test_list__parts(folder):
    text = "path,label,split,width\ncats/1.png,cat,train,4\ndogs/1.png,dog,Train,4\n"
    path = write(folder, "l.csv", text + "cats/2.png,cat,test,4\n10.png,dog,VAL,4\n")
    parts = open_list(path, Options(1))
    assert rows(parts["train"].source) == {"cats/1.png": "cat", "dogs/1.png": "dog"}
    assert rows(parts["val"].source) == {"10.png": "dog"} and parts["val"].source.classes == ("dog",)
    assert parts["val"].source.open(0).mode == "L"
    assert {key: part.place for key, part in parts.items()} == {key: f"{path} ({key})" for key in ("train", "val")}
    assert parts["train"].notes == [f"not used in {path}: 1 images of test", f"columns not used in {path}: width"]


def test_list__goes_to_other_processes_and_other_places(folder, monkeypatch):
    write(folder, "l.txt", "10.png a\ncats/1.png b")
    monkeypatch.chdir(folder)
    source = open_list("l.txt", Options())["all"].source
    monkeypatch.chdir("/")
    copy = pickle.loads(pickle.dumps(source))
    assert rows(copy) == {"10.png": "a", "cats/1.png": "b"} and grey(copy, 0) == 5


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("l.csv", "", "l.csv lists no images; expected a path and a label on each line"),
        ("l.txt", "# nothing\n\n", "l.txt lists no images; expected"),
        ("l.csv", "path,label\n\n", "l.csv lists no images below the names of its columns"),
        ("l.csv", "10.png,a\ncats/1.png\n", "l.csv line 2 has no label; expected a path and a label on each line"),
        ("l.csv", "10.png,a\n\n,b\n", "l.csv line 3 has no path; expected"),
        ("l.csv", "10.png\n", "l.csv line 1 has no label"),
        ("l.txt", "10.png a\ndogs/a b.png\n", "l.txt line 2 has no label"),
        ("l.csv", "id,name\n1,a\n", "l.csv line 1 has no image and no column of paths: id, name; call one path, one "),
        ("l.csv", "path,width\n10.png,4\n", "l.csv line 1 has no column of labels: path, width; call one label"),
        ("l.csv", "10.png,a,4\n", "l.csv line 1 has 3 fields, and no line above says what they are; add one: path"),
        ("l.csv", "10.png,cats/1.png\n", "l.csv line 1 has two images; a list gives each image a class"),
        ("l.csv", "10.png,a\nx,y.png,b\n", "l.csv line 2 has 3 fields, the first line 2; put those with separators in"),
        ("l.csv", '10.png,a\n"cats/1.png,b\n', "l.csv line 2: unexpected end of data; see to its quotation marks"),
        ("l.csv", b"10.png,a\n\xff\xfe.png,b\n", "l.csv line 2 is no text in UTF-8; save the list as such"),
        ("l.txt", b"10.png a\ncats/1.png \0\n", "l.txt line 2 is no text in UTF-8"),
        ("l.csv", "path,label,part\n10.png,a,train\n10.png,a,foo\n", "l.csv line 3 is of part 'foo'; expected train"),
        ("l.csv", "path,label,part\n10.png,a\n", "l.csv line 2 is of part ''; expected train or val"),
    ],
)
def test_list__wrong(folder, name, text, said):
    assert f"{folder}/{said}" in refused("", open_list, write(folder, name, text), Options())


@pytest.mark.parametrize("few", [0, 16])  # by reading folders, or file by file
def test_list__missing_images(folder, monkeypatch, few):
    monkeypatch.setattr(walking, "FEW", few)
    gone = ["cats/3.png", "cats//4.png", "none/1.png", "z.png", "cats"]
    path = write(folder, "l.csv", "".join(f"{name},a\n" for name in ["10.png", *gone, "cats/1.png", "z.png", "x.png"]))
    message = refused("", open_list, path, Options())
    what = f"6 of 8 images in {path} do not exist: cats/3.png, cats//4.png, none/1.png and 3 more"
    assert message == f"{what}; paths are relative to {folder}"
    path = write(folder, "l.csv", "10.png,a\n/none/1.png,b\n")
    with outside_allowed():
        refused(r"1 of 2 images in .* do not exist: /none/1\.png; correct the paths$", open_list, path, Options())
    (folder / "lists").mkdir()
    path = write(folder / "lists", "l.txt", "cats/1.png 0\ncats/2.png 1\n")
    monkeypatch.chdir(folder)
    refused(r"paths are relative to .*lists; these are relative to the working directory$", open_list, path, Options())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("l.txt", "# two\ncats/1.png\n\ndogs/a b.png\n"),
        ("l.lst", "cats/1.png\r\ndogs/a b.png\r\n"),
        ("l.txt", "cats/1.png 3\ndogs/a b.png 4\n"),
        ("l.csv", "cats/1.png\ndogs/a b.png\n"),
        ("l.csv", "Image\ncats/1.png\ndogs/a b.png\n"),
        ("l.csv", "id,path,width\n1,cats/1.png,4\n2,dogs/a b.png\n"),
        ("l.csv", "1,cats/1.png,4\n2,dogs/a b.png,4\n"),
        ("l.tsv", "cats/1.png\tcat\ndogs/a b.png\tdog\n"),
    ],
)
def test_read_paths(folder, name, text):
    assert read_paths(write(folder, name, text)) == [f"{folder}/cats/1.png", f"{folder}/dogs/a b.png"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("l.txt", "", "l.txt lists no images; expected a path on each line"),
        ("l.csv", "path\n", "l.csv lists no images below the names of its columns; expected a path on each line"),
        ("l.csv", "path,width\n10.png,4\n,4\n", "l.csv line 3 has no path; expected one on each line"),
        ("l.csv", "id,name\n1,a\n", "l.csv line 1 has no image and no column of paths: id, name; call one path"),
        ("l.txt", "10.png\nnone\n", "l.txt do not exist: none; paths are relative to "),
    ],
)
def test_read_paths__wrong(folder, name, text, said):
    assert f"{folder}/{said}" in refused("", read_paths, write(folder, name, text))
    refused(r"none\.txt: no such file or directory; give a list of images", read_paths, folder / "none.txt")
