"""OpenVINO in int8: what NNCF quantises and what it leaves, how far answers move, and what layers are called."""

from pathlib import Path

import pytest
import torch
from torch import nn

openvino = pytest.importorskip("openvino")
pytest.importorskip("nncf")

from broadsight.deployment import open_artefact  # noqa: E402
from broadsight.deployment.int8.layers import FACTOR, SHALLOW, moved  # noqa: E402
from broadsight.deployment.int8.openvino import PRODUCTS, CalibratedOpenVINO  # noqa: E402
from tests.deployment.int8.models import LAYERS, Colours, noise, written  # noqa: E402


def products(path: Path) -> dict:
    """Convolutions and products of matrices by name."""
    nodes = openvino.Core().read_model(str(path)).get_ops()
    return {node.friendly_name: node for node in nodes if node.get_type_name() in PRODUCTS}


def weight_type(node) -> str:
    """Of the constant behind what makes weights of it."""
    while node.get_type_name() != "Constant":
        node = node.input_value(0).get_node()
    return node.get_element_type().get_type_name()


def test_write__weights_are_int8_and_inputs_are_rounded(tmp_path):
    calibrated = CalibratedOpenVINO(written(Colours(), tmp_path / "colours.xml"), noise(), threads=1)
    calibrated.write(tmp_path / "small.xml", ["conv4"])
    found = products(tmp_path / "small.xml")
    assert set(found) == {*LAYERS, "stem", "lone"}
    for name, node in found.items():
        rounded = name in LAYERS and name != "conv4"
        assert weight_type(node.input_value(1).get_node()) == ("i8" if rounded else "f32"), name
        assert (node.input_value(0).get_node().get_type_name() == "FakeQuantize") == rounded, name


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


class Mixed(nn.Module):
    """Heads of attention mixed by a convolution, as PartialFormer has them. (B, 3, 16, 16) -> (B, 3)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.maps, self.mix = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1, bias=False)

    def forward(self, x):
        maps = self.maps(x)
        return (self.mix(maps.softmax(-1)) @ maps).mean((2, 3))[:, :3]


def test_folded_convolutions_are_known_by_their_filters_and_a_factor_stays_in_float(tmp_path):
    assert set(products(written(Normalised(), tmp_path / "folded.xml"))) == {"first", "deep.conv", "head"}
    calibrated = CalibratedOpenVINO(written(Mixed(), tmp_path / "mixed.xml"), noise())
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
def test_write__sums_without_a_bias_are_right_for_any_number_of_images(tmp_path):
    path = written(Plain(), tmp_path / "plain.xml")
    CalibratedOpenVINO(path, noise()).write(tmp_path / "small.xml")
    before, after = open_artefact(path, 1), open_artefact(tmp_path / "small.xml", 1)
    for count in (1, 5):
        assert moved(after(noise(count))["logits"], before(noise(count))["logits"]) < 0.1
