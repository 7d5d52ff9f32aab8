"""What OpenVINO does not know is said otherwise."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from broadsight.deployment import capture
from broadsight.deployment.formats.openvino import for_one_image, open, plain_sizes, write
from broadsight.layers import BilinearPatchEmbed
from tests.compare import randomize
from tests.deployment.tiny import Tiny, described


class Between(nn.Module):
    """(B, 3, H, W) -> (B, n), n being a tenth of the width, at least 7 and no more than an eighth of the height."""

    def forward(self, x: Tensor) -> Tensor:
        n = torch.sym_max(7, torch.sym_min(x.shape[3] // 10, x.shape[2] // 8))
        return x[:, 0, 0].topk(n, dim=1).values


def test_plain_sizes__the_same_numbers_without_maxima():
    openvino = pytest.importorskip("openvino")
    program = capture(Between().eval(), (3, 160, 224), any_size=True)
    plain = plain_sizes(program)
    there = [{node.target for node in one.graph.nodes} & {torch.sym_max, torch.sym_min} for one in (program, plain)]
    assert there == [{torch.sym_max, torch.sym_min}, set()]
    assert plain_sizes(plain) is plain
    run = openvino.Core().compile_model(openvino.convert_model(plain), "CPU")
    for height, width, count in ((64, 64, 7), (72, 80, 8), (80, 300, 10), (1000, 90, 9), (320, 320, 32)):
        images = np.random.default_rng(0).normal(size=(2, 3, height, width)).astype(np.float32)
        found = run(images)[0]
        assert found.shape == (2, count)
        np.testing.assert_allclose(found, Between()(torch.from_numpy(images)), atol=1e-6)


def test_open__one_image_has_a_graph_of_its_own_and_several_share_one(tmp_path, monkeypatch):
    openvino = pytest.importorskip("openvino")
    model, compiled = Tiny().eval(), []
    write(capture(model, (3, 32, 32)), described(), tmp_path / "net.xml")
    core = openvino.Core.compile_model
    monkeypatch.setattr(
        openvino.Core, "compile_model", lambda *given: compiled.append(given[1].inputs[0].partial_shape) or core(*given)
    )
    session = open(tmp_path / "net.xml", 1)
    for count in (1, 3, 1, 2):
        images = np.random.default_rng(count).normal(size=(count, 3, 32, 32)).astype(np.float32)
        expected = model(torch.from_numpy(images)).detach()
        np.testing.assert_allclose(session(images)["logits"], expected, atol=1e-5)
    assert [str(shape) for shape in compiled] == ["[1,3,32,32]", "[?,3,32,32]"]


def test_for_one_image__not_where_other_lengths_are_open(tmp_path):
    openvino = pytest.importorskip("openvino")
    path = tmp_path / "net.xml"
    write(capture(Tiny().eval(), (3, 64, 64), any_size=True), described(64, any_size=True), path)
    assert for_one_image(openvino.Core().read_model(path), described(64, any_size=True)) is None


def test_write__of_a_program_for_any_number_one_for_a_single_image(tmp_path):
    openvino = pytest.importorskip("openvino")
    write(capture(Tiny().eval(), (3, 32, 32)), described(any_batch=False), tmp_path / "net.xml")
    model = openvino.Core().read_model(tmp_path / "net.xml")
    assert list(model.inputs[0].shape) == [1, 3, 32, 32] and for_one_image(model, described(any_batch=False)) is None
    assert open(tmp_path / "net.xml", 1)(np.zeros((2, 3, 32, 32), np.float32))["logits"].shape == (2, 4)


def test_write__sampling_at_offsets_for_any_size(tmp_path):
    pytest.importorskip("openvino")
    model = randomize(BilinearPatchEmbed(3, 8)).eval()
    description = described(64, any_size=True, outputs=("maps",), task="segment")
    write(capture(model, (3, 64, 64), any_size=True), description, tmp_path / "net.xml")
    session = open(tmp_path / "net.xml", 1)
    for height, width in ((64, 64), (70, 98)):
        images = np.random.default_rng(0).normal(size=(2, 3, height, width)).astype(np.float32)
        np.testing.assert_allclose(session(images)["maps"], model(torch.from_numpy(images)).detach(), atol=1e-4)
