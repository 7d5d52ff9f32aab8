"""OpenVINO in int8: post-training quantisation by NNCF."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.export import ExportedProgram

from ..formats.openvino import compiled, description_of, save, save_over
from ..quiet import kept_signal_stack, quiet
from ..session import Description
from .layers import Calibrated, Product, unique_names

CONVOLUTIONS = ("Convolution", "GroupConvolution")
PRODUCTS = (*CONVOLUTIONS, "MatMul")
WITHIN = ("Relu", "Clamp")  # part of the convolution before them
OPERATIONS = {"convolution": "conv2d", "bmm": "matmul", "mm": "matmul", "addmm": "linear"}  # by the names torch gives


class CalibratedOpenVINO(Calibrated):
    """A float .xml file (and the .bin beside it) with images to calibrate it.

    On trained models answers stay several times as close, in the same time, if not all that NNCF can is quantised,
    but convolutions and products with weights alone, from the smallest to the largest value seen, and biases are left
    alone.
    """

    def _read(self, source: Path) -> list[Product]:
        import openvino

        self._core = openvino.Core()
        self._float: Any = self._core.read_model(str(source))
        self._description = narrow(self._float)
        self._whole: Any = None  # with all layers in int8, once it is needed
        products = _products(self._float)
        endless, found = self._endless(products), []
        for node in products:  # named as `name_layers` has, or else as OpenVINO has, which adds operators of its own
            name, weight, kind = node.friendly_name, node.input_value(1).get_node(), node.get_type_name()
            computed, channels, key = weight.get_type_name() != "Constant", None, None
            if not computed and kind in CONVOLUTIONS:
                channels = weight.get_output_shape(0)[2 if kind == "GroupConvolution" else 1]
                before = _convolution(node.input_value(0).get_node())
                key = None if before is None else before.friendly_name
            factor, place = channels is not None and _is_factor(node), ("", name.partition("/")[0])
            found.append(Product(name, place, computed, name in endless, channels, key, factor))
        return found

    def alone(self, layer: str) -> Callable[[np.ndarray], np.ndarray]:
        import openvino
        from openvino import opset13

        if self._whole is None:
            self._whole = self._quantised([*self.layers])
        name = self.layers[layer]
        rounded, model = _by_name(self._whole)[name], self._float.clone()
        node = _by_name(model)[name]
        if (grid := _grid(rounded)) is not None:
            node.input(0).replace_source_output(opset13.fake_quantize(node.input_value(0), *grid).output(0))
        results: Any = [opset13.result(rounded.input_value(1))]  # what constants come to
        kind: Any = openvino.Model  # its many constructors are more than a type checker follows
        constants = compiled(self._core, kind(results, [], "constant"), self.threads).create_infer_request()
        weights = np.array(constants.infer({})[0])
        node.input(1).replace_source_output(opset13.constant(weights).output(0))
        request = compiled(self._core, model, self.threads).create_infer_request()
        return lambda images: np.concatenate([np.array(request.infer({0: image[None]})[0]) for image in images])

    def _save(self, model: Any, target: Path) -> None:
        save(model, self._description, target)

    def _quantised(self, layers: Sequence[str]) -> Any:
        with quiet(), kept_signal_stack():
            import nncf
            from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters
            from nncf.quantization.range_estimator import RangeEstimatorParametersSet

            chosen = {self.layers[name] for name in layers}
            idle = ("Constant", "Parameter", "Result", "Convert", *WITHIN)
            others = [node for node in self._float.get_ops() if node.friendly_name not in chosen]
            ignored = [one for one in others if one.get_type_name() not in idle and not _miscomputed(one, chosen)]
            count, minmax = len(self.calibration), RangeEstimatorParametersSet.MINMAX
            images = nncf.Dataset(range(count), lambda place: self.calibration[place : place + 1])
            plain: Any = dict(disable_bias_correction=True, activations_range_estimator_params=minmax)
            how: Any = dict(preset=nncf.QuantizationPreset.MIXED, subset_size=count)
            how["advanced_parameters"] = AdvancedQuantizationParameters(**plain)
            how["ignored_scope"] = nncf.IgnoredScope(names=[one.friendly_name for one in ignored], validate=False)
            return nncf.quantize(self._float, images, **how)

    def _endless(self, products: Sequence[Any]) -> set[str]:
        """Names of products that meet values that are not finite, such as masks of attention; one image tells."""
        from openvino import opset13

        model = self._float.clone()
        nodes = _by_name(model)
        for node in products:
            model.add_results([opset13.result(nodes[node.friendly_name].input_value(0))])
        request = compiled(self._core, model, self.threads).create_infer_request()
        found, first = request.infer({0: self.calibration[:1]}), len(self._float.outputs)
        return {node.friendly_name for place, node in enumerate(products, first) if not np.isfinite(found[place]).all()}


def narrow(model: Any) -> Description:
    """Narrow a model, unless it is for any size, to one image at a time, in place; what it says of itself then.

    In int8 OpenVINO 2026.4 adds wrongly, does not compile or answers with nothing where the number of images is open.
    """
    found = description_of(model)
    if found.image["any_size"]:
        return found
    model.reshape([1, *found.shape])
    return replace(found, image={**found.image, "any_batch": False})


def name_layers(path: Path, program: ExportedProgram) -> None:
    """Give the convolutions and products in an .xml file, made of a program, the names that they have in the model."""
    import openvino

    model: Any = openvino.Core().read_model(str(path))
    products = _products(model)
    origins, places = _origins(program), []
    held = {name: one for name, one in program.state_dict.items() if name.endswith(".weight") and one.ndim > 1}
    directions = {name: _directions(one.detach().float().numpy(), len(one)) for name, one in held.items()}
    weights = {name.removesuffix(".weight"): one for name, one in directions.items()}  # of filters, by module
    for node in products:
        name = node.friendly_name.partition("/")[0]
        module, operation = origins.get(name, ("", name))
        places.append((module if module in weights else _owner(node, weights) or module, operation))
    for node, name in zip(products, unique_names(places), strict=True):
        node.set_friendly_name(name)
    save_over(path, model, description_of(model))


def _origins(program: ExportedProgram) -> dict[str, tuple[str, str]]:
    """By the names that OpenVINO gives to its nodes the module that each is in, and what it does there."""
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    with quiet():
        graph: Any = TorchFXPythonDecoder.from_exported_program(program).pt_module.graph
    found = {}
    for node in graph.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        if node.op == "call_function" and stack and isinstance(stack[-1][0], str):
            operation = re.sub(r"_\d+$", "", node.name)
            found[node.name] = stack[-1][0], OPERATIONS.get(operation, operation)
    return found


def _owner(node: Any, weights: Mapping[str, np.ndarray]) -> str:
    """Whose filters a product has; folding a normalisation into it scales them and loses its name."""
    constant, grouped = node.input_value(1).get_node(), node.get_type_name() == "GroupConvolution"
    if constant.get_type_name() != "Constant":
        return ""
    mine = _directions(constant.data, math.prod(tuple(constant.get_output_shape(0))[: 2 if grouped else 1]))
    lengths = np.linalg.norm(mine, axis=1)
    for name, one in weights.items():
        if one.shape == mine.shape and lengths.any() and np.abs(np.abs((one * mine).sum(1)) - lengths).max() < 1e-3:
            return name
    return ""


def _directions(filters: np.ndarray, rows: int) -> np.ndarray:
    """Filters as rows of length 1, or 0 if one does nothing."""
    flat = filters.reshape(rows, -1)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)


def _products(model: Any) -> list[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() in PRODUCTS]


def _by_name(model: Any) -> dict[str, Any]:
    return {node.friendly_name: node for node in model.get_ops()}


def _is_factor(node: Any) -> bool:
    """Whether what a convolution gives is multiplied as it is, images and channels in one dimension, by activations: in
    int8 OpenVINO cannot compile that for any number of images, it reshapes the steps of the channels like the maps."""
    readers = [one.get_node() for one in node.output(0).get_target_inputs()]
    passed = [one for one in readers if one.get_type_name() in ("Broadcast", "Reshape")]
    return any(one.get_type_name() == "MatMul" for one in readers) or any(map(_is_factor, passed))


def _inputs(node: Any) -> list[Any]:
    return [one.get_node() for one in node.input_values()]


def _convolution(node: Any) -> Any | None:
    """The convolution that a node is, or is the bias or the activation of."""
    while node.get_type_name() in WITHIN or _is_bias(node):
        sources = _inputs(node)
        node = next((one for one in sources if one.get_type_name() != "Constant"), sources[0])
    return node if node.get_type_name() in CONVOLUTIONS else None


def _is_bias(node: Any) -> bool:
    return node.get_type_name() == "Add" and any(one.get_type_name() == "Constant" for one in _inputs(node))


def _miscomputed(node: Any, chosen: set[str]) -> bool:
    """Whether OpenVINO would get a sum wrong: for any number of images it adds a residual in float wrongly to a
    convolution in int8 without a bias (seen with 2026.4), one in int8 rightly, so that such sums are quantised too."""
    if node.get_type_name() != "Add" or _is_bias(node):
        return False
    names, kinds = zip(*((one.friendly_name, one.get_type_name()) for one in _inputs(node)), strict=True)
    return not chosen.isdisjoint(names) and not set(CONVOLUTIONS).isdisjoint(kinds)


def _grid(node: Any) -> tuple[Any, ...] | None:
    """Lowest and highest value before and after rounding, and the number of steps, of what a layer in int8 reads."""
    before = node.input_value(0).get_node()
    while before.get_type_name() != "FakeQuantize":  # further up if only moved since
        if len(before.inputs()) == 0 or before.get_type_name() in PRODUCTS:
            return None
        before = before.input_value(0).get_node()
    return *(before.input_value(place).get_node().data for place in range(1, 5)), before.get_levels()
