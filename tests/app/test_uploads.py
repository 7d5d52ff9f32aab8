"""Uploads: what is read, all that is refused in one line, and the quota under which the oldest make room."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from broadsight.app import uploads as module
from broadsight.app.uploads import MOST_PIXELS, SIDE, Storage, is_uploaded, read_upload
from broadsight.data.scenes import CLASSES, draw_scene
from tests.training.small_runs import refusal


def put(folder: Path, name: str, content: bytes) -> dict:
    (folder / name).write_bytes(content)
    return {"path": str(folder / name)}


def encoded(form: str, size: tuple[int, int] = (20, 10), **options) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (200, 30, 60)).save(file, form, **options)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG of zeros that claims a size; its pixels take hardly any bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0" * 1000)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_read__usual_forms_turned_upright_and_not_larger_than_needed(tmp_path):
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        image = read_upload(put(tmp_path, "whatever", encoded(form)), tmp_path)
        assert (image.mode, image.size) == ("RGB", (20, 10))
        assert np.allclose(np.asarray(image)[5, 10], (200, 30, 60), atol=6)
    exif = Image.Exif()
    exif[274] = 6
    image = read_upload(put(tmp_path, "a.jpg", encoded("JPEG", (3200, 800), exif=exif.tobytes())), tmp_path)
    assert image.size == (SIDE // 4, SIDE)


PATHS = ["/etc/passwd", "../../../etc/passwd", "file:///etc/passwd", "http://127.0.0.1/a.png"]
PATHS += [["a"], "a\0b", "x" * 100_000]
ADDRESSES = [{"path": None, "url": "http://127.0.0.1/a.png"}, {"url": "data:image/png;base64,AAAA"}]


@pytest.mark.parametrize("payload", [*({"path": path} for path in PATHS), *ADDRESSES, "/etc/passwd", 7, []])
def test_read__nothing_but_uploads(tmp_path, payload):
    text = refusal(lambda: read_upload(payload, tmp_path))
    assert "not uploaded here" in text and len(text) < 120


def test_read__no_link_out_of_the_folder(tmp_path):
    (folder := tmp_path / "in").mkdir()
    put(tmp_path, "out.png", encoded("PNG"))
    (folder / "link.png").symlink_to(tmp_path / "out.png")
    for path in (f"{folder}/link.png", f"{folder}/../out.png"):
        assert "not uploaded here" in refusal(lambda path=path: read_upload({"path": path}, folder))
    assert not is_uploaded(f"{folder}2/a.png", folder)
    assert is_uploaded(f"{folder}/deep/a.png", folder)


def test_read__none_gone_large_cut_short_and_no_image(tmp_path):
    large, cut = encoded("BMP", (300, 300)), encoded("JPEG", (200, 200))[:-200]
    for payload, words in (
        (None, "no image yet"),
        ({"path": str(tmp_path / "gone.png")}, "drop it again"),
        ({"path": str(tmp_path)}, "drop it again"),
        (put(tmp_path, "a.bmp", large), "0.3 MB; expected at most 0.1 MB"),
        (put(tmp_path, "a.jpg", cut), "the image cannot be read"),
    ):
        assert words in refusal(lambda payload=payload: read_upload(payload, tmp_path, 0.1))
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    for content in (b"", b"root:x:0:0", svg, b"%!PS-Adobe EPSF\n", b"\x89PNG\r\n"):
        text = refusal(lambda content=content: read_upload(put(tmp_path, "x.png", content), tmp_path))
        assert "not an image" in text and "root" not in text


@pytest.mark.parametrize("size", [(8000, 8000), (30_000, 30_000), (2**31 - 1, 2**31 - 1), (MOST_PIXELS + 1, 1)])
def test_read__bombs_are_refused_by_their_header(tmp_path, size, monkeypatch):
    monkeypatch.setattr("broadsight.app.uploads.decode", lambda _: pytest.fail("unpacked"))
    payload = put(tmp_path, "bomb.png", png_header(*size))
    assert "expected at most 40 million" in refusal(lambda: read_upload(payload, tmp_path))


def store(folder, name, size, age):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (1000 - age, 1000 - age))


def names(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_room__the_oldest_go_the_page_stays_and_links_are_not_followed(tmp_path):
    store(tmp_path, "page/sample", 30, 9)
    storage = Storage(tmp_path, 100)
    for name, age in (("c/new", 1), ("a/old", 5), ("b/older", 6)):
        store(tmp_path, name, 20, age)
    assert storage.make_room(10) and names(tmp_path) == ["new", "old", "older", "sample"]
    assert storage.make_room(25) and names(tmp_path) == ["new", "old", "sample"]
    assert not (tmp_path / "b").exists()
    assert storage.make_room(70) and names(tmp_path) == ["sample"]
    assert not storage.make_room(71) and names(tmp_path) == ["sample"]
    storage = Storage(tmp_path / "few", 10**6, most_files=3)
    for age in range(5):
        store(tmp_path, f"few/f{age}", 1, age)
    assert storage.make_room() and names(tmp_path / "few") == ["f0", "f1"]
    assert storage.make_room(0, 0) and names(tmp_path / "few") == ["f0", "f1"]
    folder, outside = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    store(tmp_path, "out/kept", 500, 9)
    storage = Storage(folder, 100)
    (folder / "link").symlink_to(outside)
    (folder / "file").symlink_to(outside / "kept")
    assert storage.make_room(100) and (outside / "kept").exists()


def test_samples__one_of_every_class_each_with_its_name_and_no_others(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE", 32)
    found = module.samples.__wrapped__()
    assert [name for name, _ in found] == list(CLASSES)
    for index in range(len(CLASSES)):
        scene = draw_scene(index, size=32, split="test")
        assert np.array_equal(np.asarray(found[scene.label][1]), scene.image)
    monkeypatch.setattr(module, "samples", lambda: (("a", "image"),))
    assert module.sample(0) == "image"
    for index in (1, -1, "0", None, [0, 1], 0.5):
        assert "no such sample" in refusal(lambda index=index: module.sample(index))
