"""Silence for exporters and quantisers, which print and log what a user can do nothing about."""

import io
import logging
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
