"""The channel MLP in slices against its own sub-modules called one by one."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from broadsight.layers import ChannelMlp
from broadsight.layers.kernels import sliced_mlp
from tests.compare import assert_close, assert_equal_to, saved_bytes
from tests.refusals import refused

DEPTHWISE = ("none", "before", "after")


def plain(mlp: ChannelMlp, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """The composition that the docstring states, on the stored weights alone."""

    def convolve(u: Tensor) -> Tensor:
        weight = mlp.dw.weight
        y = nn.functional.conv2d(u.permute(0, 3, 1, 2), weight, mlp.dw.bias, padding=1, groups=len(weight))
        return y.permute(0, 2, 3, 1)

    u = mlp.fc1(x)
    u = nn.functional.gelu(convolve(u) if mlp.depthwise == "before" else u)
    y = mlp.fc2(u + convolve(u) if mlp.depthwise == "after" else u)
    return y if residual is None else residual + y


@pytest.fixture(params=["one image a slice", "two images a slice", "all at once"])
def slices(request, monkeypatch):
    size = {"one image a slice": 1, "two images a slice": 2 * 5 * 7 * 10 * 8, "all at once": 1 << 30}
    monkeypatch.setattr(sliced_mlp, "SLICE_BYTES", size[request.param])


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("depthwise", DEPTHWISE)
def test_forward__equals_its_sub_modules_in_value_and_gradient(depthwise, bias, residual, slices):
    mlp = ChannelMlp(6, 10, depthwise=depthwise, bias=bias).double()
    inputs = torch.randn(1 + residual, 3, 5, 7, 6, dtype=torch.float64).unbind()
    assert len(list(mlp.parameters())) == (2 + (depthwise != "none")) * (1 + bias)
    assert_equal_to(plain, mlp, *inputs, tolerance=1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("depthwise", DEPTHWISE)
def test_forward__wide_weights_take_other_products_in_single_precision_unless_they_are_counted(
    depthwise, bias, slices, monkeypatch
):
    monkeypatch.setattr(sliced_mlp, "WIDE", 59)
    mlp, inputs = ChannelMlp(6, 10, depthwise=depthwise, bias=bias), torch.randn(2, 3, 5, 7, 6).unbind()
    assert_equal_to(plain, mlp, *inputs, tolerance=1e-5)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mlp(*inputs)
    assert counter.get_total_flops() == 3 * 5 * 7 * 10 * 2 * (6 + 6 + 9 * (depthwise != "none"))


@pytest.mark.parametrize("size", [(1, 1), (1, 6), (2, 3)])
@pytest.mark.parametrize("depthwise", DEPTHWISE)
def test_forward__maps_smaller_than_the_kernel_and_strided_inputs(depthwise, size):
    mlp = ChannelMlp(4, 8, depthwise=depthwise).double()
    assert_equal_to(plain, mlp, torch.randn(2, *size, 4, dtype=torch.float64), tolerance=1e-12)
    # Maps that are channels-first in memory, as after a permuted norm.
    x, residual = torch.randn(2, 3, 4, *size, dtype=torch.float64).permute(0, 1, 3, 4, 2)
    torch.testing.assert_close(mlp(x, residual), plain(mlp, x, residual), rtol=0, atol=1e-12)


@pytest.mark.parametrize("depthwise", DEPTHWISE)
def test_forward__leaves_its_inputs_alone_and_is_the_same_without_gradient(depthwise, slices):
    mlp, inputs = ChannelMlp(6, 10, depthwise=depthwise), torch.randn(2, 3, 5, 7, 6)
    before, expected = inputs.clone(), mlp(*inputs)
    assert expected.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(mlp(*inputs), expected, rtol=0, atol=1e-6)
    assert torch.equal(inputs, before)


@pytest.mark.parametrize("frozen", ["fc1", "dw", "fc2", "bias", "weight", ""])
@pytest.mark.parametrize("depthwise", DEPTHWISE)
def test_backward__frozen_parameters(depthwise, frozen):
    mlp = ChannelMlp(6, 10, depthwise=depthwise).double()
    for name, parameter in mlp.named_parameters():
        parameter.requires_grad_(frozen not in name)  # the empty name is in all: only the input is differentiated
    assert_equal_to(plain, mlp, torch.randn(2, 3, 5, 6, dtype=torch.float64), tolerance=1e-12)


def test_backward__input_without_gradient_and_gradients_of_single_images():
    mlp = ChannelMlp(6, 10, depthwise="after").double()
    x, residual = torch.randn(2, 2, 3, 5, 6, dtype=torch.float64)
    results = [function(x, residual).square().sum() for function in (mlp, partial(plain, mlp))]
    got, expected = (torch.autograd.grad(result, list(mlp.parameters())) for result in results)
    for gradient, other in zip(got, expected, strict=True):
        assert_close(gradient, other, "gradient", 1e-12)
    mlp = ChannelMlp(6, 10, depthwise="after").double()
    parameters = {name: p.detach() for name, p in mlp.named_parameters()}
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)

    def loss(parameters, image):
        return torch.func.functional_call(mlp, parameters, (image[None],)).square().sum()

    singles = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i, image in enumerate(x):
        expected = torch.autograd.grad(plain(mlp, image[None]).square().sum(), list(mlp.parameters()))
        for (name, gradient), other in zip(singles.items(), expected, strict=True):
            assert_close(gradient[i], other, name, 1e-12)


@pytest.mark.parametrize("part", ["fc1", "act", "dw", "fc2"])
def test_hooks__on_a_sub_module_see_the_whole_batch_and_may_change_its_output(part):
    mlp, seen = ChannelMlp(6, 10, depthwise="after"), []
    y = x = torch.randn(5, 3, 5, 6)
    untouched = mlp(x)
    for name in ("fc1", "act", "dw", "fc2"):
        y = mlp.get_submodule(name).forward(y) * (name != part)
    with getattr(mlp, part).register_forward_hook(lambda _, inputs, output: seen.append(len(output)) or output * 0):
        torch.testing.assert_close(mlp(x), y)
    torch.testing.assert_close(mlp(x), untouched)
    assert seen == [5]


@pytest.mark.parametrize("kind", ["forward_pre", "full_backward", "full_backward_pre"])
def test_hooks__of_every_kind_are_called(kind):
    mlp, calls = ChannelMlp(6, 10), []
    getattr(mlp.fc1, f"register_{kind}_hook")(lambda *_: calls.append(kind))
    mlp(torch.randn(2, 3, 5, 6, requires_grad=True)).sum().backward()
    assert calls == [kind]


def test_hooks__for_all_modules_see_the_sub_modules():
    mlp, seen = ChannelMlp(6, 10), []
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module))):
        mlp(torch.randn(2, 3, 5, 6))
    assert seen == [nn.Linear, nn.GELU, nn.Linear, ChannelMlp]


class Doubled(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x)


def with_a_forward_of_its_own(layer: nn.Module) -> nn.Module:
    original = layer.forward
    layer.forward = lambda x: 2 * original(x)
    return layer


def parametrized(layer: nn.Module) -> nn.Module:
    for name in ("weight", "bias"):
        nn.utils.parametrize.register_parametrization(layer, name, Doubled(nn.Identity()))
    return layer


@pytest.mark.parametrize("name", ["fc1", "fc2"])
@pytest.mark.parametrize("replace", [Doubled, with_a_forward_of_its_own, parametrized])
def test_replaced_sub_module__is_called(replace, name):
    mlp, x = ChannelMlp(6, 10), torch.randn(2, 3, 5, 6)
    expected = 2 * mlp(x) if name == "fc2" else mlp.fc2(mlp.act(2 * mlp.fc1(x)))
    setattr(mlp, name, replace(getattr(mlp, name)))
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("act", [nn.ReLU(), nn.GELU("tanh"), nn.Identity()])
def test_replaced_sub_module__is_called__activation(act):
    mlp, x = ChannelMlp(6, 10).double(), torch.randn(2, 3, 5, 6, dtype=torch.float64)
    mlp.act = act
    torch.testing.assert_close(mlp(x), mlp.fc2(act(mlp.fc1(x))), rtol=0, atol=1e-12)


@pytest.mark.parametrize("depthwise", DEPTHWISE)
def test_autocast__is_the_plain_form_in_the_narrow_type(depthwise):
    mlp = ChannelMlp(6, 10, depthwise=depthwise)
    x = torch.randn(2, 3, 5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = mlp(x), plain(mlp, x)
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("depthwise", DEPTHWISE)
def test_saved_for_backward__is_the_input_and_one_hidden_map(depthwise):
    mlp = ChannelMlp(8, 32, depthwise=depthwise)
    x = torch.randn(2, 16, 16, 8, requires_grad=True)
    hidden, weights = 2 * 16 * 16 * 32, sum(p.numel() for p in mlp.parameters())
    ours, theirs = saved_bytes(lambda: mlp(x)), saved_bytes(lambda: plain(mlp, x))
    assert ours <= 4 * (x.numel() + hidden + weights)
    assert theirs - ours >= 4 * hidden * (1 if depthwise == "none" else 2) - 4 * weights


def test_wrong_depthwise__is_refused():
    refused("unknown depthwise 'inside'; expected one of none, before, after", ChannelMlp, 4, 8, depthwise="inside")
