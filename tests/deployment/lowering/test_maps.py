from copy import deepcopy

import torch
from torch import nn

from broadsight.deployment.graph import capture, prepare
from broadsight.deployment.lowering import lower
from broadsight.layers import ChannelMlp
from tests.compare import randomize
from tests.zoo import shallow


def test_blocks_of_mat__are_convolutions_and_norms_of_tokens():
    model = randomize(shallow("mat_1", num_classes=5)).eval()
    lowered = prepare(model, (70, 94))
    x = torch.randn(2, 3, 70, 94)
    torch.testing.assert_close(lowered(x), model(x), atol=1e-4, rtol=1e-4)
    nodes = [node for node in capture(lowered, (3, 70, 94)).graph.nodes if node.op == "call_function"]
    axes = {node.args[0].meta["val"].ndim for node in nodes if node.target is torch.ops.aten.layer_norm.default}
    assert axes == {3, 4}  # of blocks, and of stages
    assert not any(node.target is torch.ops.aten.batch_norm.default for node in nodes)


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
