"""What OpenVINO does not know is said otherwise; files that are more than a model are refused before it sees them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from broadsight.deployment import FORMATS, capture, open_artefact
from broadsight.deployment.formats.openvino import for_one_image, plain_sizes, save
from broadsight.deployment.formats.openvino_kernels import choose_kernels
from broadsight.layers import BilinearPatchEmbed
from tests.compare import randomize
from tests.deployment.tiny import Tiny, check_same, described, noise, written
from tests.refusals import refused

openvino = pytest.importorskip("openvino")


class Between(nn.Module):
    """(B, 3, H, W) -> (B, n), n being a tenth of the width, at least 7 and no more than an eighth of the height."""

    def forward(self, x: Tensor) -> Tensor:
        n = torch.sym_max(7, torch.sym_min(x.shape[3] // 10, x.shape[2] // 8))
        return x[:, 0, 0].topk(n, dim=1).values


def test_plain_sizes__the_same_numbers_without_maxima():
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
    compiled, compile_model = [], openvino.Core.compile_model

    def record(core, model, *given):
        compiled.append(str(model.inputs[0].partial_shape))
        return compile_model(core, model, *given)

    monkeypatch.setattr(openvino.Core, "compile_model", record)
    session = open_artefact(written("openvino", tmp_path, Tiny(), described()), 1)
    for count in (1, 3, 1, 2):
        check_same(session, Tiny().eval(), noise(count, 3, 32, 32))
    assert compiled == ["[1,3,32,32]", "[?,3,32,32]"]
    # Of a program for any number one for a single image, which needs no other
    free = described(64, any_size=True)
    assert for_one_image(openvino.Core().read_model(written("openvino", tmp_path, Tiny(), free)), free) is None
    one, program = described(any_batch=False), capture(Tiny().eval(), (3, 32, 32))
    FORMATS["openvino"].write(program, one, tmp_path / "net.xml")
    model = openvino.Core().read_model(tmp_path / "net.xml")
    assert list(model.inputs[0].shape) == [1, 3, 32, 32] and for_one_image(model, one) is None
    assert open_artefact(tmp_path / "net.xml", 1)(noise(2, 3, 32, 32))["logits"].shape == (2, 4)


class Mlps(nn.Module):
    """Images (B, 3, H, W) -> the same after a norm and MLPs, of maps and of tokens; two with nothing to add them to."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(3), nn.Linear(3, 8), nn.Linear(8, 3)
        self.plain = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = x + self.last(F.gelu(self.first(self.norm(x))))
        y, hidden = x.flatten(1, 2), F.gelu(self.first(x.flatten(1, 2)))
        y = self.plain(F.gelu(self.first(y), approximate="tanh")) + y + self.last(hidden) * hidden.mean()
        return self.last(F.gelu(self.first(y))).view(x.shape).permute(0, 3, 1, 2)


@pytest.mark.parametrize("any_batch", [True, False])
def test_choose_kernels__the_same_numbers_by_convolutions(any_batch):
    model = randomize(Mlps()).eval()
    graph = openvino.convert_model(capture(model, (3, 5, 7), any_batch=any_batch))
    graph.reshape([-1 if any_batch else 1, 3, 5, 7])
    choose_kernels(graph)
    kinds = [node.get_type_name() for node in graph.get_ops()]
    assert kinds.count("Convolution") == 4 and kinds.count("MatMul") == 4
    run = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    images = noise(2 if any_batch else 1, 3, 5, 7)
    np.testing.assert_allclose(run(images)[0], model(torch.from_numpy(images)).detach(), atol=1e-5)


def test_precision__a_silent_fallback_is_refused(tmp_path, monkeypatch):
    path, kind = written("openvino", tmp_path, Tiny(), described()), type(FORMATS["openvino"])
    assert open_artefact(path, 1).precision == "fp32"
    lacking = [one for one in ("bf16", "fp16") if one not in FORMATS["openvino"].precisions]
    for one in lacking:
        refused(f"--precision {one}, but OpenVINO has fp32", open_artefact, path, 1, one)
    monkeypatch.setattr(kind, "precisions", ("fp32", "bf16", "fp16"))  # as if the plug-in promised what it does not do
    for one in lacking:
        refused(rf"OpenVINO computes in b?f\d+ on this CPU, not in {one}", open_artefact, path, 1, one)


def test_write__sampling_at_offsets_for_any_size(tmp_path):
    model = randomize(BilinearPatchEmbed(3, 8)).eval()
    description = described(64, any_size=True, outputs=("maps",), task="segment")
    session = open_artefact(written("openvino", tmp_path, model, description), 1)
    for size in ((64, 64), (70, 98)):
        check_same(session, model, noise(2, 3, *size), 1e-4)


@pytest.fixture
def path(tmp_path):
    """Images (1, 3, 4, 4) -> the same plus numbers."""
    from openvino import opset13 as ops

    images = ops.parameter([1, 3, 4, 4], np.float32, name="images")
    numbers = ops.constant(np.arange(48, dtype=np.float32).reshape(1, 3, 4, 4))
    save(openvino.Model([ops.add(images, numbers)], [images], "m"), described(4, any_batch=False), tmp_path / "net.xml")
    return tmp_path / "net.xml"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('<?xml version="1.0"?>', '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]>', "declares entities"),
        ('<?xml version="1.0"?>', '<?xml version="1.0" encoding="utf-16"?>', "another encoding"),
        ('version="opset1"', 'version="extension"', "needs 'extension'"),
        ('version="opset1"', 'version="/tmp/lib.so"', "needs '/tmp/lib.so'"),
        ('offset="0"', 'offset="1000"', "lies beyond the 192 bytes"),
        ('offset="0"', 'offset="-4"', "lies beyond"),
        ('size="192"', 'size="99999999999"', "lies beyond"),
        ('size="192"', 'size="x"', "does not say where it lies"),
        ("<net", "<not", "no XML"),
    ],
)
def test_other_content__is_refused(path, old, new, said):
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")
    refused(rf"net\.xml cannot be opened: .*{said}", open_artefact, path)


def test_sound__opens_and_other_files_are_refused(path):
    found = open_artefact(path)(np.zeros((1, 3, 4, 4), np.float32))["logits"]
    assert np.array_equal(found.ravel(), np.arange(48))
    weights = path.with_suffix(".bin")
    moved = weights.rename(path.with_name("elsewhere"))
    refused(r"no net\.bin beside it", open_artefact, path)
    weights.symlink_to(moved)
    refused(r"no net\.bin beside it", open_artefact, path)
    for content in (b"", b"<a/>", b"\xff\xfe<\0", b"<net>" * 100_000, b"\x08\x07\x12\x04"):
        path.write_bytes(content)
        refused(r"net\.xml cannot be opened: ", open_artefact, path)
