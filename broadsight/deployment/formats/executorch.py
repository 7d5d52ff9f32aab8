"""ExecuTorch: a .pte file for phones, lowered to XNNPACK, run here by the Python runtime."""

import hashlib
import os
from copy import deepcopy
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from ..quiet import quiet
from ..session import KEY, Description, Session
from . import Format, described, register

SEAL = b"\nbroadsight sha256 "

_open: WeakSet[Any] = WeakSet()  # sessions, by what runs them


@register
class ExecuTorch(Format):
    """One image of a fixed size at a time.

    The method "broadsight" gives the description, as the bytes of its JSON. The runtime has one pool of threads,
    which all sessions of the process share.
    """

    name, files, runtime = "executorch", (".pte",), "ExecuTorch"
    packages, extra = ("executorch",), "executorch"
    batches = sizes = False
    precisions = ("fp32", "fp16")  # XNNPACK has no bfloat16

    def write(self, program: ExportedProgram, description: Description, path: Path) -> None:
        os.environ.setdefault("FLATC_LOG", "0")
        with quiet():
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower

            text = torch.frombuffer(bytearray(description.to_json().encode()), dtype=torch.uint8)
            how: Any = dict(partitioner=[XnnpackPartitioner()], constant_methods={KEY: text})
            how["transform_passes"] = [drop_idle_expands, flatten_soft_maxes]
            lowered = to_edge_transform_and_lower(fold_constants(program), **how).to_executorch()
        path.write_bytes(sealed(lowered.buffer))

    def load(self, path: Path, threads: int | None) -> Session:
        with quiet():
            from executorch.extension.pybindings import portable_lib
            from executorch.runtime import Runtime

            # Before a program is loaded: what it holds of an earlier pool of threads is gone with that pool.
            there = portable_lib._threadpool_get_thread_count()
            if threads not in (None, there):
                if len(_open):
                    what = f"ExecuTorch runs with {there} threads, not {threads}"
                    raise ValueError(f"{what}, until its open sessions are forgotten")
                portable_lib._unsafe_reset_threadpool(threads)
            content = path.read_bytes()
            if content[4:6] != b"ET":
                raise ValueError("it is no program of ExecuTorch")
            inner, seal, _ = content.rpartition(SEAL)
            if not seal or sealed(inner) != content:  # the runtime may end the whole process over a damaged one
                raise ValueError("it is damaged, or not by this version of `broadsight export`; export the model again")
            program: Any = Runtime.get().load_program(str(path))  # checks that all that it refers to lies within
            whole = program.method_names == {KEY, "forward"}
            texts = {KEY: bytes(program.load_method(KEY).execute([])[0].tolist()).decode()} if whole else {}
            description, method = described(texts), program.load_method("forward")

        def run(images: np.ndarray) -> list[np.ndarray]:
            # The runtime writes into memory of its own, which the next call uses again.
            return [one.numpy().copy() for one in method.execute([torch.from_numpy(images)])]

        _open.add(run)
        return Session(description, run, description.precision)


def sealed(program: bytes) -> bytes:
    """A program with its digest behind it, where ExecuTorch does not look."""
    return bytes(program) + SEAL + hashlib.sha256(program).hexdigest().encode()


def fold_constants(program: ExportedProgram) -> ExportedProgram:
    """A copy in which whatever is computed from weights alone is a weight.

    XNNPACK takes filters that are constants, but not views of constants: those would run a hundred times slower.
    """
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    # Masks of windows are written part by part: as they are, the constants to be would be written to
    schemas = (getattr(node.target, "_schema", None) for node in program.graph.nodes)
    writes = any(schema is not None and schema.is_mutable for schema in schemas)
    folded = constant_prop_pass(program.run_decompositions({}) if writes else deepcopy(program))
    for name in set(folded.constants) - set(program.constants):
        # With memory of their own: parameters that were passed on are looked for among buffers, slices written whole
        folded.constants[name] = folded.constants[name].detach().clone(memory_format=torch.contiguous_format)
    return folded


def drop_idle_expands(module: GraphModule) -> PassResult:
    """Products of batches expand their factors, mostly to the shapes that these have: a copy, and outside XNNPACK."""
    from executorch.exir.dialects._ops import ops

    for node in module.graph.find_nodes(op="call_function", target=ops.edge.aten.expand_copy.default):
        if node.args[0].meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    return PassResult(module, True)


def flatten_soft_maxes(module: GraphModule) -> PassResult:
    """Soft-maxes over the columns of maps get three dimensions: behind a convolution, whose maps XNNPACK keeps with
    their channels last, one of four would run over the channels."""
    from executorch.exir.dialects._ops import ops

    for node in module.graph.find_nodes(op="call_function", target=ops.edge.aten._softmax.default):
        x, dim, *others = node.args
        value = x.meta["val"]
        if value.ndim != 4 or dim not in (-1, 3):
            continue
        shape, view = list(value.shape), ops.edge.aten.view_copy.default
        flat = [shape[0], shape[1] * shape[2], shape[3]]
        with module.graph.inserting_before(node):
            rows = module.graph.call_function(view, (x, flat))
            soft = module.graph.call_function(node.target, (rows, 2, *others))
            rows.meta["val"] = soft.meta["val"] = value.new_empty(flat)
            back = module.graph.call_function(view, (soft, shape))
            back.meta = node.meta
        node.replace_all_uses_with(back)
        module.graph.erase_node(node)
    module.recompile()
    return PassResult(module, True)
