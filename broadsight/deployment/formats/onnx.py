"""ONNX: one file, opset 20, run by ONNX Runtime."""

import contextlib
import io
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch.export import ExportedProgram

from ..description import KEY, Description
from ..session import Session
from .onnx_inside import check_onnx
from .onnx_products import add_bias_within

OPSET = 20
INPUT = "images"


def write(program: ExportedProgram, description: Description, path: Path) -> None:
    """A program as one ONNX file, which holds its weights and its description."""
    import onnx

    model = to_onnx(program, description.outputs)
    onnx.helper.set_model_props(model, {KEY: description.to_json(), **_plain(description)})
    model.doc_string = f"{description.title}, exported by broadsight"
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


def to_onnx(program: ExportedProgram, outputs: Sequence[str]) -> Any:
    """A program as an `onnx.ModelProto`."""
    import torch

    with _quietly():
        exported: Any = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=list(outputs),
            verbose=False,
        )
    model = exported.model_proto
    add_bias_within(model)
    return model


def open(path: Path, threads: int | None = None) -> Session:
    """An ONNX file of ours in ONNX Runtime, on the CPU. What is inside is looked at first; see `onnx_inside`.

    Args:
        threads: Of its operators; None leaves it to ONNX Runtime.

    Raises:
        ValueError: It refers to other files or foreign operators, or is not a file of ours.
    """
    import onnxruntime

    content = path.read_bytes()
    try:
        check_onnx(content)
    except ValueError as error:
        raise ValueError(f"{path} cannot be opened: {error}") from None

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    try:
        session: Any = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{path} cannot be opened by ONNX Runtime: {lines[0]}") from None
    kept = session.get_modelmeta().custom_metadata_map
    if KEY not in kept:
        raise ValueError(f"{path} does not say what it is; expected a file that `broadsight export` wrote")
    description = Description.from_json(kept[KEY])
    outputs = list(description.outputs)

    def run(images: np.ndarray) -> list[np.ndarray]:
        return session.run(outputs, {INPUT: images})

    return Session(description, run)


def describe(path: Path, description: Description) -> None:
    """Replace what a file says of itself."""
    import onnx

    model = onnx.load(path)
    onnx.helper.set_model_props(model, {KEY: description.to_json(), **_plain(description)})
    path.write_bytes(model.SerializeToString())


def _plain(description: Description) -> dict[str, str]:
    """For viewers of ONNX files and other programs, which do not know our JSON."""
    found = {"task": description.task, "title": description.title}
    if description.classes:
        found["classes"] = "\n".join(description.classes)
    return found


@contextmanager
def _quietly() -> Generator[None, None, None]:
    """The exporter prints its progress and warns of its own parts."""
    import warnings

    names = ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")
    before = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
