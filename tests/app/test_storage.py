"""Uploads under a quota: the oldest make room."""

import os

from broadsight.app.storage import Storage


def put(folder, name, size, age):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (1000 - age, 1000 - age))


def names(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_room__the_oldest_go_and_the_page_stays(tmp_path):
    put(tmp_path, "page/sample", 30, 9)
    storage = Storage(tmp_path, 100)
    for name, age in (("c/new", 1), ("a/old", 5), ("b/older", 6)):
        put(tmp_path, name, 20, age)
    assert storage.make_room(10) and names(tmp_path) == ["new", "old", "older", "sample"]
    assert storage.make_room(25) and names(tmp_path) == ["new", "old", "sample"]
    assert not (tmp_path / "b").exists()
    assert storage.make_room(70) and names(tmp_path) == ["sample"]
    assert not storage.make_room(71) and names(tmp_path) == ["sample"]


def test_room__of_files_too(tmp_path):
    storage = Storage(tmp_path, 10**6, most_files=3)
    for age in range(5):
        put(tmp_path, f"f{age}", 1, age)
    assert storage.make_room() and names(tmp_path) == ["f0", "f1"]
    assert storage.make_room(0, 0) and names(tmp_path) == ["f0", "f1"]


def test_room__links_are_not_followed(tmp_path):
    folder, outside = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    put(tmp_path, "out/kept", 500, 9)
    storage = Storage(folder, 100)
    (folder / "link").symlink_to(outside)
    (folder / "file").symlink_to(outside / "kept")
    assert storage.make_room(100) and (outside / "kept").exists()
