"""OpenVINO in int8: what NNCF quantises and what it leaves, how far answers move, and what layers are called."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

openvino = pytest.importorskip("openvino")
pytest.importorskip("nncf")

from broadsight.deployment import FORMATS, capture, open_artefact  # noqa: E402
from broadsight.deployment.int8.layers import COMPUTED, ENDLESS, FACTOR, SHALLOW, moved  # noqa: E402
from broadsight.deployment.int8.openvino import CalibratedOpenVINO, describe, name_layers, quantise  # noqa: E402
from tests.deployment.int8.models import LAYERS, Colours, Odd, colours_described, noise  # noqa: E402


def written(model: nn.Module, path: Path, **changes) -> Path:
    said = colours_described(**changes)
    program = capture(model.eval(), said.shape, any_batch=said.image["any_batch"])
    FORMATS["openvino"].write(program, said, path)
    name_layers(path, program)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return written(Colours(), tmp_path_factory.mktemp("float") / "colours.xml")


@pytest.fixture(scope="module")
def calibrated(source) -> CalibratedOpenVINO:
    return CalibratedOpenVINO(source, noise(), threads=1)


def products(path: Path) -> dict:
    """Convolutions and products of matrices by name."""
    model = openvino.Core().read_model(str(path))
    return {
        node.friendly_name: node
        for node in model.get_ops()
        if node.get_type_name() in ("Convolution", "GroupConvolution", "MatMul")
    }


def weight_type(node) -> str:
    """Of the constant behind what makes weights of it."""
    while node.get_type_name() != "Constant":
        node = node.input_value(0).get_node()
    return node.get_element_type().get_type_name()


def size(path: Path) -> int:
    return sum(path.with_suffix(suffix).stat().st_size for suffix in (".xml", ".bin"))


def test_quantise__weights_are_int8_and_inputs_are_rounded(source, calibrated, tmp_path):
    calibrated.write(tmp_path / "small.xml", ["conv4"])
    found = products(tmp_path / "small.xml")
    assert set(found) == {*LAYERS, "stem", "lone"}
    for name, node in found.items():
        rounded = name in LAYERS and name != "conv4"
        assert weight_type(node.input_value(1).get_node()) == ("i8" if rounded else "f32"), name
        assert (node.input_value(0).get_node().get_type_name() == "FakeQuantize") == rounded, name
    assert size(tmp_path / "small.xml") < 0.75 * size(source)
    session, before = open_artefact(tmp_path / "small.xml", 1), open_artefact(source, 1)
    one = {**before.description.image, "any_batch": False}  # more than one at a time OpenVINO gets wrong in int8
    assert session.description == replace(before.description, image=one)
    assert 0 < moved(session(noise(20))["logits"], before(noise(20))["logits"]) < 0.08


def test_layers__the_same_as_of_onnx(calibrated):
    assert calibrated.layers == LAYERS and calibrated.passed_over == {"stem": SHALLOW, "lone": SHALLOW}


def test_describe__replaces_what_a_file_says(source, tmp_path):
    for suffix in (".xml", ".bin"):
        (tmp_path / f"copy{suffix}").write_bytes(source.with_suffix(suffix).read_bytes())
    describe(tmp_path / "copy.xml", colours_described(quantised={"layers": 6}))
    session = open_artefact(tmp_path / "copy.xml", 1)
    assert session.description.quantised == {"layers": 6}
    np.testing.assert_array_equal(session(noise())["logits"], open_artefact(source, 1)(noise())["logits"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["copy.bin", "copy.xml"]


def test_write__bad_input(calibrated, source, tmp_path):
    with pytest.raises(ValueError, match="no layer is left"):
        calibrated.write(tmp_path / "none.xml", LAYERS)
    with pytest.raises(ValueError, match="no images to calibrate with"):
        quantise(source, tmp_path / "none.xml", noise()[:0])
    assert not list(tmp_path.iterdir())


class Normalised(nn.Module):
    """Convolutions whose names are lost as normalisation is folded into them, the second without an effect on x."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.deep = nn.ModuleDict({"conv": nn.Conv2d(16, 16, 3, padding=1, bias=False), "norm": nn.BatchNorm2d(16)})
        self.head = nn.Linear(16, 3)
        for norm in (self.norm, self.deep["norm"]):
            norm.weight.data.uniform_(-2, 2)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        x = self.deep["norm"](self.deep["conv"](x)) + x
        return self.head(x.mean((2, 3)))


