"""ExecuTorch: a .pte file for phones, lowered to XNNPACK, run here by the Python runtime."""

import contextlib
import hashlib
import io
import logging
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch.export import ExportedProgram

from ..description import Description
from ..session import Session
from .executorch_passes import drop_idle_expands, flatten_soft_maxes, fold_constants

SEAL = b"\nbroadsight sha256 "
METHOD = "broadsight"  # gives the description, as the bytes of its JSON

_open: WeakSet[Session] = WeakSet()


def write(program: ExportedProgram, description: Description, path: Path) -> None:
    """A program for one image of a fixed size at a time, as one file with its description."""
    with _quietly():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        text = torch.frombuffer(bytearray(description.to_json().encode()), dtype=torch.uint8)
        lowered = to_edge_transform_and_lower(
            fold_constants(program),
            transform_passes=[drop_idle_expands, flatten_soft_maxes],
            partitioner=[XnnpackPartitioner()],
            constant_methods={METHOD: text},
        ).to_executorch()
    path.write_bytes(sealed(lowered.buffer))


def open(path: Path, threads: int | None = None) -> Session:
    """A .pte file of ours in ExecuTorch's Python runtime.

    Args:
        threads: Of the one pool that all sessions of the process share; None leaves it as it is.

    Raises:
        ValueError: It is not such a file, or an open session needs another number of threads.
    """
    with _quietly():
        from executorch.runtime import Runtime

        _set_threads(threads)

        try:
            _check(path)
            program = Runtime.get().load_program(str(path))  # checks that all that it refers to lies within
        except Exception as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise ValueError(f"{path} cannot be opened by ExecuTorch: {lines[0]}") from None
        if program.method_names != {METHOD, "forward"}:
            raise ValueError(f"{path} does not say what it is; expected a file that `broadsight export` wrote")
        try:
            kept: Any = program.load_method(METHOD)
            description = Description.from_json(bytes(kept.execute([])[0].tolist()).decode())
            method: Any = program.load_method("forward")
        except (RuntimeError, UnicodeDecodeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} cannot be opened by ExecuTorch: {str(error).splitlines()[0]}") from None

    def run(images: np.ndarray) -> list[np.ndarray]:
        # The runtime writes into memory of its own, which the next call uses again.
        return [one.numpy().copy() for one in method.execute([torch.from_numpy(images)])]

    session = Session(description, run)
    _open.add(session)
    return session


def sealed(program: bytes) -> bytes:
    """A program with its digest behind it, where ExecuTorch does not look."""
    return bytes(program) + SEAL + hashlib.sha256(program).hexdigest().encode()


def _check(path: Path) -> None:
    """Refuse what is not a program as it was written: the runtime may end the whole process over a damaged one."""
    content = path.read_bytes()
    if content[4:6] != b"ET":
        raise ValueError("it is no program of ExecuTorch")
    program, seal, _ = content.rpartition(SEAL)
    if not seal or sealed(program) != content:
        raise ValueError("it is damaged, or not by this version of `broadsight export`; export the model again")


def _set_threads(wanted: int | None) -> None:
    """Before a program is loaded: what it holds of an earlier pool is gone with that pool, and it computes nonsense."""
    from executorch.extension.pybindings import portable_lib

    there = portable_lib._threadpool_get_thread_count()
    if wanted is None or wanted == there:
        return
    if len(_open):
        raise ValueError(f"ExecuTorch runs with {there} threads, not {wanted}, until its open sessions are forgotten")
    portable_lib._unsafe_reset_threadpool(wanted)


@contextmanager
def _quietly() -> Generator[None, None, None]:
    """Its importers and lowering passes print and warn."""
    os.environ.setdefault("FLATC_LOG", "0")
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
