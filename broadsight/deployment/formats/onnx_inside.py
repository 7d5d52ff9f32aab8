"""What lies inside an ONNX file, looked at before ONNX Runtime sees it."""

from collections.abc import Iterator
from typing import Any

# Whose operators ONNX Runtime brings along; functions in the file may have domains of their own.
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.ms.internal.nhwc")
COMPILED = "EPContext"  # an operator that names a file of compiled code
OPTIONS = "ort_config"  # metadata that ONNX Runtime may take for its own options


def check_onnx(content: bytes) -> None:
    """Refuse a file that refers to others, or to operators that are not ONNX Runtime's.

    Raises:
        ValueError: With what it holds.
    """
    import onnx

    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:
        raise ValueError(f"it is no ONNX file ({type(error).__name__})") from None
    if not model.HasField("graph"):
        raise ValueError("it is no ONNX file (there is no graph)")
    if any(entry.key == OPTIONS for entry in model.metadata_props):
        raise ValueError(f"it sets options of ONNX Runtime ({OPTIONS}); expected a model alone")
    own = {function.domain for function in model.functions}
    for graph in (model.graph, *model.functions):
        for node in _nodes(graph):
            if node.op_type == COMPILED or node.domain not in {*DOMAINS, *own}:
                name = f"{node.domain}.{node.op_type}"
                raise ValueError(f"it calls {name[:80]!r}, which is no operator of ONNX Runtime")
        for tensor in _tensors(graph):
            if tensor.data_location == tensor.EXTERNAL or tensor.external_data:
                place = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
                raise ValueError(
                    f"its tensor {tensor.name[:80]!r} lies in another file, {place[:80]!r}; expected one file"
                )


def _nodes(graph: Any) -> Iterator[Any]:
    """All nodes, those of graphs inside of nodes too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _nodes(inner)


def _tensors(graph: Any) -> Iterator[Any]:
    """All tensors that are stored."""
    yield from getattr(graph, "initializer", ())
    sparse = list(getattr(graph, "sparse_initializer", ()))
    for node in graph.node:
        for attribute in node.attribute:
            yield from (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors)
            sparse += [*([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else [])]
            sparse += attribute.sparse_tensors
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _tensors(inner)
    for both in sparse:
        yield from (both.values, both.indices)
