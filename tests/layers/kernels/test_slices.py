"""Inference on the CPU runs a few images at a time. Nobody may notice."""

from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

from broadsight.layers.kernels import slices
from tests.compare import assert_close, randomize
from tests.zoo import SMALLEST, shallow

PARTS = ["stem", "stages.0", "stages.1", "stages.2", "stages.3"]


@pytest.fixture(params=SMALLEST)
def model(request) -> nn.Module:
    torch.manual_seed(0)
    return randomize(shallow(request.param, num_classes=7)).eval()


@pytest.fixture
def whole(monkeypatch):
    """Runs a function with slicing switched off."""

    def run(function):
        with monkeypatch.context() as patch:
            patch.setattr(slices, "STAGE_BYTES", 1 << 60)
            return function()

    return run


@pytest.fixture
def tiny_slices(monkeypatch):
    monkeypatch.setattr(slices, "STAGE_BYTES", 1)


def spy(model: nn.Module) -> dict[str, list[int]]:
    """How many images each call of the stem and of the stages gets. No hooks: they would switch slicing off."""
    calls = defaultdict(list)
    for name in PARTS:
        module = model.get_submodule(name)

        def forward(x: Tensor, name: str = name, original=module.forward) -> Tensor:
            calls[name].append(len(x))
            return original(x)

        module.forward = forward
    return calls


def every(sizes: list[int]) -> dict[str, list[int]]:
    return dict.fromkeys(PARTS, sizes)


@torch.no_grad()
def test_slices__large_maps_are_cut_and_nothing_changes(model, whole):
    images = torch.randn(5, 3, 200, 232)

    def run() -> list[Tensor]:
        final, maps = model.forward_intermediates(images)
        return [model(images), final, *maps]

    expected, calls = whole(run), spy(model)
    for one, other in zip(run(), expected, strict=True):
        assert_close(one, other, tolerance=1e-5)
    assert all(sum(sizes) == 10 for sizes in calls.values()) and list(calls) == PARTS
    assert len(calls["stem"]) > 2  # or this test would compare a thing with itself


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_slices__one_image_at_a_time_at_least(model, tiny_slices, whole, mode):
    images = torch.randn(3, 3, 64, 48)
    with mode():
        expected = whole(lambda: model(images))
        calls = spy(model)
        assert_close(model(images), expected, tolerance=1e-5)
    assert calls == every([1, 1, 1])


@torch.no_grad()
@pytest.mark.parametrize("inner", ["stem.conv1", "stages.0.blocks.0", "stages.2.blocks.0.mlp.fc1", "stages.1"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_slices__a_hook_sees_the_whole_batch_once(model, tiny_slices, inner, register):
    seen = []
    getattr(model.get_submodule(inner), register)(lambda module, inputs, *output: seen.append(len(inputs[0])))
    model(torch.randn(3, 3, 32, 32))
    assert seen == [3]


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "whole_batches"),
    [
        (lambda model: model.train(), PARTS),
        (lambda model: model.stages[1].blocks[0].train(), ["stages.1"]),
        (lambda model: model.to("meta"), PARTS),
    ],
    ids=["training", "one layer in training", "another device"],
)
def test_slices__elsewhere_parts_see_the_whole_batch(model, tiny_slices, change, whole_batches):
    change(model)
    calls = spy(model)
    model(torch.randn(3, 3, 32, 32, device=next(model.parameters()).device))
    assert calls == every([1, 1, 1]) | {name: [3] for name in whole_batches}


def test_slices__gradients_see_the_whole_batch(model, tiny_slices, whole):
    images = torch.randn(3, 3, 32, 48, requires_grad=True)
    expected = torch.autograd.grad(whole(lambda: model(images)).square().sum(), images)[0]
    calls = spy(model)
    assert torch.equal(torch.autograd.grad(model(images).square().sum(), images)[0], expected)
    assert calls == every([3])
