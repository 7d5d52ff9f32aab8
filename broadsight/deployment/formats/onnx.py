"""ONNX: one file, opset 20, run by ONNX Runtime."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from ..quiet import quiet
from ..session import KEY, Description, Session
from . import Format, described, register

OPSET = 20
INPUT = "images"
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.ms.internal.nhwc")  # of ONNX Runtime's own operators
COMPILED = "EPContext"  # an operator that names a file of compiled code
OPTIONS = "ort_config"  # metadata that ONNX Runtime may take for its own options


@register
class ONNX(Format):
    name, files, runtime = "onnx", (".onnx",), "ONNX Runtime"
    packages, extra = ("onnx", "onnxscript", "onnxruntime"), "export"
    int8, int8_batches = "int8", True
    precisions = ("fp32", "fp16")  # its CPU operators have no bfloat16

    def write(self, program: ExportedProgram, description: Description, path: Path) -> None:
        import onnx

        model = to_onnx(program, description.outputs)
        model.doc_string = f"{description.title}, exported by broadsight"
        onnx.checker.check_model(model)
        _save(model, description, path)

    def load(self, path: Path, threads: int | None) -> Session:
        content = path.read_bytes()
        check_onnx(content)
        session = session_of(content, threads)
        description = described(session.get_modelmeta().custom_metadata_map)
        outputs, precision = list(description.outputs), description.precision
        computes = "fp32" if precision == "fp32" or widens(content) else precision
        return Session(description, lambda images: session.run(outputs, {INPUT: images}), computes)

    def calibrated(self, source: Path, calibration: Any, threads: int | None = None) -> Any:
        from ..int8.onnx import CalibratedONNX

        return CalibratedONNX(source, calibration, threads)

    def describe(self, path: Path, description: Description) -> None:
        import onnx

        _save(onnx.load(path), description, path)


def to_onnx(program: ExportedProgram, outputs: Sequence[str]) -> Any:
    """A program as an `onnx.ModelProto`."""
    names: Any = dict(input_names=[INPUT], output_names=list(outputs))
    with quiet():
        exported: Any = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False, **names)
    model = exported.model_proto  # made anew at every access
    add_bias_within(model)
    return model


def widens(model: bytes) -> bool:
    """Whether ONNX Runtime computes a half precision in float32, where it has no operators for it on this CPU."""
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        session_of(model, optimised=(path := Path(folder) / "optimised.onnx"))
        return any(node.name.startswith("InsertedPrecisionFreeCast") for node in onnx.load(path).graph.node)


def session_of(model: bytes, threads: int | None = None, optimised: Path | None = None) -> Any:
    """An `onnxruntime.InferenceSession` on the CPU that reports nothing but errors, and writes its optimised graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    if threads is not None:
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _save(model: Any, description: Description, path: Path) -> None:
    """Write an `onnx.ModelProto` with its description, and what viewers of ONNX files can show of it."""
    import onnx

    shown = {"task": description.task, "title": description.title}
    if description.classes:
        shown["classes"] = "\n".join(description.classes)
    onnx.helper.set_model_props(model, {KEY: description.to_json(), **shown})
    path.write_bytes(model.SerializeToString())


