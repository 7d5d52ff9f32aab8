from copy import deepcopy

import torch
from torch import nn

from broadsight.deployment.graph import prepare
from broadsight.deployment.lowering import lower
from broadsight.layers import ChannelMlp
from tests.compare import randomize
from tests.zoo import shallow


def test_blocks_of_mat__are_convolutions_and_norms_of_tokens():
    model = randomize(shallow("mat_1", num_classes=5)).eval()
    lowered = prepare(model, (70, 94))
    x, axes = torch.randn(2, 3, 70, 94), set()
    for module in lowered.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_pre_hook(lambda _, inputs: axes.add(inputs[0].ndim))
    torch.testing.assert_close(lowered(x), model(x), atol=1e-4, rtol=1e-4)
    assert axes == {3, 4}  # of blocks, and of stages
    assert not any(isinstance(module, nn.BatchNorm2d) for module in lowered.modules())


def test_mlp__that_somebody_looks_into_stays():
    mlp = randomize(ChannelMlp(6, 9, depthwise="before")).eval()
    x, residual = torch.randn(2, 5, 4, 6), torch.randn(2, 5, 4, 6)
    lowered, seen, other = deepcopy(mlp), deepcopy(mlp), deepcopy(mlp)
    seen.fc1.register_forward_hook(lambda *_: None)
    other.fc2 = nn.Sequential(other.fc2)
    for one in (lowered, seen, other):
        lower(one)
        torch.testing.assert_close(one(x), mlp(x))
        torch.testing.assert_close(one(x, residual), mlp(x, residual))
    assert [type(one) is ChannelMlp for one in (lowered, seen, other)] == [False, True, True]
