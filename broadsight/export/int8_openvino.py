"""OpenVINO in int8: post-training quantisation by NNCF."""

import contextlib
import io
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch.export import ExportedProgram

from .description import KEY, Description
from .int8_layers import COMPUTED, ENDLESS, FEW, SHALLOW, unique_names
from .openvino_format import save

PRODUCTS = ("Convolution", "GroupConvolution", "MatMul")
CONVOLUTIONS = PRODUCTS[:2]
WITHIN = ("Relu", "Clamp")  # part of the convolution before them
OPERATIONS = {"convolution": "conv2d", "bmm": "matmul", "mm": "matmul", "addmm": "linear"}  # as torch calls them


def quantise(source: Path, target: Path, calibration: np.ndarray, keep_float: Sequence[str] = ()) -> None:
    """Write a float .xml of ours (and the .bin beside it) in int8; it keeps its description.

    Args:
        calibration: Normalised images (N, C, H, W) of the kind that the network will see.
        keep_float: Names of layers that stay as they are; see `CalibratedOpenVINO.layers`.
    """
    CalibratedOpenVINO(source, calibration).write(target, keep_float)


class CalibratedOpenVINO:
    """A float .xml of ours with images to calibrate it: `int8_layers.Calibrated`.

    NNCF would quantise whatever can be, and correct biases. Measured on trained networks, answers stay several times
    as close, in the same time, if only convolutions and products with weights are quantised, by the smallest and
    largest value seen, and biases are left alone.

    Args:
        calibration: Normalised images (N, C, H, W).
        threads: Of `alone`; None leaves it to OpenVINO.
    """

    layers: tuple[str, ...]
    passed_over: Mapping[str, str]

    def __init__(self, source: Path, calibration: np.ndarray, threads: int | None = None):
        import openvino

        if not len(calibration):
            raise ValueError("no images to calibrate with; expected at least one")
        self.calibration, self.threads = calibration, threads
        self._core = openvino.Core()
        self._float: Any = self._core.read_model(str(source))
        self._whole: Any = None  # with all layers in int8, for `alone`
        products = [node for node in self._float.get_ordered_ops() if node.get_type_name() in PRODUCTS]
        names = unique_names([_place(node) for node in products])
        obstacles: dict[str, str] = {}
        for node in products:
            if obstacle := _obstacle(node, obstacles):
                obstacles[node.friendly_name] = obstacle
        named = [(name, node.friendly_name) for name, node in zip(names, products, strict=True)]
        self._nodes = {name: node for name, node in named if node not in obstacles}
        self.layers = tuple(self._nodes)
        self.passed_over = {name: obstacles[node] for name, node in named if node in obstacles}
