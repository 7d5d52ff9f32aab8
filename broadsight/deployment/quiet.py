"""What exporters and runtimes do to the whole process, kept from it: their noise, and the stack of signals."""

import ctypes
import io
import logging
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def quiet() -> Generator[None, None, None]:
    """No warnings, no log records below errors, nothing on the terminal from Python."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class SignalStack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def kept_signal_stack() -> Generator[None, None, None]:
    """Around whatever loads OpenVINO's CPU plugin: where signals are handled stays where it was.

    Every plugin gives the thread a signal stack of its own and later the one before it back, which may be gone: the
    next signal is the end.
    """
    if sys.platform != "linux":
        yield
        return
    change = ctypes.CDLL(None).sigaltstack
    before = SignalStack()
    change(None, ctypes.byref(before))
    try:
        yield
    finally:
        change(ctypes.byref(before), None)
