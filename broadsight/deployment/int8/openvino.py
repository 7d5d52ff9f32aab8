"""OpenVINO in int8: post-training quantisation by NNCF."""

import contextlib
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.export import ExportedProgram

from ...files import move_together
from .. import signal_stack
from ..description import KEY, Description
from ..formats.openvino import save
from .layers import COMPUTED, ENDLESS, FACTOR, FEW, SHALLOW, Images, unique_names

CONVOLUTIONS = ("Convolution", "GroupConvolution")
PRODUCTS = (*CONVOLUTIONS, "MatMul")
WITHIN = ("Relu", "Clamp")  # part of the convolution before them
OPERATIONS = {"convolution": "conv2d", "bmm": "matmul", "mm": "matmul", "addmm": "linear"}  # by the names torch gives


def quantise(source: Path, target: Path, calibration: Images, keep_float: Sequence[str] = ()) -> None:
    """Write a float .xml of ours (and the .bin beside it) in int8, with its description, for one image at a time.

    Args:
        calibration: Normalised images (N, C, H, W) of the kind that the model will see.
        keep_float: Names of layers that stay as they are; see `CalibratedOpenVINO.layers`.
    """
    CalibratedOpenVINO(source, calibration).write(target, keep_float)


class CalibratedOpenVINO:
    """A float .xml of ours with images to calibrate it: `int8_layers.Calibrated`.

    NNCF would quantise whatever can be, and correct biases. Measured on trained models, answers stay several times
    as close, in the same time, if nothing but convolutions and products with weights is quantised, from the smallest to
    the largest value seen, and biases are left alone.

    Args:
        calibration: Normalised images (N, C, H, W).
        threads: Of `alone`; None leaves it to OpenVINO.
    """

    layers: tuple[str, ...]
    passed_over: Mapping[str, str]

    def __init__(self, source: Path, calibration: Images, threads: int | None = None):
        import openvino

        if not len(calibration):
            raise ValueError("no images to calibrate with; expected at least one")
        self.calibration, self.threads = calibration, threads
        self._core = openvino.Core()
        self._float: Any = self._core.read_model(str(source))
        self._description = narrow(self._float)
        self._whole: Any = None  # with all layers in int8, once it is needed
        products = _products(self._float)
        endless = self._endless(products)
        obstacles: dict[str, str] = {}
        for node in products:
            if obstacle := ENDLESS if node.friendly_name in endless else _obstacle(node, obstacles):
                obstacles[node.friendly_name] = obstacle
        # As `name_layers` has named them, or else as OpenVINO has, which adds its own operators behind torch's
        names = unique_names([("", node.friendly_name.partition("/")[0]) for node in products])
        named = [(name, node.friendly_name) for name, node in zip(names, products, strict=True)]
        self._nodes = {name: node for name, node in named if node not in obstacles}
        self.layers = tuple(self._nodes)
        self.passed_over = {name: obstacles[node] for name, node in named if node in obstacles}

    def write(self, target: Path, keep_float: Sequence[str] = ()) -> None:
        kept = set(keep_float)
        model = self._quantised([name for name in self.layers if name not in kept])
        save(model, self._description, target)

    def alone(self, layer: str) -> Callable[[np.ndarray], np.ndarray]:
        from openvino import opset13

        if self._whole is None:
            self._whole = self._quantised(self.layers)
        name = self._nodes[layer]
        rounded, model = _by_name(self._whole)[name], self._float.clone()
        node = _by_name(model)[name]
        values = node.input_value(0)
        if (grid := _grid(rounded)) is not None:
            node.input(0).replace_source_output(opset13.fake_quantize(values, *grid).output(0))
        weights = self._constant(rounded.input_value(1))
        node.input(1).replace_source_output(opset13.constant(weights).output(0))
        request = self._compiled(model).create_infer_request()
        return lambda images: np.concatenate([np.array(request.infer({0: image[None]})[0]) for image in images])

    def _quantised(self, layers: Sequence[str]) -> Any:
        """The model as an `openvino.Model` with these layers in int8."""
        if not layers:
            raise ValueError("no layer is left to be int8; keep fewer in float")
        with _quietly(), signal_stack.kept():
            import nncf
            from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters
            from nncf.quantization.range_estimator import RangeEstimatorParametersSet

            chosen = {self._nodes[name] for name in layers}
            ignored = [
                node.friendly_name
                for node in self._float.get_ops()
                if node.friendly_name not in chosen
                and node.get_type_name() not in ("Constant", "Parameter", "Result", "Convert", *WITHIN)
                and not _miscomputed(node, chosen)
            ]
            return nncf.quantize(
                self._float,
                nncf.Dataset(range(len(self.calibration)), lambda place: self.calibration[place : place + 1]),
                preset=nncf.QuantizationPreset.MIXED,
                subset_size=len(self.calibration),
                ignored_scope=nncf.IgnoredScope(names=ignored, validate=False),
                advanced_parameters=AdvancedQuantizationParameters(
                    disable_bias_correction=True,
                    activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX,
                ),
            )

    def _endless(self, products: Sequence[Any]) -> set[str]:
        """Names of products that meet values that are not finite, such as masks of attention; one image tells."""
        from openvino import opset13

        model = self._float.clone()
        nodes = _by_name(model)
        for node in products:
            model.add_results([opset13.result(nodes[node.friendly_name].input_value(0))])
        outputs = len(self._float.outputs)
        found = self._compiled(model).create_infer_request().infer({0: self.calibration[:1]})
        return {
            node.friendly_name for place, node in enumerate(products) if not np.isfinite(found[outputs + place]).all()
        }

    def _constant(self, output: Any) -> np.ndarray:
        """What constants come to."""
        import openvino
        from openvino import opset13

        results: Any = [opset13.result(output)]
        kind: Any = openvino.Model  # its many constructors are more than a type checker follows
        return np.array(self._compiled(kind(results, [], "constant")).create_infer_request().infer({})[0])

    def _compiled(self, model: Any) -> Any:
        hints: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if self.threads is not None:
            hints["INFERENCE_NUM_THREADS"] = self.threads
        with signal_stack.kept():
            return self._core.compile_model(model, "CPU", hints)


