"""Products get their bias where they are multiplied; files that refer to others are refused before they are opened."""

import numpy as np
import pytest
import torch
from torch import nn

from broadsight.deployment import capture, open_artefact
from broadsight.deployment.formats.onnx import add_bias_within, session_of, to_onnx
from broadsight.deployment.session import KEY
from tests.deployment.tiny import described
from tests.refusals import refused

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
SIDE = 4


def model(nodes=(), tensors=(), **changes):
    """Images (1, 3, 4, 4) -> (1, 3, 4, 4), each plus one."""
    helper, number, shape = onnx.helper, onnx.TensorProto.FLOAT, [1, 3, SIDE, SIDE]
    one = helper.make_tensor("one", number, [1], [1.0])
    images, logits = (helper.make_tensor_value_info(name, number, shape) for name in ("images", "logits"))
    add = helper.make_node("Add", ["images", "one"], ["logits"])
    graph = helper.make_graph([*nodes, add], "g", [images], [logits], [one, *tensors])
    found = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10, **changes)
    helper.set_model_props(found, {KEY: described(SIDE, any_batch=False).to_json()})
    return found


def opened(path, given):
    path.write_bytes(given.SerializeToString())
    return open_artefact(path)


def elsewhere(place, name="w"):
    tensor = onnx.TensorProto(name=name, data_type=1, dims=[2], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in dict(location=str(place), offset="0", length="8").items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def test_sound__opens_with_functions_of_its_own(tmp_path):
    body = onnx.helper.make_node("Identity", ["a"], ["b"])
    function = onnx.helper.make_function("own", "f", ["a"], ["b"], [body], [onnx.helper.make_opsetid("", 20)])
    own = model([onnx.helper.make_node("f", ["images"], ["c"], domain="own")], functions=[function])
    own.opset_import.add(domain="own", version=1)
    for given in (model(), own):
        found = opened(tmp_path / "net.onnx", given)(np.zeros((1, 3, SIDE, SIDE), np.float32))
        assert np.array_equal(found["logits"], np.ones((1, 3, SIDE, SIDE)))


@pytest.mark.parametrize("place", ["beside.bin", "../above.bin", "/etc/passwd", "link.bin", "*/_ORT_MEM_ADDR_/*", ""])
def test_external_data__is_refused_wherever_it_is(tmp_path, place):
    for name in ("beside.bin", "above.bin"):
        (tmp_path / name).write_bytes(bytes(8))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "link.bin").symlink_to(tmp_path / "above.bin")
    inner = onnx.helper.make_graph([], "inner", [], [], [elsewhere(place)])
    held = onnx.helper.make_node("Constant", [], ["c"], value=elsewhere(place))
    loop = onnx.helper.make_node("If", ["one"], ["c"], then_branch=inner, else_branch=inner)
    function = onnx.helper.make_function("own", "f", [], ["c"], [held], [onnx.helper.make_opsetid("", 20)])
    words = r"net\.onnx cannot be opened: its tensor 'w' lies in another file"
    for given in (model(tensors=[elsewhere(place)]), model([held]), model([loop]), model(functions=[function])):
        refused(words, opened, tmp_path / "sub" / "net.onnx", given)


def test_foreign_operators_and_options(tmp_path):
    path = tmp_path / "net.onnx"
    for domain, kind in (("stranger", "Op"), ("com.microsoft", "EPContext")):
        node = onnx.helper.make_node(kind, ["images"], ["c"], domain=domain)
        refused(rf"it calls '{domain}\.{kind}'", opened, path, model([node]))
    given = model()
    given.metadata_props.add(key="ort_config", value="{}")
    refused("sets options of ONNX Runtime", opened, path, given)
    for content in (b"", b"not a model", b"\x00" * 100):
        path.write_bytes(content)
        refused(r"net\.onnx cannot be opened: it is no ONNX file", open_artefact, path)


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


def check(model, module, x: torch.Tensor) -> None:
    found = session_of(model.SerializeToString()).run(None, {"images": x.numpy()})[0]
    np.testing.assert_allclose(found, module(x).detach(), atol=1e-6)


def test_add_bias_within__of_stacks_of_rows_alone():
    module = Linears().eval()
    model = to_onnx(capture(module, (6, 4, 3)), ["y"])
    onnx.checker.check_model(model, full_check=True)
    # The one of rows and the one of a matrix; what somebody else reads too stays a product, like that without a bias.
    assert operations(model) == {"MatMul": 2, "Gemm": 2, "Add": 1}
    for batch in (1, 3):
        check(model, module, torch.randn(batch, 6, 4, 3))
    gemm = next(node for node in model.graph.node if node.op_type == "Gemm")
    assert any("biased" in one.value for one in gemm.metadata_props)  # still says which layer it is

    before = model.SerializeToString()
    add_bias_within(model)
    assert model.SerializeToString() == before  # twice is once
    # Two open axes are left as they are
    model = to_onnx(capture(module, (6, 96, 64), any_size=True), ["y"])
    assert operations(model)["Gemm"] == 1  # that of a matrix, by the exporter
    check(model, module, torch.randn(2, 6, 70, 99))
