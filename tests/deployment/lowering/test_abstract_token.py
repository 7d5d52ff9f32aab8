from copy import deepcopy

import pytest
import torch
from torch import nn

from broadsight.deployment.lowering import lower
from broadsight.layers import AbstractTokenAttention
from tests.compare import randomize

READINGS = [
    dict(),
    dict(mixing=False),
    dict(reading="equations"),
    dict(token_is_key=True),
    dict(token_projected=True),
]


@pytest.mark.parametrize("switches", READINGS, ids=str)
@pytest.mark.parametrize("seen", [False, True])
def test_lowered__is_the_layer_for_whole_partial_and_single_windows(switches, seen):
    layer = randomize(AbstractTokenAttention(12, 3, 3, **switches).double()).eval()
    if seen:  # its projections are left as they are
        layer.qkv.register_forward_hook(lambda *_: None)
    lowered = deepcopy(layer)
    lower(lowered)
    assert lowered.scaled is not seen and type(lowered) is not type(layer)
    if layer.mixing:
        assert type(lowered.mix_proj) is (nn.Linear if seen else nn.Identity)
    for H, W in ((6, 6), (3, 3), (5, 7), (2, 4), (1, 1), (3, 6)):
        x = torch.randn(2, H, W, 12, dtype=torch.float64)
        torch.testing.assert_close(lowered(x), layer(x))
