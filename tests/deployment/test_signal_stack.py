"""Signals can be handled after OpenVINO has come and gone, in whatever order."""

import ctypes
import gc
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such stack")
openvino = pytest.importorskip("openvino")

from broadsight.deployment import FORMATS, capture, open_artefact  # noqa: E402
from broadsight.deployment.signal_stack import _Stack, kept  # noqa: E402
from tests.deployment.int8.models import Colours, colours_described, noise  # noqa: E402


def place() -> int | None:
    stack = _Stack()
    ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack))
    return stack.address


@pytest.fixture
def artefact(tmp_path):
    said = colours_described()
    FORMATS["openvino"].write(capture(Colours().eval(), said.shape, any_batch=True), said, tmp_path / "colours.xml")
    return tmp_path / "colours.xml"


def test_kept__what_is_changed_within_is_put_back():
    before, memory = place(), ctypes.create_string_buffer(1 << 16)
    with pytest.raises(ValueError, match="within"), kept():
        stack = _Stack(ctypes.addressof(memory), 0, len(memory))
        assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
        assert place() == ctypes.addressof(memory)
        raise ValueError("within")
    assert place() == before


def test_sessions__the_first_to_come_is_the_first_to_go(artefact):
    before = place()
    first = open_artefact(artefact, 1)
    second = open_artefact(artefact, 1)
    assert place() == before
    for session in (first, second):
        session(noise()[:1])
    del session, first
    gc.collect()
    assert place() == before
    del second
    gc.collect()
    assert place() == before


def test_quantise__leaves_it_alone(artefact, tmp_path):
    pytest.importorskip("nncf")
    from broadsight.deployment.int8.openvino import CalibratedOpenVINO

    before = place()
    CalibratedOpenVINO(artefact, noise(), threads=1).write(tmp_path / "small.xml")
    gc.collect()
    assert place() == before
