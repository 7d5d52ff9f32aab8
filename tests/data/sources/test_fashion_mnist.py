"""Fashion-MNIST from its Debian package."""

import gzip
import struct

import numpy as np
import pytest

from broadsight.data.sources import fashion_mnist, resolve
from tests.refusals import refused


def idx(values: np.ndarray) -> bytes:
    """A file as Yann LeCun described it for MNIST."""
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with 12 images to train on and 5 to test."""
    folder, rng, content = tmp_path / "package", np.random.default_rng(0), {}
    folder.mkdir()
    for part, count in (("train", 12), ("t10k", 5)):
        content[part] = rng.integers(0, 256, (count, 28, 28), np.uint8)
        labels = (np.arange(count) * 3 % 10).astype(np.uint8)
        for what, values in (("images-idx3-ubyte", content[part]), ("labels-idx1-ubyte", labels)):
            (folder / f"{part}-{what}.gz").write_bytes(gzip.compress(idx(values)))
    monkeypatch.setattr(fashion_mnist, "PACKAGE", folder)
    return folder, content


def test_fashion_mnist__images_and_labels(package, tmp_path):
    folder, content = package
    splits = resolve("fashion-mnist", cache=tmp_path / "cache")
    assert (len(splits.train), len(splits.val)) == (12, 5)
    assert splits.classes[0] == "T-shirt/top" and splits.classes[9] == "Ankle boot" and len(splits.classes) == 10
    assert [splits.train.label(row) for row in range(5)] == [0, 3, 6, 9, 2]
    np.testing.assert_array_equal(splits.train.open(7), np.repeat(content["train"][7][..., None], 3, 2), strict=True)
    grey = resolve("fashion-mnist", cache=tmp_path / "cache", channels=1).val.open(4)
    np.testing.assert_array_equal(np.asarray(grey), content["t10k"][4])
    assert splits.val.name(4) == "fashion-mnist/val/4" and splits.description["kind"] == "fashion-mnist"
    for file in folder.iterdir():  # which is unpacked once
        file.unlink()
    assert len(resolve("fashion-mnist", cache=tmp_path / "cache").train) == 12


def test_fashion_mnist__damaged_package_leaves_nothing_and_may_be_missing(package, tmp_path, monkeypatch):
    folder, _ = package
    file = folder / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-20])
    refused(r"train-images-idx3-ubyte\.gz cannot be unpacked into", resolve, "fashion-mnist", cache=tmp_path / "cache")
    assert [one for one in (tmp_path / "cache").rglob("*") if one.is_file()] == []
    monkeypatch.setattr(fashion_mnist, "PACKAGE", tmp_path / "nowhere")
    words = r"^fashion-mnist is not installed \(.*\); on Debian: apt-get install "
    refused(words, resolve, "fashion-mnist", error=FileNotFoundError, cache=tmp_path / "cache")


def test_fashion_mnist__the_real_package(tmp_path):
    if not fashion_mnist.PACKAGE.is_dir():
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    splits = resolve("fashion-mnist", cache=tmp_path)
    assert (len(splits.train), len(splits.val)) == (60000, 10000)
    assert np.bincount([splits.val.label(row) for row in range(10000)]).tolist() == [1000] * 10
    assert [splits.train.label(row) for row in range(5)] == [9, 0, 0, 3, 0]  # as published
    image = np.asarray(splits.train.open(0))
    assert image.shape == (28, 28, 3) and image[..., 0].sum() == 76247
