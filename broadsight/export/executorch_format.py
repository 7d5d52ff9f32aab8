"""ExecuTorch: a .pte file for phones, lowered to XNNPACK, run here by the Python runtime."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from .description import Description
from .session import Session

METHOD = "broadsight"  # gives the description, as the bytes of its JSON

_open: WeakSet[Session] = WeakSet()


def write(program: ExportedProgram, description: Description, path: Path) -> None:
    """A program for one image of a fixed size at a time, as one file with its description."""
    with _quietly():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
        from executorch.exir.passes.constant_prop_pass import constant_prop_pass

        text = torch.frombuffer(bytearray(description.to_json().encode()), dtype=torch.uint8)
        # XNNPACK takes filters that are constants, but not views of constants: those would run a hundred times slower.
        lowered = to_edge_transform_and_lower(
            constant_prop_pass(deepcopy(program)),
            transform_passes=[_drop_idle_expands],
            partitioner=[XnnpackPartitioner()],
            constant_methods={METHOD: text},
        ).to_executorch()
    path.write_bytes(lowered.buffer)


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
            program = Runtime.get().load_program(str(path))
        except Exception as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise ValueError(f"{path} cannot be opened by ExecuTorch: {lines[0]}") from None
        if METHOD not in program.method_names:
            raise ValueError(f"{path} does not say what it is; expected a file that `broadsight export` wrote")
        kept: Any = program.load_method(METHOD)
        description = Description.from_json(bytes(kept.execute([])[0].tolist()).decode())
        method: Any = program.load_method("forward")

    def run(images: np.ndarray) -> list[np.ndarray]:
        # The runtime writes into memory of its own, which the next call uses again.
        return [one.numpy().copy() for one in method.execute([torch.from_numpy(images)])]

    session = Session(description, run)
    _open.add(session)
    return session


def _set_threads(wanted: int | None) -> None:
    """Before a program is loaded: what it holds of an earlier pool is gone with that pool, and it computes nonsense."""
    from executorch.extension.pybindings import portable_lib

    there = portable_lib._threadpool_get_thread_count()
    if wanted is None or wanted == there:
        return
    if len(_open):
        raise ValueError(f"ExecuTorch runs with {there} threads, not {wanted}, until its open sessions are forgotten")
    portable_lib._unsafe_reset_threadpool(wanted)


def _drop_idle_expands(module: GraphModule) -> Any:
    """Products of batches expand their factors, mostly to the shapes that these have: a copy, and outside XNNPACK."""
    from executorch.exir.dialects._ops import ops
    from torch.fx.passes.infra.pass_base import PassResult

    for node in module.graph.find_nodes(op="call_function", target=ops.edge.aten.expand_copy.default):
        if node.args[0].meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    return PassResult(module, True)


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
