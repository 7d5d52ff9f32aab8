"""One image from any file: the modes, the orientations, and the files that hold none."""

import ast
import io
import os
import socket
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageOps

import broadsight
from broadsight.data import decoding
from broadsight.data.decoding import UnreadableImage, decode, open_image
from tests.refusals import refused

from .reading import raw_png

WIDE = np.arange(24 * 16 * 3, dtype=np.uint8).reshape(16, 24, 3) // 2  # 24 wide, 16 high, no two corners alike


def saved(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def bad(words: str, file) -> str:
    return refused(words, decode, file, error=UnreadableImage)


def photograph(side: int = 64) -> Image.Image:
    ramp = np.linspace(0, 255, side)
    return Image.fromarray(np.stack(np.broadcast_arrays(ramp, ramp[:, None], 128), -1).astype(np.uint8))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "WEBP", "JPEG", "PPM"])
def test_decode__is_what_pil_converts_to(kind):
    data = saved(photograph(), kind)
    with Image.open(io.BytesIO(data)) as image:
        expected = {3: np.asarray(image.convert("RGB")), 1: np.asarray(image.convert("L"))}
    for channels, mode in ((3, "RGB"), (1, "L")):
        image = decode(data, channels)
        assert image.mode == mode
        np.testing.assert_array_equal(np.asarray(image), expected[channels])


def test_decode__takes_paths_files_bytes_and_images_and_leaves_no_file_open(tmp_path):
    path = tmp_path / "ä b.png"
    Image.fromarray(WIDE).save(path)
    with path.open("rb") as file:
        for one in (path, str(path), path.read_bytes(), file, Image.open(path)):
            np.testing.assert_array_equal(np.asarray(decode(one)), WIDE)
    path = tmp_path / "x.gif"  # an animation, which PIL keeps open to look for the next frame
    Image.new("L", (8, 8), 40).save(path, save_all=True, append_images=[Image.new("L", (8, 8), 80)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        image = decode(path)
        assert getattr(image, "fp", None) is None
        del image


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_decode__turns_upright(kind, orientation):
    upright = photograph(32).crop((0, 0, 32, 16))
    # The inverse of each orientation, by the definition of EXIF: what a camera held that way stores.
    left, right = upright.rotate(90, expand=True), upright.rotate(-90, expand=True)
    turned = [upright, ImageOps.mirror(upright), upright.rotate(180), ImageOps.flip(upright)]
    stored = [*turned, ImageOps.mirror(right), left, ImageOps.mirror(left), right][orientation - 1]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = dict(JPEG=dict(quality=100, subsampling=0), WEBP=dict(lossless=True)).get(kind, {})
    image = decode(saved(stored, kind, exif=exif.tobytes(), **options))
    difference = np.abs(np.asarray(image).astype(int) - np.asarray(upright))
    assert difference.max() <= (4 if kind == "JPEG" else 0)
    np.testing.assert_array_equal(np.asarray(decode(image)), np.asarray(image))  # not turned twice


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("note", [b"nothing of the kind", b"MM\x00\x2a\xff\xff\xff\xff" + b"\xff" * 40, b"II\x2a\x00"])
def test_decode__a_damaged_note_leaves_the_pixels(kind, note):
    assert decode(saved(photograph(), kind, exif=b"Exif\x00\x00" + note)).size == (64, 64)


def test_decode__transparent_becomes_white():
    image = Image.new("RGBA", (2, 1), (200, 100, 0, 255))
    image.putpixel((1, 0), (200, 100, 0, 0))
    assert np.asarray(decode(saved(image, "PNG"))).tolist() == [[[200, 100, 0], [255, 255, 255]]]
    image.putpixel((1, 0), (200, 100, 0, 51))  # a fifth of the colour
    assert np.asarray(decode(saved(image, "PNG")))[0, 1].tolist() == [244, 224, 204]
    grey = Image.new("LA", (2, 1), (90, 255))
    grey.putpixel((1, 0), (90, 0))
    assert np.asarray(decode(saved(grey, "PNG"), 1)).tolist() == [[90, 255]]
    # a colour of a palette or of all
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    image.putdata([0, 1, 2])
    plain = [[[10, 20, 30], [40, 50, 60], [70, 80, 90]]]
    assert np.asarray(decode(saved(image, "PNG"))).tolist() == plain
    plain[0][1] = [255, 255, 255]
    for one, transparency in ((image, 1), (image, b"\xff\x00\xff"), (image.convert("RGB"), (40, 50, 60))):
        assert np.asarray(decode(saved(one, "PNG", transparency=transparency))).tolist() == plain


def test_decode__cmyk_ycbcr_and_bilevel():
    image = Image.new("CMYK", (16, 16), (255, 0, 0, 0))  # cyan
    for kind in ("JPEG", "TIFF"):  # PIL writes JPEG inverted, as Adobe does
        assert np.abs(np.asarray(decode(saved(image, kind))).astype(int) - [0, 255, 255]).max() <= 2
    image = Image.new("YCbCr", (4, 4), (128, 128, 128))
    assert np.abs(np.asarray(decode(image)).astype(int) - 128).max() <= 1
    bits = Image.new("1", (2, 1))
    bits.putpixel((1, 0), 1)
    assert np.asarray(decode(saved(bits, "PNG"), 1)).tolist() == [[0, 255]]


def test_decode__sixteen_bits_are_scaled():
    values = Image.fromarray(np.array([[0, 128, 257, 32896, 65535]], np.uint16))
    for kind in ("PNG", "TIFF"):
        assert np.asarray(decode(saved(values, kind), 1)).tolist() == [[0, 0, 1, 128, 255]]
        assert np.asarray(decode(saved(values, kind)))[0, 3].tolist() == [128, 128, 128]
    data = raw_png(1, 1, 16, 2, struct.pack(">HHH", 65535, 0x8040, 0))  # in colours
    assert np.asarray(decode(data)).tolist() == [[[255, 128, 0]]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 0.25, 0.5], [0, 64, 128]),  # dark, not stretched
        ([0.0, 100.0, 200.0], [0, 100, 200]),
        ([0.0, 257.0, 65535.0], [0, 1, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([float("nan"), 0.5, 1.0], [0, 128, 255]),
        ([-3.0, -3.0, -3.0], [0, 0, 0]),
        ([0, 257, 65535], [0, 1, 255]),  # whole numbers
        ([-100, 0, 100], [0, 128, 255]),
        ([0, 1, 2], [0, 0, 0]),
    ],
)
def test_decode__numbers_of_32_bits_are_scaled_from_their_range(values, expected):
    image = Image.fromarray(np.array([values], np.int32 if isinstance(values[0], int) else np.float32))
    assert np.asarray(decode(saved(image, "TIFF"), 1)).tolist() == [expected]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_decode__first_frame_of_an_animation(kind):
    first, second = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    data = saved(first, kind, save_all=True, append_images=[second], **{"lossless": True} if kind == "WEBP" else {})
    assert np.asarray(decode(data))[4, 4].tolist() == [255, 0, 0]


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"just text, whatever its name", "not an image, or of a kind that is not read here; expected JPEG, PNG"),
        (saved(NOISE, "JPEG")[:2000], "truncated"),
        (saved(NOISE, "PNG")[:3000], "truncated"),
        (saved(NOISE, "WEBP")[:400], ""),
        (saved(NOISE, "GIF")[:900], ""),
        (saved(NOISE, "TIFF")[:900], ""),
        (saved(NOISE, "BMP")[:900], "truncated"),
    ],
)
def test_decode__unreadable(tmp_path, content, reason):
    path = tmp_path / "x.jpg"
    path.write_bytes(content)
    for one in (path, content, io.BytesIO(content)):
        message = bad("", one)
        assert message and "\n" not in message and "0x" not in message
        assert reason in message or (not content and isinstance(one, io.BytesIO))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM"])
