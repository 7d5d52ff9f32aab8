"""OpenVINO: an .xml file with its weights in the .bin beside it."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from torch.export import ExportedProgram

from .description import KEY, Description
from .onnx_format import INPUT
from .session import Session


def write(program: ExportedProgram, description: Description, path: Path) -> None:
    """A program as OpenVINO's .xml and .bin, weights in float32, its description among the run-time information."""
    import openvino

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = openvino.convert_model(program)
    for port, name in [(model.inputs[0], INPUT), *zip(model.outputs, description.outputs, strict=True)]:
        port.get_tensor().set_names({name})
    save(model, description, path)


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
    request = core.compile_model(model, "CPU", hints).create_infer_request()

    def run(images: np.ndarray) -> list[np.ndarray]:
        found = request.infer({0: images}, share_inputs=True)
        return [np.array(found[place]) for place in range(len(description.outputs))]

    return Session(description, run)
