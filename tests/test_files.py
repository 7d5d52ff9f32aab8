"""Whole files: complete, or as they were."""

import errno
import json
import os

import pytest

from broadsight import files
from broadsight.files import flush, remove_unfinished, whole_file, whole_folder, write_json, write_text


def test_flush__asks_the_disk_but_not_of_folders_that_cannot_be(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "fsync", lambda handle: asked.append(os.fstat(handle).st_ino))
    (tmp_path / "file").write_text("x")
    flush(tmp_path / "file")
    flush(tmp_path)
    assert asked == [(tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino]

    def refuse(handle):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    flush(tmp_path)
    with pytest.raises(OSError, match="Invalid"):
        flush(tmp_path / "file")


def test_text_and_json__whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "text.json"
    write_text("Größe", path)
    assert path.read_text(encoding="utf-8") == "Größe"

    def fail(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "flush", fail)
    with pytest.raises(OSError, match="No space"):
        write_text("other", path, durable=True)
    assert path.read_text(encoding="utf-8") == "Größe" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    write_json({"a": [1, None]}, tmp_path / "a.json")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(float("nan"), tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1, None]}


def test_whole_file__as_it_was_until_it_is_complete(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as unfinished:
        unfinished.write_text("half")
        assert path.read_text() == "before"
        raise KeyboardInterrupt
    with whole_file(path) as unfinished, whole_file(path) as another:  # at the same time
        unfinished.write_text("first")
        another.write_text("second")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_whole_folder__and_what_is_unfinished_goes(tmp_path):
    with whole_folder(tmp_path / "new" / "one") as unfinished:
        (unfinished / "file").write_text("x")
        assert not (tmp_path / "new" / "one").exists()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["one"]
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "other") as unfinished:
        (unfinished / "file").write_text("x")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    with pytest.raises(OSError, match="not empty"), whole_folder(tmp_path / "new" / "one") as unfinished:
        (unfinished / "another").touch()
    assert [path.name for path in (tmp_path / "new" / "one").iterdir()] == ["file"]
    with whole_folder(tmp_path / "new" / "one", replace=True, durable=True) as unfinished:
        (unfinished / "another").touch()
    assert [path.name for path in (tmp_path / "new" / "one").iterdir()] == ["another"]
    for name in (".a.0.part", "a", ".b"):
        (tmp_path / name).touch()
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b", "a", "new"]