def narrow(model: Any) -> Description:
    """Narrow a model to one image at a time, in place; what it says of itself then. One for any size stays as it is.

    In int8 OpenVINO 2026.4 adds wrongly, does not compile or answers with nothing where the number of images is open.
    """
    found = Description.from_json(model.get_rt_info(KEY).astype(str))
    if found.image["any_size"]:
        return found
    model.reshape([1, *found.shape])
    return replace(found, image={**found.image, "any_batch": False})


def name_layers(path: Path, program: ExportedProgram) -> None:
    """Give the convolutions and products in an .xml file the names that they have in the model.

    Args:
        program: What the file was made of.
    """
    import openvino

    model: Any = openvino.Core().read_model(str(path))
    products = _products(model)
    origins, weights = _origins(program), _weights(program)
    places = []
    for node in products:
        name = node.friendly_name.partition("/")[0]
        module, operation = origins.get(name, ("", name))
        places.append((module if module in weights else _owner(node, weights) or module, operation))
    for node, name in zip(products, unique_names(places), strict=True):
        node.set_friendly_name(name)
    _replace(path, model, Description.from_json(model.get_rt_info(KEY).astype(str)))


def describe(path: Path, description: Description) -> None:
    """Replace what a file says of itself."""
    import openvino

    _replace(path, openvino.Core().read_model(str(path)), description)