def test_decode__nothing_else_escapes_from_damaged_files(kind):
    good, rng = saved(photograph(24), kind), np.random.default_rng(1)
    for _ in range(40):
        bad = bytearray(good)
        for place in rng.integers(0, min(len(bad), 200), 4):  # headers are where parsers trip
            bad[place] = rng.integers(256)
        try:
            image = decode(bytes(bad))
        except UnreadableImage as error:
            assert "\n" not in str(error)
        else:
            assert image.mode == "RGB"
            image.tobytes()


def test_decode__no_such_file_a_folder_and_what_is_too_large(tmp_path, monkeypatch):
    bad("^no such file or directory$", tmp_path / "x.jpg")
    bad("^is a directory$", tmp_path)
    refused(r"channels=4 is neither 1 \(grey\) nor 3 \(RGB\)", decode, Image.new("RGB", (1, 1)), 4)
    path = tmp_path / "x.webp"
    path.write_bytes(saved(photograph(16), "WEBP"))
    with path.open("r+b") as file:
        file.truncate(2**32)  # a hole: takes no room
    bad("^a file of 4.0 GB; up to 2 GB are read$", path)
    data = saved(photograph(64), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    bad("^more than 2,000 pixels; see PIL.Image.MAX_IMAGE_PIXELS$", data)


@pytest.mark.parametrize(
    "error, expected",
    [
        (MemoryError(), "out of memory while it is prepared; make the image smaller"),
        (OverflowError("too large"), r"damaged \(too large\)"),
        (struct.error("no room"), r"damaged \(no room\)"),
        (RuntimeError("odd"), "odd"),
        (KeyboardInterrupt(), None),
    ],
)
def test_decode__any_error_is_that_of_one_image_but_interrupts_escape(monkeypatch, error, expected):
    monkeypatch.setattr(Image, "open", Mock(side_effect=error))
    refused(expected or "", decode, b"x", error=UnreadableImage if expected else KeyboardInterrupt)


def test_decode__starts_no_program(tmp_path, monkeypatch):
    """EPS by any name would start Ghostscript, which runs what the file says."""
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **_: started.append(command))
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")
    path = tmp_path / "photo.jpg"
    photograph(16).save(path, "EPS")
    assert Image.open(path).format == "EPS"  # or there is nothing to test
    for file in (path, path.read_bytes(), io.BytesIO(path.read_bytes())):
        bad("^not an image, or of a kind that is not read here", file)
        refused("", open_image, file, error=Image.UnidentifiedImageError)
    bad("^of format EPS, which is not accepted; convert it to PNG$", Image.open(path))
    assert not started


