"""EMSNet against the slow reference, and against the integers that its tables imply."""

import pytest
import timm
import torch
from torch import Tensor, nn

from broadsight.layers.coarse_attention import AttentionPath
from broadsight.layers.ems import VARIANTS
from broadsight.models import EMSNet
from broadsight.papers.macs import FVCORE_MEAN, OLD_PROFILER, published_macs
from tests.compare import assert_bfloat16, assert_close, assert_same_model, assert_trains_alike, parameters, randomize
from tests.reference import emsnet as reference
from tests.refusals import refused

SMALL = dict(dims=(8, 16, 24, 32), depths=(1, 1, 2, 1), mlp_ratios=(2, 3, 1, 2), num_classes=5)

SWITCHES = {mixer: dict(mixer=mixer) for mixer in VARIANTS} | {
    "more pooled by 2": dict(ratios=(2, 1, 1)),
    "more pooled by 4": dict(ratios=(1, 1, 2)),
    "spatial whitening": dict(whiten="spatial"),
    "one channel": dict(in_chans=1),
}


def pair(switch: str) -> tuple[EMSNet, reference.EMSNet]:
    mine = SWITCHES[switch]
    theirs = {"variant" if key == "mixer" else key: value for key, value in mine.items()}
    return randomize(EMSNet(**SMALL, **mine).double()), reference.EMSNet(**SMALL, **theirs).double()


@pytest.mark.parametrize("size", [(64, 64), (37, 50)])
@pytest.mark.parametrize("switch", SWITCHES)
def test_model__agrees_with_the_slow_reference_in_value_and_gradient(switch, size):
    assert_same_model(*pair(switch), torch.randn(2, SWITCHES[switch].get("in_chans", 3), *size, dtype=torch.float64))


@pytest.mark.parametrize("size", [(1, 1), (225, 301)])
def test_model__extreme_sizes_agree_with_the_slow_reference(size):
    assert_same_model(*pair("full"), torch.randn(1, 3, *size, dtype=torch.float64))


@pytest.mark.parametrize("switch", ["full", "no_fusion"])
def test_model__trains_as_the_slow_reference_and_stays_close_in_bfloat16(switch):
    assert_trains_alike(*pair(switch), statistics=3 * (2 + 3 + 2 * 5 + 1))
    assert_bfloat16(EMSNet(**SMALL, mixer=switch), 0.05)


def test_initial_weights__every_parameter_learns():
    """The mixer is a chain of linear layers: with small initial weights its first gradients would all but vanish."""
    model = timm.create_model("emsnet_xxtiny").train()
    model(torch.randn(2, 3, 224, 224)).log_softmax(1)[:, 0].sum().backward()
    largest = {name: 0.0 if p.grad is None else p.grad.abs().max().item() for name, p in model.named_parameters()}
    assert 0.0 not in largest.values()
    # A shift of the last stage's input is removed again by every norm of a batch that follows.
    assert [name for name, value in largest.items() if value < 1e-7] in ([], ["stages.3.downsample.norm.bias"])
    assert largest["stages.0.blocks.0.mixer.static.pool2.expand.weight"] > 1e-6


def test_model__shifts_with_the_image_by_whole_windows():
    """Without the global path, 32 pixels are 8 cells of the first stage: pooling by 4 times windows at stride 2."""
    model = EMSNet(dims=(8, 8, 8, 8), depths=(1, 1, 1, 1), num_classes=5).double().eval()
    paths = [m.dynamic.global_ for m in model.modules() if hasattr(m, "dynamic")]
    assert len(paths) == 4 and all(isinstance(path, AttentionPath) for path in paths)
    for path in paths:
        nn.init.zeros_(path.prop.weight)
    image = torch.randn(1, 3, 32, 192, dtype=torch.float64)

    def first_map(x: Tensor) -> Tensor:
        return model.forward_intermediates(x, indices=[0], stop_early=True, intermediates_only=True)[0][0]

    still = first_map(image)
    inner = slice(16, 32)  # of 48 columns: out of reach of the borders
    assert_close(first_map(image.roll(32, 3))[..., 24:40], still[..., inner], "shifted by 32", 1e-11)
    assert (first_map(image.roll(16, 3))[..., 20:36] - still[..., inner]).abs().max() > 1e-6


# Keyword arguments of the smallest variant: parameters; GMACs of older profilers.
ROWS = {
    "baseline": (dict(mixer="baseline"), 2_099_016, 0.4816),
    "whiten": (dict(mixer="whiten"), 2_248_520, 0.5109),
    "patch2": (dict(mixer="patch2"), 2_418_696, 0.5355),
    "patch4": (dict(mixer="patch4"), 2_387_848, 0.5352),
    "gated": (dict(mixer="gated"), 2_686_856, 0.5938),
    "c_mhsa": (dict(mixer="c_mhsa"), 3_106_920, 0.5542),
    "ratios 2:1:1": (dict(ratios=(2, 1, 1)), 2_594_376, 0.5411),
    "ratios 1:1:2": (dict(ratios=(1, 1, 2)), 2_597_640, 0.5417),
    "no splitting": (dict(mixer="no_split"), 4_457_608, 0.7924),
    "no fusion": (dict(mixer="no_fusion"), 2_151_560, 0.4806),
}

# Name: parameters, parameters without the last norm and the classifier, MACs of fvcore, GMACs of older profilers.
SIZES = {
    "emsnet_xxtiny": (2_568_296, 2_374_912, 525_989_088, "0.5379"),
    "emsnet_xtiny": (3_039_912, 2_878_592, 771_977_600, "0.791"),
    "emsnet_xtiny as printed": (2_294_200, 2_164_944, 681_793_616, "0.700"),
    "emsnet_tiny": (5_471_896, 5_214_384, 1_850_307_744, "1.882"),
}


def on_meta(name: str, **switches) -> nn.Module:
    return timm.create_model(name, device=torch.device("meta"), **switches)


@pytest.mark.parametrize("row", ROWS)
def test_sizes_and_macs__of_every_row(row):
    switches, total, macs = ROWS[row]
    model = on_meta("emsnet_xxtiny", **switches)
    assert parameters(model) == total
    assert round(published_macs(model, (224, 224), OLD_PROFILER) / 1e9, 4) == macs


# The larger ones take part in the slow tests; test_verify counts them too, to the digits that are printed.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "emsnet_xxtiny")) for name in SIZES]
)
def test_sizes_and_macs__of_every_variant(name):
    total, dense, macs, older = SIZES[name]
    name, _, printed = name.partition(" ")
    widths = dict(dims=(32, 64, 96, 128)) if printed else {}
    model = on_meta(name, **widths)
    assert (parameters(model), parameters(on_meta(name, features_only=True, **widths))) == (total, dense)
    assert published_macs(model, (224, 224), FVCORE_MEAN) == macs
    digits = len(older.split(".")[1])
    assert f"{published_macs(model, (224, 224), OLD_PROFILER) / 1e9:.{digits}f}" == older


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(dims=(8, 16, 24)), r"dims=\(8, 16, 24\) has 3 entries; expected 4, one for each stage"),
        (dict(depths=(1, 1, 1, 1, 1)), r"depths=\(1, 1, 1, 1, 1\) has 5 entries"),
        (dict(mlp_ratios=(4,)), r"mlp_ratios=\(4,\) has 1 entries"),
        (dict(mixer="fuller"), "unknown variant 'fuller'; .*expected one of full, baseline"),
    ],
)
def test_wrong_arguments__are_refused(arguments, words):
    refused(words, EMSNet, **SMALL | arguments)
