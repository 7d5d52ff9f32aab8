"""ONNX in int8: which nodes are quantised, and which values are read rounded or in float."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from broadsight.deployment import open_artefact  # noqa: E402
from broadsight.deployment.int8.onnx import CalibratedONNX, _own_biases  # noqa: E402
from tests.deployment.int8.models import LAYERS, WIDTH, Colours, noise, written  # noqa: E402


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory) -> CalibratedONNX:
    return CalibratedONNX(written(Colours(), tmp_path_factory.mktemp("float") / "colours.onnx"), noise(), threads=1)


def nodes_of(path: Path) -> tuple[dict, dict, dict]:
    """Nodes by name, who makes each tensor, and constants."""
    graph = onnx.load(path).graph
    makers = {name: node for node in graph.node for name in node.output}
    return {node.name: node for node in graph.node}, makers, {one.name: one for one in graph.initializer}


def test_write__pairs_of_q_and_dq_around_every_layer(calibrated, tmp_path):
    calibrated.write(tmp_path / "small.onnx")
    nodes, makers, constants = nodes_of(tmp_path / "small.onnx")
    for name in LAYERS:
        image, weight = (makers[one] for one in nodes[name].input[:2])
        assert makers[image.input[0]].op_type == "QuantizeLinear" and image.op_type == "DequantizeLinear"
        assert weight.op_type == "DequantizeLinear" and constants[weight.input[0]].data_type == onnx.TensorProto.INT8
        assert constants[image.input[2]].data_type == onnx.TensorProto.UINT8
        assert tuple(constants[weight.input[1]].dims) == ((3,) if name == "fc" else (WIDTH,))  # for each output channel
    # Layers that are kept are float in all that they read.
    calibrated.write(tmp_path / "kept.onnx", ["conv4", "fc"])
    nodes, makers, constants = nodes_of(tmp_path / "kept.onnx")
    assert {constants[nodes[name].input[1]].data_type for name in ("conv4", "fc")} == {onnx.TensorProto.FLOAT}
    assert makers[nodes["fc"].input[0]].op_type != "DequantizeLinear"
    assert makers[nodes["conv3"].input[0]].op_type == "DequantizeLinear"
    calibrated.write(tmp_path / "one.onnx", [name for name in LAYERS if name != "conv4"])
    nodes, makers, constants = nodes_of(tmp_path / "one.onnx")
    rounded = makers[makers[nodes["conv4"].input[0]].input[0]]
    (add,) = (node for node in nodes.values() if node.op_type == "Add")
    assert rounded.input[0] in add.input  # the residual connection reads what was not rounded


@torch.no_grad()
def test_own_biases__layers_that_share_one(tmp_path):
    model = Colours()
    for layer in (model.conv1, model.conv2, model.conv3, model.conv4):
        layer.bias = model.conv1.bias
    model.conv1.bias.copy_(torch.linspace(-0.1, 0.1, WIDTH))
    path = written(model, tmp_path / "shared.onnx")
    before = open_artefact(path, 1)(noise(20))["logits"]
    whole, most = onnx.load(path), []
    for _ in range(2):
        biases = [node.input[2] for node in whole.graph.node if node.op_type == "Conv" and len(node.input) > 2]
        most.append(max(map(biases.count, biases)))
        _own_biases(whole.graph)
    assert most == [4, 1]
    onnx.save(whole, path)
    np.testing.assert_array_equal(open_artefact(path, 1)(noise(20))["logits"], before)


def test_alone__is_what_rounding_by_hand_gives(calibrated):
    model, images = Colours().eval(), noise()
    seen: list[torch.Tensor] = []
    model.fc.register_forward_pre_hook(lambda module, inputs: seen.extend(inputs))
    with torch.no_grad():
        model(torch.from_numpy(images))
        (x,), weight = seen, model.fc.weight
        low, high = float(x.min().clamp(max=0)), float(x.max())
        step, steps = (high - low) / 255, weight.abs().amax(1, keepdim=True) / 127
        zero = round(-low / step)
        x = ((x / step).round() + zero).clamp(0, 255).sub(zero) * step
        expected = F.linear(x, (weight / steps).round() * steps, model.fc.bias)
    np.testing.assert_allclose(calibrated.alone("fc")(images), expected.numpy(), atol=2e-4)
