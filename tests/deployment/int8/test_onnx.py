"""ONNX in int8: what is quantised and what is not, by how much answers change, and that the description stays."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from broadsight.deployment import FORMATS, capture, open_artefact  # noqa: E402
from broadsight.deployment.int8.layers import COMPUTED, ENDLESS, SHALLOW, moved  # noqa: E402
from broadsight.deployment.int8.onnx import CalibratedONNX, _own_biases, quantise  # noqa: E402
from tests.deployment.int8.models import LAYERS, WIDTH, Colours, Odd, colours_described, noise  # noqa: E402


def written(model: nn.Module, path: Path, **changes) -> Path:
    said = colours_described(**changes)
    program = capture(model.eval(), said.shape, any_batch=said.image["any_batch"])
    FORMATS["onnx"].write(program, said, path)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return written(Colours(), tmp_path_factory.mktemp("float") / "colours.onnx")


@pytest.fixture(scope="module")
def calibrated(source) -> CalibratedONNX:
    return CalibratedONNX(source, noise(), threads=1)


def nodes_of(path: Path) -> tuple[dict, dict, dict]:
    """Nodes by name, who makes each tensor, and constants."""
    graph = onnx.load(path).graph
    makers = {name: node for node in graph.node for name in node.output}
    return {node.name: node for node in graph.node}, makers, {one.name: one for one in graph.initializer}


def test_quantise__pairs_of_q_and_dq_around_every_layer(source, tmp_path):
    quantise(source, tmp_path / "small.onnx", noise())
    nodes, makers, constants = nodes_of(tmp_path / "small.onnx")
    for name in LAYERS:
        image, weight = (makers[one] for one in nodes[name].input[:2])
        assert makers[image.input[0]].op_type == "QuantizeLinear" and image.op_type == "DequantizeLinear"
        assert weight.op_type == "DequantizeLinear"
        assert constants[weight.input[0]].data_type == onnx.TensorProto.INT8
        assert constants[image.input[2]].data_type == onnx.TensorProto.UINT8
        assert tuple(constants[weight.input[1]].dims) == ((3,) if name == "fc" else (WIDTH,))  # for each output channel
    assert (tmp_path / "small.onnx").stat().st_size < 0.4 * source.stat().st_size
    session, before = open_artefact(tmp_path / "small.onnx", 1), open_artefact(source, 1)
    assert session.description == before.description
    assert 0 < moved(session(noise(20))["logits"], before(noise(20))["logits"]) < 0.08


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


def test_layers__what_gains_nothing_is_passed_over(calibrated):
    assert calibrated.layers == LAYERS  # dw lies between two that are int8, lone does not
    assert calibrated.passed_over == {"stem": SHALLOW, "lone": SHALLOW}


def test_write__kept_layers_are_float_in_all_they_read(calibrated, source, tmp_path):
    calibrated.write(tmp_path / "kept.onnx", ["conv4", "fc"])
    nodes, makers, constants = nodes_of(tmp_path / "kept.onnx")
    assert constants[nodes["conv4"].input[1]].data_type == onnx.TensorProto.FLOAT
    assert constants[nodes["fc"].input[1]].data_type == onnx.TensorProto.FLOAT
    assert makers[nodes["fc"].input[0]].op_type != "DequantizeLinear"
    assert makers[nodes["conv3"].input[0]].op_type == "DequantizeLinear"
    calibrated.write(tmp_path / "one.onnx", [name for name in LAYERS if name != "conv4"])
    nodes, makers, constants = nodes_of(tmp_path / "one.onnx")
    rounded = makers[makers[nodes["conv4"].input[0]].input[0]]
    (add,) = (node for node in nodes.values() if node.op_type == "Add")
    assert rounded.input[0] in add.input  # the residual connection reads what was not rounded


def test_write__nothing_left_is_refused(calibrated, tmp_path):
    with pytest.raises(ValueError, match="no layer is left"):
        calibrated.write(tmp_path / "none.onnx", LAYERS)
    with pytest.raises(ValueError, match="no images to calibrate with"):
        quantise(tmp_path / "absent.onnx", tmp_path / "none.onnx", noise()[:0])
    assert not list(tmp_path.iterdir())


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


def test_alone__finds_the_layers_that_an_outlier_destroys(source, tmp_path):
    path = written(Colours(outlier=1e5), tmp_path / "hostile.onnx")
    hostile, expected = CalibratedONNX(path, noise(), threads=1), open_artefact(path, 1)(noise())["logits"]
    costs = {name: moved(hostile.alone(name)(noise()), expected) for name in hostile.layers}
    assert sorted(costs, key=lambda name: -costs[name])[:2] == ["conv1", "conv2"]
    assert min(costs["conv1"], costs["conv2"]) > 0.5 > 0.1 > max(costs[name] for name in LAYERS[2:])
    hostile.write(tmp_path / "lost.onnx")
    hostile.write(tmp_path / "kept.onnx", ["conv1", "conv2"])
    lost, kept = (open_artefact(tmp_path / name, 1)(noise())["logits"] for name in ("lost.onnx", "kept.onnx"))
    assert moved(lost, expected) > 0.5 and moved(kept, expected) < 0.1


def test_quantise__weights_of_every_shape_one_image_at_a_time(tmp_path):
    path = written(Odd(), tmp_path / "odd.onnx", any_batch=False)
    calibrated = CalibratedONNX(path, noise())
    assert len(calibrated.layers) == 3 and "head" in calibrated.layers
    assert sorted(calibrated.passed_over.values()) == sorted([COMPUTED, COMPUTED, ENDLESS])
    assert calibrated.passed_over["mix"] == ENDLESS
    calibrated.write(tmp_path / "small.onnx")
    _, _, constants = nodes_of(tmp_path / "small.onnx")
    largest = max(int(np.prod(one.dims)) for one in constants.values() if one.data_type == onnx.TensorProto.FLOAT)
    assert largest <= 16 * 16  # all weights are int8, but for mix
    before, after = (open_artefact(one, 1)(noise(5))["logits"] for one in (path, tmp_path / "small.onnx"))
    assert moved(after, before) < 0.1
