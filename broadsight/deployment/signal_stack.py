"""Where signals are handled stays where it was: OpenVINO moves it to memory that it gives back in the wrong order."""

import ctypes
import sys
from collections.abc import Generator
from contextlib import contextmanager


class _Stack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def kept() -> Generator[None, None, None]:
    """Around whatever loads OpenVINO's CPU plugin.

    Every plugin gives the calling thread an alternate signal stack of its own and later the one before it back, which
    is gone if that was an earlier plugin's and that one went first. The next signal then ends the process. Python
    handles every signal on this stack, and the loaders of torch one for every worker that ends.
    """
    if sys.platform != "linux":
        yield
        return
    change = ctypes.CDLL(None).sigaltstack
    before = _Stack()
    change(None, ctypes.byref(before))
    try:
        yield
    finally:
        change(ctypes.byref(before), None)
