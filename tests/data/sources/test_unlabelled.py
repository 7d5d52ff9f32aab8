"""Images by name: files, folders, patterns, lists, and what is said of those that are not there."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from broadsight.data.inside import outside_allowed
from broadsight.data.sources.unlabelled import Unlabelled, find_images

from ...training.small_runs import refusal
from ..reading import greys, put


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A working folder; the images differ in colour."""
    monkeypatch.chdir(tmp_path)
    names = ["photos/img2.png", "photos/img10.png", "photos/deep/er/A1.JPG", "photos/.hidden.png", "alone.png"]
    for place, name in enumerate([*names, "photos/.trash/x.png", "photos/__MACOSX/x.png"]):
        put(tmp_path / name, 20 * place)
    Path("photos/notes.txt").write_text("no image")
    Path("empty").mkdir()
    return tmp_path


def found(*arguments, **options) -> list[str]:
    source, notes = find_images(arguments, **options)
    assert notes == [], notes
    return [source.name(index) for index in range(len(source))]


def missing(*arguments) -> str:
    return refusal(lambda: find_images(arguments), FileNotFoundError)


def test_files__in_the_order_given_whatever_they_are_called(photos):
    names = ["photos/img10.png", "alone.png", "photos/notes.txt", "photos/img2.png", "photos/.hidden.png"]
    assert found(names[0], Path(names[1]), *names[2:]) == names


@pytest.mark.parametrize("folder", ["photos", "photos/"])
def test_folder__images_at_any_depth_in_natural_order(photos, folder):
    source, notes = find_images([folder])
    assert list(source.names) == ["photos/deep/er/A1.JPG", "photos/img2.png", "photos/img10.png"]
    assert notes == [f"{folder}: files that are no images are ignored: photos/notes.txt"]
    Path("photos/deep/again").symlink_to(photos / "photos")
    assert len(find_images([folder])[0]) == 3


def test_pattern__is_recursive_takes_images_alone_and_is_no_existing_path(photos):
    assert found("photos/**/*.png") == ["photos/img2.png", "photos/img10.png"]
    assert found("photos/*/*/*.JPG", "photos/img?.png") == ["photos/deep/er/A1.JPG", "photos/img2.png"]
    source, notes = find_images(["photos/*"])
    assert list(source.names) == ["photos/img2.png", "photos/img10.png"]
    assert notes == ["photos/*: files that are no images are ignored: photos/notes.txt"]
    for name in ("a[1].png", "a1.png", "b*.png"):
        os.link("alone.png", name)
    Path("f[x]").mkdir()
    os.link("alone.png", "f[x]/y.png")
    assert found("a[1].png", "b*.png", "f[x]") == ["a[1].png", "b*.png", "f[x]/y.png"]


def test_twice__is_once_and_noted(photos):
    given = ["photos/img2.png", "alone.png", "photos/*.png", "./photos//img2.png", str(photos / "alone.png")]
    source, notes = find_images(given)
    assert list(source.names) == ["photos/img2.png", "alone.png", "photos/img10.png"]
    assert notes == [f"2 images named more than once, and predicted once: ./photos//img2.png, {photos}/alone.png"]


def test_list__is_relative_to_its_own_folder_and_missing_files_are_counted(photos):
    Path("lists").mkdir()
    Path("lists/some.txt").write_text(f"../alone.png\n../photos/img10.png\n{photos}/photos/img2.png\n")
    with outside_allowed():
        source, notes = find_images(["alone.png"], listing="lists/some.txt")
    found = [os.path.relpath(os.path.realpath(name)) for name in source.names]
    assert found == ["alone.png", "photos/img10.png", "photos/img2.png"]
    assert len(notes) == 1 and notes[0].startswith("1 image named more than once")
    Path("some.txt").write_text("alone.png\nnone.png\nphotos/never.png\n")
    said = refusal(lambda: find_images([], listing="some.txt"))
    assert "2 of 3" in said and "some.txt" in said and "none.png, photos/never.png" in said
    said = refusal(lambda: find_images([], listing="other.txt"), FileNotFoundError)
    assert said == "there is no list other.txt; expected a text file with a path on every line"


def test_missing__all_in_one_line(photos):
    assert missing("gone.png", "alone.png", "x/*.png", "empty", "y/*", "nowhere/") == (
        "no such file or folder: gone.png, nowhere/ (2 of 6 given); 2 patterns without a matching image: x/*.png, y/*; "
        "1 folder without images: empty"
    )
    said = missing(*(f"{number}.png" for number in range(9)))
    assert said == "no such file or folder: 0.png, 1.png, 2.png, 3.png, 4.png and 4 more (9 of 9 given)"
    assert missing("photos/*.txt") == "1 pattern without a matching image: photos/*.txt"
    Path("dead.png").symlink_to("gone.png")
    os.mkfifo("pipe.png")  # would never end
    said = missing("dead.png", "pipe.png", "a" * 5000, "nul\0.png")
    assert said.startswith("no such file or folder: dead.png, aaa")
    assert said.endswith("neither files nor folders: pipe.png (a pipe); give the paths of files")
    said = refusal(lambda: find_images([]))
    assert said == "no images given; expected files, folders, quoted patterns, or a --list of files"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_folder__that_may_not_be_read(photos):
    os.chmod("photos/deep", 0)
    assert refusal(lambda: find_images(["photos"])).startswith("permission denied: photos/deep; ")


def test_source__reads_from_anywhere_in_grey_or_rgb_and_travels(photos, monkeypatch):
    source, _ = find_images(["photos/img10.png", str(photos / "alone.png")])
    monkeypatch.chdir("/")
    source = pickle.loads(pickle.dumps(source))
    assert greys(source) == [20, 80] and source.labels.tolist() == [0, 0] and source.classes == ()
    assert (source.in_channels(1).open(0).mode, source.open(0).mode) == ("L", "RGB")
    assert refusal(lambda: source.in_channels(4)) == "a model for images of 4 channels; expected 1 (grey) or 3 (RGB)"
    odd = os.fsdecode(b"not \xff unicode.png")
    source = Unlabelled(["ä\n,.png", odd])
    assert list(source.names) == ["ä\n,.png", odd] and isinstance(source.names.text, np.ndarray)