def test_name_layers__folded_convolutions_are_known_by_their_filters(tmp_path):
    path = written(Normalised(), tmp_path / "folded.xml")
    assert set(products(path)) == {"first", "deep.conv", "head"}


@pytest.mark.slow
def test_alone__finds_the_layers_that_an_outlier_destroys(tmp_path):
    path = written(Colours(outlier=1e5), tmp_path / "hostile.xml")
    hostile, expected = CalibratedOpenVINO(path, noise(), threads=1), open_artefact(path, 1)(noise())["logits"]
    costs = {name: moved(hostile.alone(name)(noise()), expected) for name in hostile.layers}
    assert costs["conv2"] > 0.5 > 0.1 > max(costs[name] for name in ("conv3", "conv4", "fc"))
    kept = [name for name in LAYERS if costs[name] > 0.2]
    hostile.write(tmp_path / "kept.xml", kept)
    assert moved(open_artefact(tmp_path / "kept.xml", 1)(noise())["logits"], expected) < 0.1


@pytest.mark.slow
def test_quantise__products_of_every_kind(tmp_path):
    path = written(Odd(), tmp_path / "odd.xml")
    calibrated = CalibratedOpenVINO(path, noise())
    reasons = dict.fromkeys(("matmul", "matmul_1", "matmul_2"), COMPUTED)  # the stack is repeated for every image
    assert calibrated.passed_over == {**reasons, "mix": ENDLESS}
    assert "head" in calibrated.layers and len(calibrated.layers) == 2
    calibrated.write(tmp_path / "small.xml")
    before, after = (open_artefact(one, 1)(noise(5))["logits"] for one in (path, tmp_path / "small.xml"))
    assert moved(after, before) < 0.1


class Mixed(nn.Module):
    """Heads of attention mixed by a convolution, as PartialFormer has them. (B, 3, 16, 16) -> (B, 3)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.maps, self.mix = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1, bias=False)

    def forward(self, x):
        maps = self.maps(x)
        return (self.mix(maps.softmax(-1)) @ maps).mean((2, 3))[:, :3]


def test_quantise__a_convolution_that_is_a_factor(tmp_path):
    path = written(Mixed(), tmp_path / "mixed.xml")
    calibrated = CalibratedOpenVINO(path, noise())
    assert calibrated.passed_over["mix"] == FACTOR and calibrated.passed_over["maps"] == SHALLOW


class Plain(nn.Module):
    """Residual convolutions without biases, where OpenVINO adds wrongly for any number of images if left to itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 16, 3, stride=2)
        self.lead = nn.Conv2d(16, 32, 1, bias=False)
        self.convs = nn.ModuleList([nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(4)])
        self.head = nn.Linear(32, 3)
        with torch.no_grad():
            for conv in (self.lead, *self.convs):
                conv.weight.mul_(4)

    def forward(self, x):
        x = self.lead(self.stem(x).relu())
        for first, second in zip(self.convs[::2], self.convs[1::2], strict=True):
            x = x + second(first(x).relu())
        return self.head(x.mean((2, 3)))


@pytest.mark.slow
def test_quantise__sums_without_a_bias_are_right_for_any_number_of_images(tmp_path):
    path = written(Plain(), tmp_path / "plain.xml")
    quantise(path, tmp_path / "small.xml", noise())
    before, after = open_artefact(path, 1), open_artefact(tmp_path / "small.xml", 1)
    for count in (1, 5):
        assert moved(after(noise(count))["logits"], before(noise(count))["logits"]) < 0.1
