"""Products get their bias where they are multiplied, and nothing else changes."""

import numpy as np
import pytest
import torch
from torch import nn

from broadsight.deployment import capture
from broadsight.deployment.formats.onnx import to_onnx
from broadsight.deployment.formats.onnx_products import add_bias_within

pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


class Linears(nn.Module):
    """Rows with and without bias, one that is used twice, and one of a matrix."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.biased, self.bare, self.twice = nn.Linear(6, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 6)
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        x = self.biased(x.permute(0, 2, 3, 1))  # B H W 5
        x = self.bare(x)
        product = x @ self.twice.weight.mT
        x = (product + self.twice.bias) * product
        return self.last(x.mean((1, 2)))


def operations(model) -> dict[str, int]:
    names = [node.op_type for node in model.graph.node]
    return {name: names.count(name) for name in ("MatMul", "Gemm", "Add")}


def test_add_bias_within__of_stacks_of_rows_alone():
    module = Linears().eval()
    model = to_onnx(capture(module, (6, 4, 3)), ["y"])
    onnx.checker.check_model(model, full_check=True)
    # The one of rows and the one of a matrix; what somebody else reads too stays a product, like that without a bias.
    assert operations(model) == {"MatMul": 2, "Gemm": 2, "Add": 1}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        x = torch.randn(batch, 6, 4, 3)
        np.testing.assert_allclose(session.run(None, {"images": x.numpy()})[0], module(x).detach(), atol=1e-6)
    gemm = next(node for node in model.graph.node if node.op_type == "Gemm")
    assert any("biased" in one.value for one in gemm.metadata_props)  # still says which layer it is


def test_add_bias_within__twice_is_once():
    model = to_onnx(capture(Linears().eval(), (6, 4, 3)), ["y"])
    before = model.SerializeToString()
    assert add_bias_within(model) == 0 and model.SerializeToString() == before


def test_add_bias_within__leaves_two_open_axes():
    model = to_onnx(capture(Linears().eval(), (6, 96, 64), any_size=True), ["y"])
    assert operations(model)["Gemm"] == 1  # that of a matrix, by the exporter
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x, module = torch.randn(2, 6, 70, 99), Linears().eval()
    np.testing.assert_allclose(session.run(None, {"images": x.numpy()})[0], module(x).detach(), atol=1e-6)
