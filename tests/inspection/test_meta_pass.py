"""What a model says of itself, and that a pass leaves no trace in it."""

import pytest
import timm
import torch
from torch import Tensor, nn

from broadsight.inspection.meta_pass import (
    call_without_content,
    image_channels,
    image_size,
    in_eval_mode,
    undisturbed,
    without_content,
)


class Remembers(nn.Module):
    """Keeps what it saw, as some attentions keep their positions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("offset", torch.ones(4))
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.linear(x) + self.offset
        self.calls = len(x)
        return self.seen


def test_undisturbed__attributes_are_as_before():
    model = Remembers()
    kept = model.linear.weight
    with undisturbed(model):
        model(torch.randn(2, 3))
        assert model.seen is not None
    assert model.seen is None and not hasattr(model, "calls")
    assert model.linear.weight is kept and model(torch.randn(2, 3)).shape == (2, 4)


def test_undisturbed__after_an_error_too():
    model = Remembers()
    with pytest.raises(RuntimeError), undisturbed(model):
        model(torch.randn(2, 3))
        raise RuntimeError
    assert model.seen is None


def test_without_content__shapes_and_no_values():
    model = Remembers()
    model.linear.bias.requires_grad_(False)
    parameters, buffers = without_content(model)
    assert {name: p.requires_grad for name, p in parameters.items()} == {"linear.weight": True, "linear.bias": False}
    assert all(x.is_meta for x in (*parameters.values(), *buffers.values())) and list(buffers) == ["offset"]
    out = call_without_content(model, parameters | buffers, torch.empty(5, 3, device="meta"))
    assert out.is_meta and out.shape == (5, 4)


def test_without_content__modules_and_tensors_in_two_places_keep_their_values():
    shared, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = shared.weight
    model = nn.ModuleDict({"first": shared, "list": nn.ModuleList([shared, other])})
    model.forward = lambda x: model["list"][1](model["list"][0](model["first"](x)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters, buffers = without_content(model)
    assert list(parameters) == ["first.weight", "first.bias", "list.1.weight", "list.1.bias"] and not buffers
    assert parameters["first.weight"] is parameters["list.1.weight"]
    assert call_without_content(model, parameters, torch.empty(5, 3, device="meta")).is_meta
    assert shared.weight is other.weight and len(model.state_dict()) == len(before) == 6
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_in_eval_mode__restores_every_module():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3)).train()
    model[1].eval()

    with in_eval_mode(model):
        assert not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == [True, True, False] and torch.is_grad_enabled()
    with pytest.raises(ZeroDivisionError), in_eval_mode(model):
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == [True, True, False]


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("test_vit", {}, (160, 160)),
        ("test_vit", dict(img_size=(64, 96)), (64, 96)),
        ("resnet10t", {}, (176, 176)),
        ("mixer_s32_224", {}, (224, 224)),
    ],
)
def test_image_size__recorded_or_trained_on(name, options, size):
    assert image_size(timm.create_model(name, device="meta", **options)) == size


def test_image_size__nothing_known():
    assert image_size(nn.Linear(2, 2)) == (224, 224)


def test_image_channels__of_the_first_convolution():
    assert image_channels(timm.create_model("resnet10t", in_chans=5, device="meta"))[0] == 5
    assert image_channels(nn.Linear(2, 2)) == [3]
