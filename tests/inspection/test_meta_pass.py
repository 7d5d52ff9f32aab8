"""What a model says of itself, and that a pass leaves no trace in it."""

import pytest
import timm
import torch
from torch import Tensor, nn

from broadsight.inspection.meta_pass import copied, image_channels, image_size, in_eval_mode, undisturbed
from tests.analysis.measures.toy_models import Made


def remembers() -> nn.Module:
    """Keeps what it saw, as some attentions keep their positions."""

    def forward(self: Made, x: Tensor) -> Tensor:
        self.seen, self.calls = self.linear(x) + self.offset, len(x)
        return self.seen

    model = Made(forward, linear=nn.Linear(3, 4), seen=None)
    model.register_buffer("offset", torch.ones(4))
    return model


def test_undisturbed__attributes_are_as_before_after_an_error_too():
    model = remembers()
    kept = model.linear.weight
    with pytest.raises(ZeroDivisionError), undisturbed(model):
        model(torch.randn(2, 3))
        assert model.seen is not None
        raise ZeroDivisionError
    assert model.seen is None and not hasattr(model, "calls")
    assert model.linear.weight is kept and model(torch.randn(2, 3)).shape == (2, 4)


def test_copied__without_values_or_with_the_same_tensors():
    model = remembers()
    model.linear.bias.requires_grad_(False)
    blank, linear = copied((model, model.linear), model, with_values=False)
    learning = {name: p.requires_grad for name, p in blank.named_parameters()}
    assert learning == {"linear.weight": True, "linear.bias": False}
    assert all(x.is_meta for x in blank.state_dict().values()) and linear is blank.linear is not model.linear
    assert blank(torch.empty(5, 3, device="meta")).shape == (5, 4) and model.seen is None
    same = copied(model, model, with_values=True)
    assert all(a is b for a, b in zip(same.parameters(), model.parameters(), strict=True))
    assert same(torch.zeros(5, 3)).shape == (5, 4) and model.seen is None
    # modules and tensors in two places stay shared
    shared, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = shared.weight
    model = nn.ModuleList([shared, nn.ModuleList([shared, other])])
    blank = copied(model, model, with_values=False)
    assert blank[0] is blank[1][0] and blank[0].weight is blank[1][1].weight and blank[0].weight.is_meta
    assert shared.weight is other.weight and not shared.weight.is_meta


def test_in_eval_mode__restores_every_module():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3)).train()
    model[1].eval()

    with pytest.raises(ZeroDivisionError), in_eval_mode(model):
        assert not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == [True, True, False] and torch.is_grad_enabled()


def test_image__size_recorded_or_trained_on_and_channels_of_the_first_convolution():
    for name, size in dict(test_vit=160, resnet10t=176, mixer_s32_224=224).items():
        assert image_size(timm.create_model(name, device="meta")) == (size, size)
    assert image_size(timm.create_model("test_vit", device="meta", img_size=(64, 96))) == (64, 96)
    assert image_channels(timm.create_model("resnet10t", in_chans=5, device="meta"))[0] == 5
    assert (image_channels(nn.Linear(2, 2)), image_size(nn.Linear(2, 2))) == ([3], (224, 224))
