"""OpenVINO: an .xml file with its weights in the .bin beside it."""

import operator
import re
import tempfile
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from torch.export import ExportedProgram

from ...files import move_together
from ...inspection.precision import DTYPES
from ..quiet import kept_signal_stack, quiet
from ..session import KEY, Description, Session
from . import Format, described, register
from .onnx import INPUT
from .openvino_kernels import choose_kernels

MANY = 2**22  # tokens, more than any map has; twice as many are still exact in float32, in which OpenVINO divides
LARGEST = 2**28  # bytes of the .xml file; weights are in the other one
DECLARED = re.compile(rb"<\?xml[^>]*encoding\s*=\s*[\"'](?!utf-8[\"'])", re.IGNORECASE)
MULTIPLYING, FLOATS = ("Convolution", "FullyConnected", "MatMul"), {"f32", "bf16", "f16"}  # of the graph that runs
OPSETS = re.compile(r"opset\d{1,3}")


@register
class OpenVINO(Format):
    name, files, runtime = "openvino", (".xml", ".bin"), "OpenVINO"
    packages, extra = ("openvino",), "openvino"
    int8, int8_packages = "openvino-int8", ("nncf",)
    narrows = chooses = True

    @property
    def precisions(self) -> tuple[str, ...]:  # ty: ignore[incompatible-property-override]
        import openvino

        capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        return tuple(name for name in DTYPES if name == "fp32" or name.upper() in capabilities)

    def write(self, program: ExportedProgram, description: Description, path: Path) -> None:
        import openvino

        with quiet():
            model: Any = openvino.convert_model(plain_sizes(program))
        for port, name in [(model.inputs[0], INPUT), *zip(model.outputs, description.outputs, strict=True)]:
            port.get_tensor().set_names({name})
        if not description.image["any_size"]:
            # The converter leaves sides open. For one image OpenVINO fuses more so than of what torch captures for one.
            model.reshape([-1 if description.image["any_batch"] else 1, *description.shape])
            choose_kernels(model)
        save(model, description, path)

    def load(self, path: Path, threads: int | None, precision: str | None = None) -> Session:
        """In the precision asked for where it is float; some processors would compute in bfloat16 unasked."""
        import openvino

        check_openvino(path)
        core = openvino.Core()
        model = core.read_model(str(path))
        description = description_of(model)
        precision = self.precision(precision or description.precision)
        single, how = for_one_image(model, description), (threads, precision)
        several = cache(lambda: compiled(core, model, *how).create_infer_request())  # as long again: if asked for
        one = several() if single is None else compiled(core, single, *how).create_infer_request()

        def run(images: np.ndarray) -> list[np.ndarray]:
            found = (one if len(images) == 1 else several()).infer({0: images}, share_inputs=True)
            return [np.array(found[place]) for place in range(len(description.outputs))]

        return Session(description, run, precision)

    def calibrated(self, source: Path, calibration: Any, threads: int | None = None) -> Any:
        from ..int8.openvino import CalibratedOpenVINO

        return CalibratedOpenVINO(source, calibration, threads)

    def describe(self, path: Path, description: Description) -> None:
        import openvino

        save_over(path, openvino.Core().read_model(str(path)), description)


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
    """Write an `openvino.Model` with weights in float32, its description among the run-time information."""
    import openvino

    model.set_rt_info(description.to_json(), KEY)
    openvino.save_model(model, str(path), compress_to_fp16=False)


def save_over(path: Path, model: Any, description: Description) -> None:
    """Write over the file that a model was read from, whose weights are still mapped from there."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        save(model, description, Path(folder) / path.name)
        move_together(Path(folder) / path.name, path, OpenVINO.files)


def description_of(model: Any) -> Description:
    """What an `openvino.Model` of ours says of itself."""
    return described({KEY: model.get_rt_info(KEY).astype(str)} if model.has_rt_info(KEY) else {})


def compiled(core: Any, model: Any, threads: int | None, precision: str = "fp32") -> Any:
    """An `openvino.Model` ready to run on the CPU; a ValueError if it computes in another precision than is asked for,
    which OpenVINO itself says nothing about."""
    hint = precision.replace("p", "")
    hints: dict[str, Any] = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
    if threads is not None:
        hints["INFERENCE_NUM_THREADS"] = threads
    with kept_signal_stack():
        found = core.compile_model(model, "CPU", hints)
    taken = found.get_property("INFERENCE_PRECISION_HINT").to_string()
    nodes = [node.get_rt_info() for node in found.get_runtime_model().get_ops()] if precision != "fp32" else []
    ran = {one["runtimePrecision"].astype(str) for one in nodes if one["layerType"].astype(str) in MULTIPLYING}
    if taken != hint or (ran & FLOATS and hint not in ran):
        raise ValueError(f"OpenVINO computes in {' and '.join(sorted(ran) or [taken])} on this CPU, not in {precision}")
    return found


def for_one_image(model: Any, description: Description) -> Any | None:
    """A copy of a model for any number of images, for one alone; None where other lengths stay open: OpenVINO fuses
    attention, norms and chains of small operations only where all lengths are known."""
    if not description.image["any_batch"] or description.image["any_size"]:
        return None
    single = model.clone()
    single.reshape([1, *description.shape])
    return single


def check_openvino(path: Path) -> None:
    """Refuse an .xml file that is no model, refers to others, or needs an extension; its weights lie beside it."""
    size = path.stat().st_size
    if size > LARGEST:
        raise ValueError(f"it has {size:,} bytes; expected {LARGEST:,} at most")
    content = path.read_bytes()
    try:
        content.decode("utf-8")
        # Entities may name files, and grow; other encodings could hide them. OpenVINO writes neither.
        if b"<!" in content or DECLARED.search(content):
            raise ValueError("it declares entities or another encoding; expected a plain model")
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no XML ({str(error).splitlines()[0]})") from None
    if root.tag != "net":
        raise ValueError(f"it describes a <{root.tag[:40]}>, not a <net>")
    weights = path.with_suffix(".bin")
    if weights.is_symlink() or not weights.is_file():
        raise ValueError(f"there is no {weights.name} beside it, a plain file of weights")
    stored = weights.stat().st_size
    for layer in root.iter("layer"):
        name, version, data = str(layer.get("name"))[:60], layer.get("version") or "", layer.find("data")
        if not OPSETS.fullmatch(version):
            raise ValueError(f"its layer {name!r} needs {version[:60]!r}; expected an opset")
        if layer.get("type") != "Const" or data is None:
            continue
        offset, size = data.get("offset", ""), data.get("size", "")
        if not all(re.fullmatch(r"-?\d{1,18}", number) for number in (offset, size)):
            raise ValueError(f"its tensor {name!r} does not say where it lies")
        if not 0 <= int(offset) <= int(offset) + int(size) <= stored:
            raise ValueError(f"its tensor {name!r} lies beyond the {stored:,} bytes of its weights")