def _replace(path: Path, model: Any, description: Description) -> None:
    """Write over the file that a model was read from, whose weights are still mapped from there."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        save(model, description, Path(folder) / path.name)
        move_together(Path(folder) / path.name, path, (path.suffix, ".bin"))


def _origins(program: ExportedProgram) -> dict[str, tuple[str, str]]:
    """By the names that OpenVINO gives to its nodes the module that each is in, and what it does there."""
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    with _quietly():
        graph: Any = TorchFXPythonDecoder.from_exported_program(program).pt_module.graph
    found = {}
    for node in graph.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        if node.op == "call_function" and stack and isinstance(stack[-1][0], str):
            operation = re.sub(r"_\d+$", "", node.name)
            found[node.name] = stack[-1][0], OPERATIONS.get(operation, operation)
    return found


def _weights(program: ExportedProgram) -> dict[str, np.ndarray]:
    """By module the directions of its filters: each a row of length 1, or 0 if it does nothing."""
    named = (
        (name.removesuffix(".weight"), one) for name, one in program.state_dict.items() if name.endswith(".weight")
    )
    return {name: _directions(one.detach().float().numpy(), len(one)) for name, one in named if one.ndim > 1}


def _owner(node: Any, weights: Mapping[str, np.ndarray]) -> str:
    """Whose filters a product has; folding a normalisation into it scales them and loses its name."""
    constant = node.input_value(1).get_node()
    if constant.get_type_name() != "Constant":
        return ""
    shape = tuple(constant.get_output_shape(0))
    mine = _directions(constant.data, shape[0] * shape[1] if node.get_type_name() == "GroupConvolution" else shape[0])
    lengths = np.linalg.norm(mine, axis=1)
    for name, one in weights.items():
        if one.shape == mine.shape and lengths.any() and np.abs(np.abs((one * mine).sum(1)) - lengths).max() < 1e-3:
            return name
    return ""


def _directions(filters: np.ndarray, rows: int) -> np.ndarray:
    flat = filters.reshape(rows, -1)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)


def _products(model: Any) -> list[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() in PRODUCTS]


def _by_name(model: Any) -> dict[str, Any]:
    return {node.friendly_name: node for node in model.get_ops()}


def _obstacle(node: Any, obstacles: Mapping[str, str]) -> str:
    """Why a product is no good in int8; empty if it is.

    Args:
        obstacles: Those of the nodes before it, by their names.
    """
    weight = node.input_value(1).get_node()
    if weight.get_type_name() != "Constant":
        return COMPUTED
    if node.get_type_name() in CONVOLUTIONS:
        channels = weight.get_output_shape(0)[2 if node.get_type_name() == "GroupConvolution" else 1]
        # Between two that are int8 it would have to be converted to float and back.
        before = _convolution(node.input_value(0).get_node(), WITHIN)
        if channels < FEW and (before is None or before.friendly_name in obstacles):
            return SHALLOW
        if _is_factor(node):
            return FACTOR
    return ""


def _is_factor(node: Any) -> bool:
    """Whether what a convolution gives is multiplied as it is, images and channels in one dimension, by activations.

    In int8 OpenVINO cannot compile that for any number of images: it reshapes the steps of the channels like the maps.
    """
    readers = [one.get_node() for one in node.output(0).get_target_inputs()]
    return any(
        one.get_type_name() == "MatMul" or (one.get_type_name() in ("Broadcast", "Reshape") and _is_factor(one))
        for one in readers
    )


def _convolution(node: Any, within: Sequence[str] = ()) -> Any | None:
    """The convolution that a node is, or is the bias or the activation of."""
    while node.get_type_name() in within or _is_bias(node):
        sources = [node.input_value(place).get_node() for place in range(len(node.inputs()))]
        node = next((one for one in sources if one.get_type_name() != "Constant"), sources[0])
    return node if node.get_type_name() in CONVOLUTIONS else None


def _is_bias(node: Any) -> bool:
    return node.get_type_name() == "Add" and any(
        node.input_value(place).get_node().get_type_name() == "Constant" for place in (0, 1)
    )


def _miscomputed(node: Any, chosen: set[str]) -> bool:
    """Whether OpenVINO would get a sum wrong.

    For any number of images it adds a residual in float wrongly to a convolution in int8 that has no bias (seen with
    2026.4); a residual in int8 it adds rightly, so that such sums are quantised too.
    """
    if node.get_type_name() != "Add" or _is_bias(node):
        return False
    return any(node.input_value(place).get_node().friendly_name in chosen for place in (0, 1)) and any(
        node.input_value(place).get_node().get_type_name() in CONVOLUTIONS for place in (0, 1)
    )


def _grid(node: Any) -> tuple[Any, ...] | None:
    """Lowest and highest value before and after rounding, and the number of steps, of what a layer in int8 reads."""
    before = node.input_value(0).get_node()
    while before.get_type_name() != "FakeQuantize":  # further up if only moved since
        if len(before.inputs()) == 0 or before.get_type_name() in PRODUCTS:
            return None
        before = before.input_value(0).get_node()
    return *(before.input_value(place).get_node().data for place in range(1, 5)), before.get_levels()


@contextmanager
def _quietly() -> Generator[None, None, None]:
    """NNCF draws bars, and all remark on what a user cannot change."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
