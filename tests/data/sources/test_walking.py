"""Folders with links in them: every real folder and image once, in finite time."""

import os
from pathlib import Path

import pytest
from PIL import Image

from broadsight.data.sources import Options, resolve
from broadsight.data.sources.folder import open_folder
from broadsight.data.sources.mask_folders import MaskFolder
from broadsight.data.sources.unlabelled import find_images
from broadsight.data.sources.walking import holds_images, images_below
from tests.refusals import refused

from ..reading import everything, put, said

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links need rights there")


def open_class_folders(path):
    return open_folder(path, Options())


def below(folder: Path, **options) -> list[str]:
    return sorted(images_below(folder, "", [], **options))


@pytest.fixture
def knot(tmp_path) -> Path:
    """Nine class folders that link to each other, to the folder around them, and to themselves."""
    root = tmp_path / "knot"
    for name in "abcdefghi":
        for number in range(4):
            put(root / name / f"{number}.png", number)
        (root / name / "up").symlink_to("..")
        (root / name / "far_up").symlink_to("../..")
        (root / name / "self").symlink_to("self")
        for other in "abcdefghi":
            (root / name / f"to_{other}").symlink_to(f"../{other}")
    return root


def test_class_folders_that_link_to_each_other(knot):
    (knot / "j").symlink_to(put(knot.parent / "store/x.png").parent)
    (knot / "a/gone.png").symlink_to("nothing.png")
    splits = resolve(str(knot))
    assert splits.classes == tuple("abcdefghij")
    expected = {f"{name}/{number}.png": name for name in "abcdefghi" for number in range(4)}
    assert everything(splits) == expected | {"j/x.png": "j"}
    assert said(splits, "links to what is there already, or around it, are not followed")
    assert said(splits, "files that are no images are ignored: a/gone.png, a/self, b/self")


def test_images_to_predict_in_folders_that_link_to_each_other(knot, monkeypatch):
    source, notes = find_images([knot])
    assert len(source) == 36 and any("are not followed" in note for note in notes)
    monkeypatch.chdir(knot.parent)
    for pattern, count in (("knot/**/*.png", 36), ("**/3.png", 9), ("knot/[ab]/**/*.png", 36), ("k*/**", 36)):
        assert len(find_images([pattern])[0]) == count, pattern
    assert {"knot/a/0.png", "knot/b/0.png"} <= set(find_images(["knot/[ab]/**/*.png"])[0].names)
    assert len(find_images(["knot/a", "knot/b"])[0]) == 36 and len(find_images(["knot/a/*.png"])[0]) == 4
    assert holds_images(knot)


def test_pattern__of_folders_in_order_and_without_hidden_ones(tmp_path, monkeypatch):
    for name in ("x/10.png", "x/9.png", "x/y/8.png", "x/.hidden/7.png", "z.png"):
        put(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    inner = ["x/9.png", "x/10.png", "x/y/8.png"]
    for pattern, names in (("**/*.png", [*inner, "z.png"]), ("x/**/8.png", inner[2:]), ("x/**/*", inner)):
        assert list(find_images([pattern])[0].names) == names


def test_what_lies_in_a_folder_keeps_its_name(tmp_path):
    put(tmp_path / "in/z/1.png")
    put(tmp_path / "out/2.png")
    (tmp_path / "in/a").symlink_to("z")
    (tmp_path / "in/b").symlink_to(tmp_path / "out")
    (tmp_path / "in/c").symlink_to(tmp_path / "out")
    (tmp_path / "in/d.png").symlink_to("z/1.png")
    (tmp_path / "in/e.png").symlink_to(put(tmp_path / "alone/blob.png"))
    (tmp_path / "in/f.png").symlink_to(tmp_path / "alone/blob.png")
    (tmp_path / "in/gone.png").symlink_to("nowhere.png")
    assert below(tmp_path / "in") == ["b/2.png", "e.png", "z/1.png"]
    assert below(tmp_path / "in", files_once=False) == ["b/2.png", "d.png", "e.png", "f.png", "z/1.png"]


def test_classes_of_links(tmp_path):
    """Links to a store elsewhere are a layout as good as any other, as long as no image gets two classes."""
    store = tmp_path / "store"
    for number in range(8):
        put(store / f"{number}.png", number)
        link = tmp_path / "data" / "ab"[number % 2] / f"{number}.png"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(store / f"{number}.png")
    (tmp_path / "data/a/same.png").symlink_to(store / "0.png")
    part = open_class_folders(tmp_path / "data")["all"]
    assert [part.source.name(row) for row in range(8)] == [f"{'ab'[n % 2]}/{n}.png" for n in (0, 2, 4, 6, 1, 3, 5, 7)]
    what = "links to what is there already, or around it, are not followed: a/same.png"
    assert part.notes == [f"{tmp_path / 'data'}: {what}"]
    (tmp_path / "data/b/twice.png").symlink_to(store / "0.png")
    refused(r"^links of both 'a' and 'b' lead to .*0.png \(b/twice.png\); keep", open_class_folders, tmp_path / "data")


def test_one_folder_under_two_classes_is_refused(tmp_path):
    put(tmp_path / "store/1.png")
    put(tmp_path / "data/c/1.png")
    for name in "ab":
        (tmp_path / "data" / name).symlink_to(tmp_path / "store")
    data = tmp_path / "data"
    refused("b is the same folder as that of 'a'; keep one of the two, or copy it$", open_class_folders, data)
    (tmp_path / "data/b").unlink()
    (tmp_path / "data/c/more").symlink_to(tmp_path / "store")
    words = r"^links of both 'a' and 'c' lead to .*store \(c/more/\); keep one of them$"
    refused(words, open_class_folders, data)
    (tmp_path / "data/c/more").unlink()
    put(tmp_path / "data/c/inner/2.png")
    (tmp_path / "data/d").symlink_to("c/inner")
    words = "inner belongs to both 'c' and, by a link, 'd'; remove the link, or copy"
    refused(words, open_class_folders, data)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names on this platform")
def test_pipes_are_no_images(tmp_path):
    for name in ("images", "masks"):
        put(tmp_path / name / "1.png")
        os.mkfifo(tmp_path / name / "2.png")
        (tmp_path / name / "3.png").symlink_to("2.png")
    assert below(tmp_path / "images") == ["1.png"] and not holds_images(tmp_path / "nothing")
    Image.new("L", (4, 3)).save(tmp_path / "masks/1.png")
    assert len(MaskFolder(tmp_path / "images", tmp_path / "masks", classes=["ground", "thing"])) == 1
