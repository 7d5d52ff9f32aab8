"""A classifier that is quick and notices every pixel, the page of it, and where the browser's runtime is."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from broadsight.data.loading import Transforms
from broadsight.data.normalising import Normalise, per_channel
from broadsight.deployment import FORMATS, Description
from broadsight.deployment.formats import web as web_format
from broadsight.runs.classifier import Classifier
from tests.deployment.tiny import described, preprocessing

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Mosaic(nn.Module):
    """(B, C, S, S) -> (B, 6): every place of the image has weights of its own, so that turning it is noticed."""

    num_classes = 6

    def __init__(self, channels: int, size: int):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(channels, 8, 8, stride=8)
        self.head = nn.Linear(8 * (size // 8) ** 2, 6)
        with torch.no_grad():
            self.head.weight *= 8  # random weights alone would find all classes equally likely

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().flatten(1))


def mosaic(channels: int = 3, size: int = 64, interpolation: str = "bicubic", crop_pct: float = 0.875) -> Classifier:
    mean, std = per_channel(MEAN, channels), per_channel(STD, channels)
    transforms = Transforms(size, channels, mean, std, interpolation, crop_pct)
    model = Mosaic(channels, size).eval().requires_grad_(False)
    names = ("ant", "bée", "<b>cat</b>", "dog 'n' \"duck\"", "</script>", "line\u2028separator")
    return Classifier("mosaic", "mosaic", model, transforms, names, Normalise(mean, std), {})


def describe(classifier: Classifier, **changes) -> Description:
    seen = classifier.transforms
    values = dict(title=classifier.title, source=classifier.source, classes=classifier.labels, channels=seen.channels)
    about = {"parameters": classifier.parameters, "versions": {"torch": "2.x"}, "commit": None}
    values |= dict(preprocessing=preprocessing(seen), provenance=about)
    return described(seen.size, **(values | changes))


def onnx_file(classifier: Classifier, path: Path) -> Path:
    """A mosaic as ONNX, written by hand: exporting it would take longer than everything that is tested with it."""
    onnx = pytest.importorskip("onnx")
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    weights = [numpy_helper.from_array(value.numpy(), name) for name, value in classifier.model.state_dict().items()]
    nodes = [
        helper.make_node("Conv", ["images", "conv.weight", "conv.bias"], ["a"], kernel_shape=[8, 8], strides=[8, 8]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Flatten", ["b"], ["c"]),
        helper.make_node("Gemm", ["c", "head.weight", "head.bias"], ["logits"], transB=1),
    ]
    size, number = classifier.transforms.size, onnx.TensorProto.FLOAT
    images = helper.make_tensor_value_info("images", number, ["batch", classifier.transforms.channels, size, size])
    logits = helper.make_tensor_value_info("logits", number, ["batch", 6])
    graph = helper.make_graph(nodes, "mosaic", [images], [logits], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def in_int8(path: Path, shape: tuple[int, int, int]) -> Path:
    """The same with weights and activations of 8 bits, by ONNX Runtime."""
    quantization = pytest.importorskip("onnxruntime.quantization")

    class Images(quantization.CalibrationDataReader):
        given = iter(np.random.default_rng(0).standard_normal((4, 2, *shape)).astype(np.float32))

        def get_next(self):
            images = next(self.given, None)
            return None if images is None else {"images": images}

    small = path.with_name("int8.onnx")
    quantization.quantize_static(path, small, Images(), per_channel=True)
    return small


def found_runtime(patience: int = 15) -> Path:
    """The runtime that somebody named or has fetched before, else by npm within seconds; or the test is skipped."""
    named = os.environ.get("BROADSIGHT_ORT_WEB")
    kept = Path.home() / ".cache" / "broadsight" / f"{web_format.PACKAGE}-{web_format.VERSION}"
    if named or kept.is_dir():
        return web_format.find_runtime(named or kept)
    found = _fetched(patience)
    if isinstance(found, str):
        pytest.skip(f"{found}; here the variable BROADSIGHT_ORT_WEB takes that folder")
    return found


@cache
def _fetched(patience: int) -> Path | str:
    """The runtime, asked for once in a process, or why there is none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web_format, "PATIENCE", patience)
        patch.setenv("npm_config_fetch_retries", "0")  # offline it would try for minutes
        try:
            return web_format.find_runtime()
        except ValueError as error:
            return str(error)


def plain_session(folder: Path) -> Any:
    """A page's model in ONNX Runtime, step by step: its fused kernels for 8 bits overflow on older processors."""
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(web_format.model_bytes(folder), options, providers=["CPUExecutionProvider"])


def page(folder: Path, classifier: Classifier, runtime: Path, *, int8: bool = False, **changes) -> Path:
    """The folder of a mosaic's page."""
    file, description = onnx_file(classifier, folder.parent / f"{folder.name}.onnx"), describe(classifier, **changes)
    file = in_int8(file, description.shape) if int8 else file
    FORMATS["web"].write(file, description, folder, ort_web=runtime)
    return folder
