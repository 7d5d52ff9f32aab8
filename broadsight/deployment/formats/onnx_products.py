"""Products of an ONNX graph as runtimes run them fastest."""

from typing import Any

import numpy as np


def add_bias_within(model: Any) -> int:
    """Make Gemm of MatMul and Add where stacks of rows meet one weight and one bias, in place; the number of those.

    Of Gemm, which knows matrices alone, ONNX Runtime adds the bias while it multiplies; Add is a pass over the memory
    of its own, and keeps GELU from its faster form. To reshape before and after costs nothing. ONNX Runtime does so
    itself only where all lengths are known; left alone here is what has more than one axis of unknown length.
    """
    from onnx import helper, numpy_helper

    graph = model.graph
    constants = {one.name: tuple(one.dims) for one in graph.initializer}
    shapes = {one.name: _shape(one) for one in (*graph.input, *graph.value_info)}
    readers: dict[str, list[Any]] = {one.name: [None] for one in graph.output}  # somebody outside reads them
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    kept: list[Any] = []
    replaced: set[int] = set()
    made = 0
    for node in graph.node:
        found = None if node.op_type != "MatMul" else _biased(node, constants, shapes, readers)
        if found is None:
            kept.append(node)
            continue
        add, bias, front = found
        rows, width = constants[node.input[1]]
        stem, made = f"{node.output[0]}_rows", made + 1
        for name, target in ((f"{stem}_flat", [-1, rows]), (f"{stem}_whole", [*front, width])):
            graph.initializer.append(numpy_helper.from_array(np.array(target, np.int64), name))
        gemm = helper.make_node("Gemm", [stem, node.input[1], bias], [f"{stem}_sum"], name=node.name)
        gemm.metadata_props.extend(node.metadata_props)
        kept += [
            helper.make_node("Reshape", [node.input[0], f"{stem}_flat"], [stem], name=f"{node.name}_flat"),
            gemm,
            helper.make_node("Reshape", [f"{stem}_sum", f"{stem}_whole"], [add.output[0]], name=f"{node.name}_whole"),
        ]
        replaced.add(id(add))
        shapes.pop(node.output[0], None)
    kept = [node for node in kept if id(node) not in replaced]
    del graph.node[:]
    graph.node.extend(kept)
    gone = [place for place, one in enumerate(graph.value_info) if one.name not in shapes]
    for place in reversed(gone):
        del graph.value_info[place]
    return made


def _biased(node: Any, constants: Any, shapes: Any, readers: Any) -> tuple[Any, str, list[int]] | None:
    """The Add behind a MatMul, the name of its bias, and the leading axes of the result with -1 for an unknown one."""
    weight, shape = constants.get(node.input[1], ()), shapes.get(node.input[0])
    if len(weight) != 2 or shape is None or len(shape) < 3 or shape[-1] != weight[0]:
        return None
    (add, *others) = readers.get(node.output[0], [None])
    if others or add is None or add.op_type != "Add":
        return None
    bias = add.input[1] if add.input[0] == node.output[0] else add.input[0]
    if constants.get(bias) != (weight[1],):
        return None
    front = [-1 if size is None else size for size in shape[:-1]]
    return None if front.count(-1) > 1 or 0 in front else (add, bias, front)


def _shape(value: Any) -> tuple[int | None, ...] | None:
    """Of a value, None where a length, or the whole of it, is unknown."""
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return tuple(size.dim_value if size.HasField("dim_value") else None for size in kind.shape.dim)
