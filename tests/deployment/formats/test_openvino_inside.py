"""OpenVINO files that are more than a model with its weights beside it: refused before OpenVINO sees them."""

import numpy as np
import pytest

from broadsight.deployment import open_artefact
from broadsight.deployment.formats.openvino import save

from ..tiny import described

openvino = pytest.importorskip("openvino")


@pytest.fixture
def path(tmp_path):
    """Images (1, 3, 4, 4) -> the same plus numbers."""
    from openvino import opset13 as ops

    images = ops.parameter([1, 3, 4, 4], np.float32, name="images")
    numbers = ops.constant(np.arange(48, dtype=np.float32).reshape(1, 3, 4, 4))
    save(openvino.Model([ops.add(images, numbers)], [images], "m"), described(4, any_batch=False), tmp_path / "net.xml")
    return tmp_path / "net.xml"


def test_sound__opens(path):
    found = open_artefact(path)(np.zeros((1, 3, 4, 4), np.float32))["logits"]
    assert np.array_equal(found.ravel(), np.arange(48))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('<?xml version="1.0"?>', '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]>', "declares entities"),
        ('<?xml version="1.0"?>', '<?xml version="1.0" encoding="utf-16"?>', "another encoding"),
        ('version="opset1"', 'version="extension"', "needs 'extension'"),
        ('version="opset1"', 'version="/tmp/lib.so"', "needs '/tmp/lib.so'"),
        ('offset="0"', 'offset="1000"', "lies beyond the 192 bytes"),
        ('offset="0"', 'offset="-4"', "lies beyond"),
        ('size="192"', 'size="99999999999"', "lies beyond"),
        ('size="192"', 'size="x"', "does not say where it lies"),
        ("<net", "<not", "no XML"),
    ],
)
def test_other_content__is_refused(path, old, new, said):
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")
    with pytest.raises(ValueError, match=rf"net\.xml cannot be opened: .*{said}"):
        open_artefact(path)


def test_other_files__are_refused(path):
    weights = path.with_suffix(".bin")
    moved = weights.rename(path.with_name("elsewhere"))
    with pytest.raises(ValueError, match=r"no net\.bin beside it"):
        open_artefact(path)
    weights.symlink_to(moved)
    with pytest.raises(ValueError, match=r"no net\.bin beside it"):
        open_artefact(path)
    for content in (b"", b"<a/>", b"\xff\xfe<\0", b"<net>" * 100_000, b"\x08\x07\x12\x04"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"net\.xml cannot be opened: "):
            open_artefact(path)
