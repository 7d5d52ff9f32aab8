"""OpenVINO's faster kernels for what a model says of tokens, wherever all lengths but the number of images are known.

Its fully connected layers compute a GELU slower than its convolutions do, and leave the sum to another pass over
memory; its norms know rows of one axis of tokens, and of maps become chains of operations in a layout of their own.
"""

from typing import Any

import numpy as np

TOKENS = [0, 2, 1]  # (B, N, C) <-> (B, C, N), which costs nothing: convolutions want their channels side by side


def choose_kernels(model: Any) -> None:
    """Rewrite an `openvino.Model` in place: the layers of MLPs as convolutions, norms of maps as norms of tokens."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Gelu":
            _mlp_as_convolutions(node)
        elif node.get_type_name() == "MVN":
            _norm_of_tokens(node)
    model.validate_nodes_and_infer_types()


def _mlp_as_convolutions(gelu: Any) -> None:
    """linear -> GELU -> linear -> sum, of maps or tokens (B, ..., C) whose sides are known."""
    import openvino.opset13 as ops

    before: Any = _linear(gelu.input_value(0).get_node())
    after: Any = _only_reader(gelu)
    summed = after and _only_reader(after)
    if summed is not None and _bias(summed, after) is not None:
        after, summed = summed, _only_reader(summed)
    last = after and _linear(after)
    if before is None or last is None or summed is None or summed.get_type_name() != "Add":
        return
    other = _other(summed, after)
    if other.get_partial_shape() != after.output(0).get_partial_shape():
        return  # without a sum of the same shape the result would be copied back to tokens
    x = ops.gelu(_convolution(_to_channels(before[0]), *before[1:]), gelu.get_attributes()["approximation_mode"])
    tokens = ops.transpose(ops.add(_to_channels(other), _convolution(x, *last[1:])), np.array(TOKENS))
    sides = _sides(summed.output(0)) or []
    found = tokens if len(sides) == 1 else ops.reshape(tokens, np.array([0, *sides, -1]), special_zero=True)
    summed.output(0).replace(found.output(0))


def _norm_of_tokens(norm: Any) -> None:
    """A norm over the channels of a map (B, H, W, C) as one of (B, H*W, C)."""
    import openvino.opset13 as ops

    x, axes = norm.input_value(0), _values(norm.input_value(1).get_node())
    sides = _sides(x)
    if sides is None or len(sides) != 2 or axes is None or axes.tolist() not in ([-1], [3]):
        return
    kept = norm.get_attributes()
    tokens = ops.mvn(_as_tokens(x), np.array([-1]), kept["normalize_variance"], kept["eps"], kept["eps_mode"])
    norm.output(0).replace(ops.reshape(tokens, np.array([0, *sides, -1]), special_zero=True).output(0))


def _linear(node: Any) -> tuple[Any, np.ndarray, np.ndarray | None] | None:
    """What a linear layer that ends here takes, its weight (out, in) and its bias; None if this is none."""
    bias = None
    if node.get_type_name() == "Add":
        sources = [node.input_value(i).get_node() for i in range(2)]
        product: Any = next((one for one in sources if one.get_type_name() == "MatMul"), None)
        bias = None if product is None or _only_reader(product) is None else _bias(node, product)
        if bias is None:
            return None
        node = product
    if node.get_type_name() != "MatMul" or node.get_attributes()["transpose_a"]:
        return None
    weight = _values(node.input_value(1).get_node())
    if weight is None or weight.ndim != 2 or _sides(node.input_value(0)) is None:
        return None
    return node.input_value(0), weight if node.get_attributes()["transpose_b"] else weight.T, bias


def _bias(node: Any, product: Any) -> np.ndarray | None:
    """What an Add adds to each channel of a product, as a constant; None if it is another node."""
    value = None if node.get_type_name() != "Add" else _values(_other(node, product).get_node())
    width = product.output(0).get_partial_shape()[-1]
    fits = value is not None and width.is_static and value.shape[-1:] == (value.size,) == (width.get_length(),)
    return value if fits else None


def _convolution(x: Any, weight: np.ndarray, bias: np.ndarray | None) -> Any:
    """(B, in, N) -> (B, out, N)."""
    import openvino.opset13 as ops

    y = ops.convolution(x, ops.constant(np.ascontiguousarray(weight)[:, :, None]), [1], [0], [0], [1])
    return y if bias is None else ops.add(y, ops.constant(bias.reshape(1, -1, 1)))


def _to_channels(x: Any) -> Any:
    """(B, ..., C) -> (B, C, N)."""
    import openvino.opset13 as ops

    return ops.transpose(_as_tokens(x), np.array(TOKENS))


def _as_tokens(x: Any) -> Any:
    """(B, ..., C) -> (B, N, C)."""
    import openvino.opset13 as ops

    shape = x.get_partial_shape()
    return x if len(shape) == 3 else ops.reshape(x, np.array([0, -1, shape[-1].get_length()]), special_zero=True)


def _sides(x: Any) -> list[int] | None:
    """Of (B, ..., C) what is between, if all but B is known and it is a map or tokens; else None."""
    shape = x.get_partial_shape()
    if shape.rank.is_dynamic or len(shape) not in (3, 4) or any(one.is_dynamic for one in list(shape)[1:]):
        return None
    return [one.get_length() for one in list(shape)[1:-1]]


def _only_reader(node: Any) -> Any | None:
    """The node that takes what this one gives, if it is the only one."""
    readers = list(node.output(0).get_target_inputs())
    return readers[0].get_node() if len(readers) == 1 else None


def _other(node: Any, one: Any) -> Any:
    """The other of what a node of two inputs takes."""
    return node.input_value(1 if node.input_value(0).get_node() == one else 0)


def _values(node: Any) -> np.ndarray | None:
    return node.get_data() if node.get_type_name() == "Constant" else None
