"""ONNX in int8: static quantisation by ONNX Runtime."""

import re
import tempfile
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..formats.onnx import INPUT, keep_only, readers_of, session_of
from ..quiet import quiet
from .layers import Calibrated, Product

PRODUCTS = ("Conv", "MatMul", "Gemm")
WITHIN = ("Relu", "Clip")  # that a convolution in int8 does by saturating
SCOPES = "pkg.torch.onnx.name_scopes"  # under which torch's exporter keeps the modules that a node is in
MOVES = ("Slice", "Unsqueeze", "Squeeze", "Transpose", "Reshape", "Split", "Concat")
BATCH = 8  # images that are calibrated with at once


class CalibratedONNX(Calibrated):
    """A float ONNX file with the ranges of its values, to be written as pairs of Quantize- and DequantizeLinear (QDQ):
    weights signed, with a scale for each output channel; activations unsigned, from the smallest to the largest value
    seen. Products of matrices give float results; convolutions give int8, or ONNX Runtime would run them in float. On
    trained models this was the most accurate and the fastest of what ONNX Runtime offers."""

    def _read(self, source: Path) -> list[Product]:
        from onnxruntime.quantization.quant_utils import load_model_with_shape_infer

        with tempfile.TemporaryDirectory() as folder, quiet():
            inferred = Path(folder) / "model.onnx"  # beside which ONNX Runtime writes
            model, self._origins = _with_weights_in_place(source)
            inferred.write_bytes(model.SerializeToString())
            self._ranges, self._endless = _ranges(inferred, self.calibration)
            self._float: Any = load_model_with_shape_infer(inferred)
        graph = self._float.graph
        _own_biases(graph)
        self._constants = {one.name: tuple(one.dims) for one in graph.initializer}
        self._makers = {name: node for node in graph.node for name in node.output}
        self._readers = readers_of(graph)
        self._products = {node.name: node for node in graph.node if node.op_type in PRODUCTS}
        found = []
        for node in self._products.values():
            weight = self._constants.get(node.input[1])
            before = self._makers.get(node.input[0])
            while before is not None and before.op_type in WITHIN:
                before = self._makers.get(before.input[0])
            key = before.name if before is not None and before.op_type == "Conv" else None
            channels = weight[1] if weight is not None and node.op_type == "Conv" else None
            endless = not self._endless.isdisjoint((node.input[0], node.output[0]))
            found.append(Product(node.name, self._place(node), weight is None, endless, channels, key))
        return found

    def _place(self, node: Any) -> tuple[str, str]:
        """The module that a node is in, and what it does there."""
        scopes = next((one.value for one in node.metadata_props if one.key == SCOPES), "[]")
        *modules, operation = literal_eval(scopes) or [node.name]
        operation = re.sub(r"_\d+$", "", operation)
        weight = self._origins.get(node.input[1], node.input[1])
        if weight.endswith(".weight") and node.input[1] in self._constants:  # of a folded pair the other would be named
            return weight.removesuffix(".weight"), operation
        return (modules[-1] if modules else ""), operation

    def alone(self, layer: str) -> Callable[[np.ndarray], np.ndarray]:
        session = session_of(self._quantised([layer]).SerializeToString(), self.threads)
        return lambda images: session.run(None, {INPUT: images})[0]

    def _save(self, model: Any, target: Path) -> None:
        import onnx

        onnx.checker.check_model(model)
        target.write_bytes(model.SerializeToString())

    def _quantised(self, layers: Sequence[str]) -> Any:
        import onnx
        from onnxruntime.quantization import QDQQuantizer, QuantType

        nodes = [self._products[self.layers[name]] for name in layers]
        # what follows a convolution and vanishes in its saturation
        alone = [self._readers.get(node.output[0], []) for node in nodes if node.op_type == "Conv"]
        within = [one.name for one, *others in filter(None, alone) if not others and one and one.op_type in WITHIN]
        # ONNX Runtime multiplies a stack of matrices by constants of one scale only
        second = {node.input[1] for node in nodes if node.op_type == "MatMul"}
        stacks = [name for name in second if len(self._constants[name]) > 2]
        stacked = {name: [{"quant_type": QuantType.QInt8, "symmetric": True}] for name in stacks}
        options = {"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"], "TensorQuantOverrides": stacked}
        copy = onnx.ModelProto()
        copy.CopyFrom(self._float)
        with quiet():
            what: Any = dict(nodes_to_quantize=[*(node.name for node in nodes), *within], nodes_to_exclude=[])
            what |= dict(op_types_to_quantize=[*PRODUCTS, *WITHIN], tensors_range=self._ranges)
            how: Any = dict(per_channel=True, reduce_range=False, extra_options=options)
            how |= dict(weight_qType=QuantType.QInt8, activation_qType=QuantType.QUInt8)
            quantizer = QDQQuantizer(copy, **what, **how)
            quantizer.quantize_model()
        quantizer.model.topological_sort()
        model: Any = quantizer.model.model
        _spare_others(model, {node.name: node.op_type for node in nodes})
        # Without what the quantiser has noted for itself
        keep_only(model.metadata_props, [x for x in self._float.metadata_props if not x.key.startswith("onnx.")])
        names = {key: name for name, key in self.layers.items()}
        for node in model.graph.node:
            node.name = names.get(node.name, node.name)
            del node.metadata_props[:]  # where torch noted it line by line: as large as the weights of a small model
        return model


