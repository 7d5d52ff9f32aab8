"""ONNX files that refer to more than themselves: refused before ONNX Runtime sees them."""

import numpy as np
import pytest

from broadsight.deployment import open_artefact
from broadsight.deployment.description import KEY

from ..tiny import described

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
SIDE = 4


def model(nodes=(), tensors=(), **changes):
    """Images (1, 3, 4, 4) -> (1, 3, 4, 4), each plus one."""
    from onnx import TensorProto, helper

    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, SIDE, SIDE]) for name in ("images", "logits")
    ]
    add = helper.make_node("Add", ["images", "one"], ["logits"])
    graph = helper.make_graph([*nodes, add], "g", values[:1], values[1:], [one, *tensors])
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


def test_sound__opens(tmp_path):
    found = opened(tmp_path / "net.onnx", model())(np.zeros((1, 3, SIDE, SIDE), np.float32))
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
    for given in (model(tensors=[elsewhere(place)]), model([held]), model([loop]), model(functions=[function])):
        with pytest.raises(ValueError, match=r"net\.onnx cannot be opened: its tensor 'w' lies in another file"):
            opened(tmp_path / "sub" / "net.onnx", given)


def test_foreign_operators_and_options(tmp_path):
    for domain, kind in (("stranger", "Op"), ("com.microsoft", "EPContext")):
        node = onnx.helper.make_node(kind, ["images"], ["c"], domain=domain)
        with pytest.raises(ValueError, match=rf"it calls '{domain}\.{kind}'"):
            opened(tmp_path / "net.onnx", model([node]))
    given = model()
    given.metadata_props.add(key="ort_config", value="{}")
    with pytest.raises(ValueError, match="sets options of ONNX Runtime"):
        opened(tmp_path / "net.onnx", given)
    for content in (b"", b"not a model", b"\x00" * 100):
        (tmp_path / "net.onnx").write_bytes(content)
        with pytest.raises(ValueError, match=r"net\.onnx cannot be opened: it is no ONNX file"):
            open_artefact(tmp_path / "net.onnx")


def test_own_functions__are_no_foreign_operators(tmp_path):
    body = onnx.helper.make_node("Identity", ["a"], ["b"])
    function = onnx.helper.make_function("own", "f", ["a"], ["b"], [body], [onnx.helper.make_opsetid("", 20)])
    given = model([onnx.helper.make_node("f", ["images"], ["c"], domain="own")], functions=[function])
    given.opset_import.add(domain="own", version=1)
    assert opened(tmp_path / "net.onnx", given).description.title == "tiny"