@pytest.mark.parametrize("format", ["PCX", "TGA", "ICO", "JPEG2000", "SGI", "IM", "PSD", "XBM"])
def test_decode__formats_that_are_not_named_are_refused(format):
    if format == "PSD":
        data = b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, 4, 4, 8, 3) + bytes(100)
    else:
        data = saved(photograph(16).convert("1" if format == "XBM" else "RGB"), format)
    bad("^not an image, or of a kind that is not read here", data)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names on this platform")
def test_decode__pipes_sockets_and_devices_are_no_images(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "link.jpg").symlink_to("pipe.jpg")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.jpg"))
        for name, kind in (("pipe", "a pipe"), ("link", "a pipe"), ("socket", "a socket")):
            bad(f"^{kind}, not a file$", tmp_path / f"{name}.jpg")
    if os.path.exists("/dev/zero"):
        bad("^a device, not a file$", "/dev/zero")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "I;16", "I", "F"])
def test_decode__strip_by_strip_as_at_once(monkeypatch, mode):
    """Conversions that take much memory go by strips; nobody sees where these end."""
    values = np.random.default_rng(0).integers(0, 256, (37, 11, 4), dtype=np.uint8)
    if mode == "I;16":
        image = Image.fromarray(values[..., 0].astype(np.uint16) * 200)
    elif mode in ("I", "F"):
        image = Image.fromarray(values[..., 0].astype(np.int32 if mode == "I" else np.float32) * 999 - 500)
    else:
        image = Image.fromarray(values).convert(mode if mode != "P" else "RGB").convert(mode)
        image.info |= {"transparency": 3} if mode == "P" else {}
    for channels in (1, 3):
        monkeypatch.setattr(decoding, "STRIP", 1 << 22)
        whole = np.asarray(decode(image, channels))
        monkeypatch.setattr(decoding, "STRIP", 40)
        assert np.array_equal(np.asarray(decode(image, channels)), whole)


def test_the_package_opens_images_in_one_place_only():
    """Who calls PIL's `open` elsewhere reads every format that PIL knows, and may start Ghostscript."""
    root = Path(broadsight.__file__).parent
    calls = []
    for path in sorted((*root.rglob("*.py"), *(root.parent / "examples").rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "open" and ast.unparse(node.value).endswith("Image"):
                calls.append(path.relative_to(root.parent).as_posix())
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("PIL.Image"):
                calls += [path.name for name in node.names if name.name == "open"]
    assert calls == ["broadsight/data/decoding.py"]


def test_decode__keeps_pil_quiet_and_nobody_else(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)  # 4096 are warned about, not refused
    data = saved(photograph(64), "PNG")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Image.open(io.BytesIO(data)).close()
        assert [one.category for one in seen] == [Image.DecompressionBombWarning]  # or there is nothing to test
        for _ in range(2):
            assert decode(data).size == (64, 64)
        warnings.warn("of others", stacklevel=1)
        assert sum(one.filename == __file__ for one in seen) == 1 and len(seen) == 2
        assert [str(one[3]) for one in warnings.filters].count(r"re.compile('PIL\\.')") == 1  # put there once


def test_decode__says_nothing_on_the_terminal():
    """PIL logs what it finds in damaged TIFFs, and Python shows what nobody listens to."""
    data = bytearray(saved(Image.new("RGB", (4, 4)), "TIFF"))
    place = data.index(struct.pack("<HH", 277, 3))  # samples per pixel
    data[place + 8 : place + 10] = struct.pack("<H", 10755)
    code = "import sys; from broadsight.data.decoding import decode, UnreadableImage\n"
    code += "try: decode(sys.stdin.buffer.read())\nexcept UnreadableImage: print('refused')"
    done = subprocess.run([sys.executable, "-c", code], input=bytes(data), capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"refused\n", b"")
