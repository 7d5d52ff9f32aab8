"""Values that a hook hands on to a later step of the same pass."""

import threading
from typing import Any

import torch


class Passed:
    """One value for each thread, so that several may run one model; copies and pickles start empty.

    A compiler follows a plain attribute more easily, and what it makes of that holds no state.
    """

    def __init__(self) -> None:
        self._traced: Any = None
        self._local = threading.local()

    def put(self, value: Any) -> None:
        if torch.compiler.is_compiling():
            self._traced = value
        else:
            self._local.value = value

    def get(self) -> Any:
        return self._traced if torch.compiler.is_compiling() else self._local.value

    def take(self) -> Any:
        """The value, once."""
        value = self.get()
        self.put(None)
        return value

    def __reduce__(self) -> tuple:
        return Passed, ()
