"""Counts of executed products against sums done by hand."""

import pytest
import timm.layers
import torch
from torch import nn

from broadsight.inspection.macs import count_calls, executed_macs
from tests.analysis.measures.toy_models import Made
from tests.zoo import SMALLEST, shallow


def attention(dim: int, heads: int, fused: bool) -> nn.Module:
    """(B, C, H, W) -> (B, N, C); fused, or as three steps."""
    model = Made(lambda self, x: self.attn(x.flatten(2).mT), attn=timm.layers.Attention(dim, heads))
    model.attn.fused_attn = fused
    return model


def needs_values() -> nn.Module:
    """Cannot run on shapes alone."""
    return Made(lambda self, x: self.conv(x) if x.sum().item() == 0 else x, conv=nn.Conv2d(3, 4, 1))


def test_executed__layers_attention_and_a_known_model():
    for model, size, expected in (
        (nn.Conv2d(3, 8, 5, stride=2, padding=2), (20, 30), 10 * 15 * 8 * 3 * 5 * 5),
        (nn.Conv2d(4, 8, 3, groups=2), (9, 9), 7 * 7 * 8 * 2 * 3 * 3),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4), (9, 9), 9 * 9 * 4 * 3 * 3),
        (nn.Sequential(nn.Flatten(), nn.Linear(72, 10), nn.ReLU(), nn.Linear(10, 2)), (4, 6), 72 * 10 + 10 * 2),
    ):
        assert executed_macs(model, size, in_chans=getattr(model, "in_channels", 3)) == expected
    tokens, dim = 5 * 7, 16
    by_hand = tokens * dim * 3 * dim + 2 * tokens * tokens * dim + tokens * dim * dim
    for fused in (False, True):
        assert executed_macs(attention(dim, 4, fused), (5, 7), in_chans=dim) == by_hand
    assert executed_macs(timm.create_model("resnet18"), (224, 224)) / 1e9 == pytest.approx(1.814, abs=5e-4)


@pytest.mark.parametrize("name", SMALLEST)
def test_executed__does_not_depend_on_the_device_or_the_slices(name):
    model = shallow(name, num_classes=2)
    expected = executed_macs(model, (64, 48))
    assert executed_macs(model.to("meta"), (64, 48)) == expected > 1e6
    assert count_calls(model, (3, 3, 64, 48))[0] == 3 * expected


def test_count__several_inputs_and_models_that_need_values_on_the_cpu():
    assert count_calls(Made(lambda self, a, b: a @ b), (2, 3, 4), (2, 4, 5)) == (2 * 3 * 4 * 5, 0)
    for model in (needs_values(), needs_values().double()):
        assert executed_macs(model, (4, 6)) == 4 * 6 * 3 * 4
    with pytest.raises(RuntimeError, match="channels"):  # an error of the model is not hidden
        executed_macs(nn.Conv2d(3, 4, 1), (4, 6), in_chans=5)


@pytest.mark.parametrize("training", [False, True])
def test_count__leaves_the_model_alone(training):
    model = nn.Sequential(needs_values(), nn.BatchNorm2d(4), nn.GELU()).double().train(training)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    executed_macs(model, (4, 6))
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]) and value.device.type == "cpu" and value.dtype == state[key].dtype
    assert [len(module._forward_hooks) for module in model.modules()] == [0, 1, 0, 0, 0]
    assert all(module.training == training for module in model.modules())
