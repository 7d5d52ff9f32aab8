"""Spectra of maps whose transform is known: constants, points and waves."""

import json
import math

import pytest
import torch
from torch import Tensor

from broadsight.analysis import Spectra, log_amplitude, plot_spectrum
from broadsight.analysis.measures.spectrum import FLOOR
from broadsight.inspection.blocks import find_blocks, watch_blocks
from broadsight.inspection.passing import pass_images
from tests.analysis.measures.toy_models import Blocks
from tests.inspection.timm_models import created
from tests.training.small_runs import refusal
from tests.zoo import shallow

NONE = math.log(FLOOR)


def showing() -> Blocks:
    """A model whose only block gives the image itself."""
    return Blocks(torch.zeros_like, 1)


def layer_of(x: Tensor):
    (layer,) = log_amplitude(showing().double(), x.double()).layers
    return layer


def large_at(layer) -> set[tuple[int, ...]]:
    return {tuple(place) for place in (layer.spectrum > 0).nonzero().tolist()}


def wave(height: int, width: int, down: int, across: int) -> Tensor:
    """(1, 1, height, width), so many periods."""
    rows, columns = (torch.arange(n, dtype=torch.float64) / n for n in (height, width))
    return torch.cos(2 * math.pi * (down * rows[:, None] + across * columns))[None, None]


def test_a_point_has_all_frequencies_and_a_constant_none_but_0():
    x = torch.zeros(1, 1, 6, 8)
    x[0, 0, 2, 3] = 5
    layer = layer_of(x)
    assert layer.relative == pytest.approx((0, 0, 0, 0)) and layer.high == pytest.approx(0)
    assert layer.log_amplitude == pytest.approx([math.log(5)] * 4, abs=1e-6)
    assert torch.allclose(layer.spectrum, torch.full((6, 8), math.log(5), dtype=torch.float64), atol=1e-6)
    layer = layer_of(torch.full((1, 1, 4, 4), 3.0))
    assert layer.log_amplitude == pytest.approx((math.log(48), NONE, NONE), abs=1e-6)
    assert layer.high == pytest.approx(NONE - math.log(48))
    assert layer.spectrum.argmax() == 2 * 4 + 2  # the middle


def test_a_wave_has_two_points():
    """Two periods down and across of 8x8: amplitudes of 32 at half of pi and at its mirror."""
    layer = layer_of(wave(8, 8, 2, 2))
    assert layer.frequencies == (0, 0.25, 0.5, 0.75, 1)
    assert layer.log_amplitude == pytest.approx((NONE, NONE, math.log(32), NONE, NONE), abs=1e-6)
    assert large_at(layer) == {(4 - 2, 4 - 2), (4 + 2, 4 + 2)}
    layer = layer_of(wave(8, 8, 2, -2))  # the other diagonal is another frequency
    assert max(layer.log_amplitude) == pytest.approx(NONE, abs=1e-6)
    assert large_at(layer) == {(2, 6), (6, 2)}
    # the highest frequency is pi: a chess board and its mean, 64 times their sizes, 1 and 2
    layer = layer_of(wave(8, 8, 4, 4) + 2)
    assert layer.frequencies[-1] == 1
    assert layer.high == pytest.approx(math.log(64) - math.log(128), abs=1e-6)
    assert layer_of(torch.randn(1, 1, 7, 7)).frequencies == pytest.approx((0, 2 / 7, 4 / 7, 6 / 7))


def test_sides_may_differ_and_images_are_averaged():
    """At a third of pi down (2 periods of 12) and across (1 of 6): on the diagonal between the same corners."""
    layer = layer_of(wave(12, 6, 2, 1))
    assert layer.frequencies == pytest.approx((0, 1 / 3, 2 / 3, 1))
    assert layer.log_amplitude == pytest.approx((NONE, math.log(36), NONE, NONE), abs=1e-6)
    assert layer.spectrum.shape == (12, 6)
    # 4x5: at half of pi, 1 down, and across half-way between 1 and 2
    layer, x = layer_of(wave(4, 5, 1, 1)), math.log(10)
    assert layer.log_amplitude == pytest.approx((NONE, 0.75 * x + 0.25 * NONE, NONE), abs=1e-6)
    # channels and images are averaged as logarithms: points of sizes 1, 2, 4 and 8
    x = torch.zeros(2, 2, 4, 4)
    x[:, :, 0, 0] = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    counts = []
    (layer,) = log_amplitude(showing(), list(x.split(1)), seen=counts.append).layers
    assert layer.log_amplitude == pytest.approx([math.log(2) * 1.5] * 3, abs=1e-5)
    assert counts == [1, 2]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "mat_1"])
def test_against_the_whole_transform(name):
    """As the definition has it: transform, shift, logarithm, mean, and the diagonal from the centre."""
    model = (shallow(name).eval() if name == "mat_1" else created(name)).double()
    x = torch.randn(3, 3, 96, 64)
    blocks, wanted = find_blocks(model, x), {}

    def see(number: int, features: Tensor) -> None:
        whole = torch.fft.fftshift(torch.fft.fft2(features.double()), (2, 3)).abs()
        wanted.setdefault(number, []).append((whole + FLOOR).log().mean(1))

    with watch_blocks(model, blocks, see):
        pass_images(model, x)
    found = log_amplitude(model, x, batch_size=2)
    for number, layer in enumerate(found.layers):
        assert torch.allclose(layer.spectrum, torch.cat(wanted[number]).mean(0), atol=1e-9)
        middle = layer.spectrum[layer.spectrum.shape[0] // 2, layer.spectrum.shape[1] // 2]
        assert layer.log_amplitude[0] == pytest.approx(float(middle))


def test_branches_by_name_and_bad_input():
    model, x = shallow("emsnet_xxtiny").eval(), torch.randn(1, 3, 64, 64)
    found = log_amplitude(model, x, layers="*.mixer.static")
    assert [layer.name for layer in found.layers] == [f"stages.{i}.blocks.0.mixer.static" for i in range(4)]
    both = [torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 6)]
    said = refusal(lambda: log_amplitude(showing(), both))
    assert said == "maps of blocks.0 are 4x6 and 4x4; pass images of one size"
    assert "floor=0; expected a small number above 0" in refusal(lambda: log_amplitude(showing(), both[0], floor=0))


def test_record_and_plots():
    one = log_amplitude(showing(), torch.randn(2, 2, 8, 6))
    record = json.loads(json.dumps(one.record()))
    assert record["layers"][0]["grid"] == [8, 6] and len(record["layers"][0]["spectrum"]) == 8
    assert record["layers"][0]["high"] == one.layers[0].high
    deep = Spectra(one.layers * 20, 2)
    panels = plot_spectrum({"a": one, "b": deep}).axes
    assert list(panels[0].lines[0].get_ydata()) == list(one.layers[0].relative)
    titles = [panel.get_title() for panel in panels if panel.get_visible() and panel.images]
    assert titles == [f"layer {i}" for i in (1, 1, 4, 6, 9, 12, 15, 17, 20)]
    assert len(plot_spectrum({"a": deep}).axes) == 12
