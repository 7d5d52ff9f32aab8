"""OpenVINO: an .xml file with its weights in the .bin beside it."""

import operator
import warnings
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from .. import signal_stack
from ..description import KEY, Description
from ..session import Session
from .onnx import INPUT
from .openvino_inside import check_openvino

MANY = 2**22  # tokens, more than any map has; twice as many are still exact in float32, in which OpenVINO divides


def write(program: ExportedProgram, description: Description, path: Path) -> None:
    """A program as OpenVINO's .xml and .bin, weights in float32, its description among the run-time information."""
    import openvino

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = openvino.convert_model(plain_sizes(program))
    for port, name in [(model.inputs[0], INPUT), *zip(model.outputs, description.outputs, strict=True)]:
        port.get_tensor().set_names({name})
    if not description.image["any_size"]:
        # The converter leaves sides open. For one image OpenVINO fuses more so than of what torch captures for one.
        model.reshape([-1 if description.image["any_batch"] else 1, *description.shape])
    save(model, description, path)


def plain_sizes(program: ExportedProgram) -> ExportedProgram:
    """The same program without maxima and minima of sizes, which OpenVINO does not know; they become sums and products.

    Where there are some it is a copy, and no longer checks the sizes that it is given, since those checks have more.
    """
    if not any(node.target in (torch.sym_max, torch.sym_min) for node in program.graph.nodes):
        return program
    program = deepcopy(program)
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_scalar.default:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target in (torch.sym_max, torch.sym_min):
            one, other = node.args if node.target is torch.sym_max else node.args[::-1]
            with graph.inserting_before(node):
                # What the other has more, times 1 if that is positive, else 0
                more = graph.call_function(operator.sub, (other, one))
                raised = graph.call_function(operator.add, (more, MANY - 1))
                positive = graph.call_function(operator.floordiv, (raised, MANY))
                gain = graph.call_function(operator.mul, (more, positive))
                first, change = (one, operator.add) if node.target is torch.sym_max else (other, operator.sub)
                found = graph.call_function(change, (first, gain))
            found.meta = dict(node.meta)
            node.replace_all_uses_with(found)
            graph.erase_node(node)
    program.graph_module.recompile()
    return program


def save(model: Any, description: Description, path: Path) -> None:
    """Write an `openvino.Model`."""
    import openvino

    model.set_rt_info(description.to_json(), KEY)
    openvino.save_model(model, str(path), compress_to_fp16=False)


def open(path: Path, threads: int | None = None) -> Session:
    """An .xml file of ours in OpenVINO, on the CPU, in float32 where it is float.

    Args:
        threads: Of its operators; None leaves it to OpenVINO.
    """
    import openvino

    try:
        check_openvino(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be opened: {error}") from None
    core = openvino.Core()
    try:
        model = core.read_model(str(path))
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"{path} cannot be opened by OpenVINO: {lines[-1] if lines else 'no reason given'}") from None
    if not model.has_rt_info(KEY):
        raise ValueError(f"{path} does not say what it is; expected a file that `broadsight export` wrote")
    description = Description.from_json(model.get_rt_info(KEY).astype(str))
    # Some processors would compute in bfloat16 unasked.
    hints: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    if threads is not None:
        hints["INFERENCE_NUM_THREADS"] = threads

    def compiled(graph: Any) -> Any:
        with signal_stack.kept():
            return core.compile_model(graph, "CPU", hints).create_infer_request()

    single = for_one_image(model, description)
    several = cache(lambda: compiled(model))  # takes as long again: not for who only ever has one image
    one = several() if single is None else compiled(single)

    def run(images: np.ndarray) -> list[np.ndarray]:
        found = (one if len(images) == 1 else several()).infer({0: images}, share_inputs=True)
        return [np.array(found[place]) for place in range(len(description.outputs))]

    return Session(description, run)


def for_one_image(model: Any, description: Description) -> Any | None:
    """A copy of a model for any number of images, for one alone; None where other lengths stay open, too.

    OpenVINO fuses attention, norms and chains of small operations where all lengths are known, and else does not.
    """
    image = description.image
    if not image["any_batch"] or image["any_size"]:
        return None
    single = model.clone()
    single.reshape([1, *description.shape])
    return single