def _with_weights_in_place(source: Path) -> tuple[Any, dict[str, str]]:
    """An `onnx.ModelProto` without nodes that only move constants, behind which the quantiser sees no weight: torch
    leaves them where the constant is large. Second, by the name of a moved constant that of what it was made of."""
    import onnx
    from onnx import helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    model = onnx.load(source)
    graph = model.graph
    constants = {one.name: one for one in graph.initializer}
    kept, origins = [], {}
    for node in graph.node:
        if node.op_type not in MOVES or not all(name in constants for name in node.input if name):
            kept.append(node)
            continue
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
        alone = helper.make_graph([node], "moved", [], outputs, [constants[name] for name in node.input if name])
        run = ReferenceEvaluator(helper.make_model(alone, opset_imports=model.opset_import))
        for name, value in zip(node.output, run.run(None, {}), strict=True):
            constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
            origins[name] = origins.get(node.input[0], node.input[0])
    read = {name for node in kept for name in node.input} | {one.name for one in graph.output}
    keep_only(graph.node, kept)
    keep_only(graph.initializer, [one for name, one in constants.items() if name in read])
    return model, origins


def _ranges(source: Path, calibration: Any) -> tuple[Any, set[str]]:
    """The smallest and largest value of every tensor around a product, and the names of tensors without such values."""
    import onnx
    from onnxruntime.quantization import CalibrationMethod, create_calibrator
    from onnxruntime.quantization.calibrate import TensorsData

    count = onnx.load(source).graph.input[0].type.tensor_type.shape.dim[0].dim_value or BATCH  # 0 if any number does

    starts = range(0, len(calibration), count)
    batches = ({INPUT: np.ascontiguousarray(calibration[start : start + count])} for start in starts)
    reader: Any = SimpleNamespace(get_next=lambda: next(batches, None))
    options: Any = dict(calibrate_method=CalibrationMethod.MinMax)
    calibrator = create_calibrator(source, [*PRODUCTS, *WITHIN], str(source.with_name("augmented.onnx")), **options)
    calibrator.collect_data(reader)
    found = {name: one.range_value for name, one in calibrator.compute_data().items()}
    finite = {name: both for name, both in found.items() if np.isfinite(both).all()}
    return TensorsData(CalibrationMethod.MinMax, finite), found.keys() - finite.keys()


def _own_biases(graph: Any) -> None:
    """Give every product a bias of its own: of one that several share the quantiser makes copies, by names in use."""
    constants, seen = {one.name: one for one in graph.initializer}, set()
    for node in graph.node:
        if node.op_type in PRODUCTS and len(node.input) > 2 and node.input[2] in constants:
            name = node.input[2]
            if name in seen:
                node.input[2] = f"{node.name}_bias"
                graph.initializer.add().CopyFrom(constants[name])
                graph.initializer[-1].name = node.input[2]
            seen.add(name)


def _spare_others(model: Any, quantised: Mapping[str, str]) -> None:
    """Give back the float values, where they are still there, to whoever computes in float, such as a residual
    connection: the quantiser rounds a tensor for all that read it. Convolutions in int8 give rounded ones."""
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        if node.name in quantised or node.op_type in ("QuantizeLinear", "DequantizeLinear", *WITHIN):
            continue
        for place, name in enumerate(node.input):
            read = makers.get(name)
            rounded = makers.get(read.input[0]) if read is not None and read.op_type == "DequantizeLinear" else None
            if rounded is None:  # float, or a constant in int8
                continue
            maker = makers.get(rounded.input[0])
            if maker is None or quantised.get(maker.name) != "Conv":
                node.input[place] = rounded.input[0]
