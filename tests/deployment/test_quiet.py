"""Signals can be handled after OpenVINO has come and gone, in whatever order."""

import ctypes
import gc
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such stack")

from broadsight.deployment import open_artefact  # noqa: E402
from broadsight.deployment.quiet import SignalStack, kept_signal_stack  # noqa: E402
from tests.deployment.int8.models import Colours, colours_described, noise  # noqa: E402
from tests.deployment.tiny import written  # noqa: E402


def place() -> int | None:
    stack = SignalStack()
    ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack))
    return stack.address


def test_kept__what_is_changed_within_is_put_back():
    before, memory = place(), ctypes.create_string_buffer(1 << 16)
    with pytest.raises(ValueError, match="within"), kept_signal_stack():
        stack = SignalStack(ctypes.addressof(memory), 0, len(memory))
        assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
        assert place() == ctypes.addressof(memory)
        raise ValueError("within")
    assert place() == before


def test_sessions_that_go_first_and_quantising_leave_it_alone(tmp_path):
    artefact = written("openvino", tmp_path, Colours(), colours_described())
    before, sessions = place(), [open_artefact(artefact, 1), open_artefact(artefact, 1)]
    assert place() == before
    for session in sessions:
        session(noise()[:1])
    del session
    while sessions:
        sessions.pop(0)
        gc.collect()
        assert place() == before
    pytest.importorskip("nncf")
    from broadsight.deployment.int8.openvino import CalibratedOpenVINO

    CalibratedOpenVINO(artefact, noise(), threads=1).write(tmp_path / "small.xml")
    gc.collect()
    assert place() == before