def add_bias_within(model: Any) -> None:
    """Make Gemm of MatMul and Add where stacks of rows meet one weight and one bias, in place: ONNX Runtime adds the
    bias of Gemm while it multiplies; Add is a pass over the memory of its own, and keeps GELU from its faster form. It
    does so itself only where all lengths are known; what has several axes of unknown length is left alone."""
    from onnx import helper, numpy_helper

    graph = model.graph
    constants = {one.name: tuple(one.dims) for one in graph.initializer}
    known = {one.name: one.type.tensor_type.shape.dim for one in (*graph.input, *graph.value_info)}  # -1: unknown
    shapes = {name: [x.dim_value if x.HasField("dim_value") else -1 for x in dims] for name, dims in known.items()}
    readers = readers_of(graph)
    kept, replaced = [], set()
    for node in graph.node:
        found = None if node.op_type != "MatMul" else _biased(node, constants, shapes, readers)
        if found is None:
            kept.append(node)
            continue
        add, bias, front = found
        rows, width = constants[node.input[1]]
        stem = f"{node.output[0]}_rows"
        for name, target in ((f"{stem}_flat", [-1, rows]), (f"{stem}_whole", [*front, width])):
            graph.initializer.append(numpy_helper.from_array(np.array(target, np.int64), name))
        gemm = helper.make_node("Gemm", [stem, node.input[1], bias], [f"{stem}_sum"], name=node.name)
        gemm.metadata_props.extend(node.metadata_props)
        flat = helper.make_node("Reshape", [node.input[0], f"{stem}_flat"], [stem], name=f"{node.name}_flat")
        sums, whole = [f"{stem}_sum", f"{stem}_whole"], f"{node.name}_whole"
        kept += [flat, gemm, helper.make_node("Reshape", sums, [add.output[0]], name=whole)]
        replaced.add(id(add))
        shapes.pop(node.output[0], None)
    keep_only(graph.node, [node for node in kept if id(node) not in replaced])
    keep_only(graph.value_info, [one for one in graph.value_info if one.name in shapes])


def keep_only(parts: Any, kept: Sequence[Any]) -> None:
    """Make a repeated field of a protobuf message hold these."""
    del parts[:]
    parts.extend(kept)


def readers_of(graph: Any) -> dict[str, list[Any]]:
    """By the name of a tensor the nodes that read it, with None for who stands outside of the graph."""
    readers: dict[str, list[Any]] = {one.name: [None] for one in graph.output}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return readers


def _biased(node: Any, constants: Any, shapes: Any, readers: Any) -> tuple[Any, str, list[int]] | None:
    """The Add behind a MatMul, the name of its bias, and the leading axes of the result with -1 for an unknown one."""
    weight, shape = constants.get(node.input[1], ()), shapes.get(node.input[0], [])
    if len(weight) != 2 or len(shape) < 3 or shape[-1] != weight[0]:
        return None
    (add, *others) = readers.get(node.output[0], [None])
    if others or add is None or add.op_type != "Add":
        return None
    bias = add.input[1] if add.input[0] == node.output[0] else add.input[0]
    if constants.get(bias) != (weight[1],):
        return None
    return None if shape[:-1].count(-1) > 1 or 0 in shape[:-1] else (add, bias, shape[:-1])


def check_onnx(content: bytes) -> None:
    """Refuse a file that refers to others, or to operators that are not ONNX Runtime's: a ValueError with what."""
    import onnx

    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:
        raise ValueError(f"it is no ONNX file ({type(error).__name__})") from None
    if not model.HasField("graph"):
        raise ValueError("it is no ONNX file (there is no graph)")
    if any(entry.key == OPTIONS for entry in model.metadata_props):
        raise ValueError(f"it sets options of ONNX Runtime ({OPTIONS}); expected a model alone")
    domains = {*DOMAINS, *(function.domain for function in model.functions)}
    for part in _parts(model):
        if isinstance(part, onnx.NodeProto) and (part.op_type == COMPILED or part.domain not in domains):
            name = f"{part.domain}.{part.op_type}"
            raise ValueError(f"it calls {name[:80]!r}, which is no operator of ONNX Runtime")
        if isinstance(part, onnx.TensorProto) and (part.data_location == part.EXTERNAL or part.external_data):
            place = next((entry.value for entry in part.external_data if entry.key == "location"), "")
            raise ValueError(f"its tensor {part.name[:80]!r} lies in another file, {place[:80]!r}; expected one file")


def _parts(message: Any) -> Iterator[Any]:
    """Whatever a protobuf message holds, however deep, such as the tensors in the branches of an If."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield part
                yield from _parts(part)
