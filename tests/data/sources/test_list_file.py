"""Lists of images: every way to write one that is taken, and what is said of those that are not."""

import pickle
from pathlib import Path

import pytest
import yaml

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


TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
NO_TEXT = (
    ("l.csv", b"10.png,a\n\xff\xfe.png,b\n", "l.csv line 2 is no text in UTF-8; save the list as such"),
    ("l.txt", b"10.png a\ncats/1.png \x00\n", "l.txt line 2 is no text in UTF-8"),
)
CATS_AND_DOGS = {"cats/1.png": "cat", "dogs/a b.png": "dog", "cats/2.png": "cat"}


@pytest.mark.parametrize(("name", "text"), TABLES["written"])
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


@pytest.mark.parametrize(("name", "text", "said"), [*TABLES["wrong"], *NO_TEXT])
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


@pytest.mark.parametrize(("name", "text"), TABLES["paths"])
def test_read_paths(folder, name, text):
    assert read_paths(write(folder, name, text)) == [f"{folder}/cats/1.png", f"{folder}/dogs/a b.png"]


@pytest.mark.parametrize(("name", "text", "said"), TABLES["wrong_paths"])
def test_read_paths__wrong(folder, name, text, said):
    assert f"{folder}/{said}" in refused("", read_paths, write(folder, name, text))
    refused(r"none\.txt: no such file or directory; give a list of images", read_paths, folder / "none.txt")
