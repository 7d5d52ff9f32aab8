"""Whole files: complete, or as they were."""

import errno
import os

import pytest

from broadsight import files
from broadsight.files import flush, write_text


def test_flush_asks_the_disk(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "fsync", lambda handle: asked.append(os.fstat(handle).st_ino))
    (tmp_path / "file").write_text("x")
    flush(tmp_path / "file")
    flush(tmp_path)
    assert asked == [(tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino]


def test_flush__folders_that_cannot_be(tmp_path, monkeypatch):
    def refuse(handle):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    flush(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Invalid"):
        flush(tmp_path / "file")


def test_text__whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "text.json"
    write_text("Größe", path)
    assert path.read_text(encoding="utf-8") == "Größe"

    def fail(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "flush", fail)
    with pytest.raises(OSError, match="No space"):
        write_text("other", path)
    assert path.read_text(encoding="utf-8") == "Größe" and list(tmp_path.iterdir()) == [path]
