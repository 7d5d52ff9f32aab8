"""Images of all kinds, whole and mutated, through decoding and the transforms of train, eval and predict.

`one` takes bytes and raises only for a violation: an error that is no UnreadableImage, a program that is started, an
image that is not what was promised, or more memory than MOST_BYTES. `seeds` are images to begin from.
"""

import contextlib
import io
import struct
import subprocess
import tracemalloc
import zlib
from typing import Any

import numpy as np
import torch
from PIL import Image

from broadsight.data.decoding import UnreadableImage, decode
from broadsight.data.dense.transforms import DenseTransforms
from broadsight.data.loading import Transforms
from broadsight.data.seeds import seed_transforms

SIZE = 32
TIFFS = ("raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")
MOST_BYTES = 1 << 30  # that PIL and numpy may hold at once, beyond the pixels of the image itself
EVALUATION = Transforms(SIZE).build(training=False)
GREY = Transforms(SIZE, 1, (0.5,), (0.5,), "bilinear", 1.0).build(training=False)
TRAINING = Transforms(SIZE, augmentation=dict(auto_augment="rand-m9-mstd0.5-inc1", color_jitter=0.4)).build(True)
DENSE = DenseTransforms("detect", SIZE, crop="iou", color_jitter=0.5).build(training=True)


def one(data: bytes) -> None:
    """Read an image as every command would.

    Raises:
        AssertionError: It is not what was promised, or something was started.
        Exception: Any that is not UnreadableImage.
    """
    started = subprocess.Popen
    subprocess.Popen = _refuse  # ty: ignore[invalid-assignment]
    try:
        for channels in (3, 1):
            try:
                image = decode(data, channels)
            except UnreadableImage as error:
                assert str(error) and "\n" not in str(error), f"a reason of one line, not {error!r}"
                continue
            assert image.mode == ("RGB" if channels == 3 else "L") and min(image.size) > 0
            _transformed(image)
    finally:
        subprocess.Popen = started  # ty: ignore[invalid-assignment]


def _transformed(image: Image.Image) -> None:
    channels = len(image.getbands())
    held = image.width * image.height * 4
    tracemalloc.start()
    try:
        for transform in (EVALUATION, TRAINING) if channels == 3 else (GREY,):
            seed_transforms(0)
            pixels = torch.as_tensor(transform(image))
            assert tuple(pixels.shape) == (channels, SIZE, SIZE) and pixels.dtype == torch.uint8
        if channels == 3 and image.width * image.height < 1 << 22:
            pixels, target = DENSE(image, _objects(image))
            assert pixels.shape[0] == 3 and max(pixels.shape[1:]) <= 2 * SIZE and len(target["boxes"]) <= 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES + 2 * held, f"{image.size} took {peak / 2**20:.0f} MB"


def _objects(image: Image.Image) -> dict[str, Any]:
    box = torch.tensor([[0.0, 0.0, image.width / 2, image.height / 2]])
    return dict(
        boxes=box, labels=torch.ones(1, dtype=torch.int64), iscrowd=torch.zeros(1, dtype=torch.int64), area=box[:, 2]
    )


def _refuse(*command: Any, **_: Any) -> Any:
    raise AssertionError(f"a program is started: {command}")


def seeds() -> list[bytes]:
    """One image of each accepted format and mode, and those that once did harm."""
    random = np.random.default_rng(0)
    values = random.integers(0, 256, (23, 31, 4), dtype=np.uint8)
    rgb, rgba = Image.fromarray(values[..., :3]), Image.fromarray(values)
    grey, deep = rgb.convert("L"), Image.fromarray(values[..., 0].astype(np.uint16) * 250)
    turned = Image.Exif()
    turned[0x0112] = 6
    found = [
        _saved(rgb, "JPEG", exif=turned),
        _saved(rgb, "JPEG", progressive=True, quality=30),
        _saved(grey, "JPEG"),
        _saved(rgb.convert("CMYK"), "JPEG"),
        _saved(rgb, "PNG", exif=turned),
        _saved(rgba, "PNG"),
        _saved(grey.convert("LA"), "PNG"),
        _saved(deep, "PNG"),
        _saved(rgb.quantize(16), "PNG", transparency=3),
        _saved(rgb.convert("1"), "PNG"),
        _saved(rgb, "WEBP", exif=turned),
        _saved(rgba, "WEBP", lossless=True),
        _saved(rgb, "GIF", save_all=True, append_images=[rgb.rotate(90, expand=True)]),
        _saved(rgba, "GIF"),
        _saved(rgb, "BMP"),
        _saved(rgb.quantize(16), "BMP"),
        _saved(rgb, "PPM"),
        _saved(deep, "PPM"),
        b"P3 2 2 255\n1 2 3 4 5 6 7 8 9 10 11 12",
        *(_saved(rgb, "TIFF", compression=kind) for kind in TIFFS),
        _saved(Image.fromarray(values[..., 0].astype(np.float32) - 9), "TIFF"),
        _saved(Image.fromarray(values[..., 0].astype(np.int32) * 99999), "TIFF"),
        _saved(rgb, "TIFF", save_all=True, append_images=[grey]),
        _saved(rgb, "EPS"),
        *(narrow(*size) for size in ((8000, 1), (1, 8000), (200_000, 1), (3, 100_000), (20_000, 20_000))),
    ]
    with contextlib.suppress(KeyError, OSError):  # some PILs are without it
        found.append(_saved(rgba, "AVIF"))
    return found


def narrow(width: int, height: int) -> bytes:
    """A grey PNG of a few bytes and any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, row = zlib.compressobj(9), bytes(1 + -(-width // 8))
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    size = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.copy().save(file, kind, **options)  # a copy: PIL keeps what the last encoder was told
    return file.getvalue()
