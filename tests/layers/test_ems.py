"""The parts of the EMS block against the slow reference, and where that does the same, against sums by hand."""

import pytest
import torch
from torch import Tensor, nn

from broadsight.layers import MultiScaleInteraction
from broadsight.layers.ems import VARIANTS
from tests.compare import assert_same_function, randomize
from tests.reference import emsnet as reference
from tests.refusals import refused


def on_channels_first(module: nn.Module, x: Tensor) -> Tensor:
    """Runs a channels-first module on (B, H, W, C)."""
    return module(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


SIZES = [(13, 9), (1, 1), (12, 24)]
POOLING = ["full", "patch4", "gated", "c_mhsa", "no_split", "no_fusion"]
RATIOS = [(2, 1, 1), (1, 1, 2), (2, 2, 0), (1, 3, 0), (3, 0, 1), (2, 0, 2), (4, 0, 0)]
CASES = [(16, variant, (1, 2, 1), size, w) for variant in VARIANTS for size in SIZES for w in ("channel", "spatial")]
CASES += [(16, variant, ratios, (7, 5), "channel") for variant in POOLING for ratios in RATIOS]
CASES += [(128, "no_split", (1, 2, 1), (9, 14), "channel")]  # attentions of 4 heads and of 2, where the others have one


@pytest.mark.parametrize(("dim", "variant", "ratios", "size", "whiten"), CASES)
def test_multi_scale_interaction__agrees_with_the_slow_reference(dim, variant, ratios, size, whiten):
    ours = randomize(MultiScaleInteraction(dim, variant, ratios, whiten).double())
    slow = reference.MSI(dim, variant, ratios, whiten).double()
    x = torch.randn(2, *size, dim, dtype=torch.float64)
    assert_same_function(ours, slow, x, run_reference=on_channels_first, tolerance=1e-10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(dim=12), "dim=12 does not split into the slices of an EMS block; choose a multiple of 8"),
        (dict(dim=16, variant="fuller"), "unknown variant 'fuller'; .*expected one of full, baseline"),
        (dict(dim=16, ratios=(1, 1, 1)), r"ratios=\(1, 1, 1\) are not three quarters-of-the-channels that add up to 4"),
        (dict(dim=16, ratios=(2, 2)), r"ratios=\(2, 2\) are not three"),
        (dict(dim=16, ratios=(5, 0, -1)), r"ratios=\(5, 0, -1\) are not three"),
        (dict(dim=16, whiten="pixel"), "unknown whiten 'pixel'; .*expected one of channel, spatial"),
        (dict(dim=200), "an attention of width 100 does not split into 3 heads; choose a multiple of 32"),
    ],
)
def test_wrong_arguments__are_refused(arguments, words):
    refused(words, MultiScaleInteraction, **arguments)
