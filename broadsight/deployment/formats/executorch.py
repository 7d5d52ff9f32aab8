"""ExecuTorch: a .pte file for phones, lowered to XNNPACK, run here by the Python runtime."""

import hashlib
import os
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch.export import ExportedProgram

from ..description import KEY, Description
from ..quiet import quiet
from ..session import Session
from .executorch_passes import drop_idle_expands, flatten_soft_maxes, fold_constants
from .registry import Format, described, register

SEAL = b"\nbroadsight sha256 "

_open: WeakSet[Any] = WeakSet()  # sessions, by what runs them


@register
class ExecuTorch(Format):
    """One image of a fixed size at a time. The method "broadsight" gives the description, as the bytes of its JSON.

    The runtime has one pool of threads, which all sessions of the process share.
    """

    name, files, runtime = "executorch", (".pte",), "ExecuTorch"
    packages, extra = ("executorch",), "executorch"
    batches = sizes = False

    def write(self, program: ExportedProgram, description: Description, path: Path) -> None:
        os.environ.setdefault("FLATC_LOG", "0")
        with quiet():
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower

            text = torch.frombuffer(bytearray(description.to_json().encode()), dtype=torch.uint8)
            lowered = to_edge_transform_and_lower(
                fold_constants(program),
                transform_passes=[drop_idle_expands, flatten_soft_maxes],
                partitioner=[XnnpackPartitioner()],
                constant_methods={KEY: text},
            ).to_executorch()
        path.write_bytes(sealed(lowered.buffer))

    def load(self, path: Path, threads: int | None) -> Session:
        with quiet():
            from executorch.runtime import Runtime

            _set_threads(threads)
            _check(path)
            program = Runtime.get().load_program(str(path))  # checks that all that it refers to lies within
            kept: Any = program.load_method(KEY) if program.method_names == {KEY, "forward"} else None
            texts = {} if kept is None else {KEY: bytes(kept.execute([])[0].tolist()).decode()}
            description = described(texts)
            method: Any = program.load_method("forward")

        def run(images: np.ndarray) -> list[np.ndarray]:
            # The runtime writes into memory of its own, which the next call uses again.
            return [one.numpy().copy() for one in method.execute([torch.from_numpy(images)])]

        _open.add(run)
        return Session(description, run)


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
