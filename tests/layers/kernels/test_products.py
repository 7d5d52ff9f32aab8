"""Products of many rows with weights against the plain formulas, with their gradients and how these lie in memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from broadsight.layers.kernels.products import GroupProduct, MapProduct, MiddleSample, group_product, map_product
from tests.compare import assert_close


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def plain_group_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.einsum("gni,goi->gno", x, weight)
    return product if bias is None else product + bias


def plain_map_product(x: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
    product = torch.einsum("bin,oi->bno", x, weight)
    return product if onto is None else product + onto


def group_inputs(with_bias: bool = False) -> list[Tensor]:
    return [numbers(3, 4, 5), numbers(3, 2, 5)] + [numbers(3, 1, 2)] * with_bias


def map_inputs(with_onto: bool = False, channels_last: bool = False) -> list[Tensor]:
    x = numbers(2, 4, 3).mT if channels_last else numbers(2, 3, 4)
    return [x.detach().requires_grad_(), numbers(5, 3)] + [numbers(2, 4, 5)] * with_onto


CASES = {
    "groups": (group_product, plain_group_product, group_inputs),
    "groups, bias": (group_product, plain_group_product, lambda: group_inputs(True)),
    "map": (map_product, plain_map_product, map_inputs),
    "map, onto": (map_product, plain_map_product, lambda: map_inputs(True)),
    "map, channels last": (map_product, plain_map_product, lambda: map_inputs(True, True)),
}
each_case = pytest.mark.parametrize(("ours", "plain", "draw"), CASES.values(), ids=CASES)


def assert_same_gradients(ours: Tensor, plain: Tensor, inputs: list[Tensor]) -> None:
    cotangent = torch.randn_like(plain)
    got = torch.autograd.grad(ours, inputs, cotangent)
    for i, (one, other) in enumerate(zip(got, torch.autograd.grad(plain, inputs, cotangent), strict=True)):
        assert_close(one, other, f"gradient of input {i}", 1e-13)


@each_case
def test_product__value_and_gradients(ours, plain, draw):
    inputs = draw()
    got, expected = ours(*inputs), plain(*inputs)
    assert_close(got, expected, tolerance=1e-13)
    assert_same_gradients(got, expected, inputs)
    assert gradcheck(ours, inputs) and gradgradcheck(ours, inputs)
    assert gradgradcheck(lambda *inputs: ours(*inputs).pow(3), inputs)  # linear in none of the inputs
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with without_gradients():
            assert_close(ours(*inputs), expected.detach(), tolerance=1e-13)


@each_case
@pytest.mark.parametrize("wanted", [None, 0, 1])
def test_product__whatever_wants_a_gradient(ours, plain, draw, wanted):
    inputs = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(draw())]
    got, expected = ours(*inputs), plain(*inputs)
    assert_close(got, expected, tolerance=1e-13)
    assert got.requires_grad == (wanted is not None)
    if wanted is not None:
        assert_same_gradients(got, expected, [inputs[wanted]])


@each_case
def test_product__for_each_example(ours, plain, draw):
    """Gradients under vmap, as torch.func takes them for every image of a batch."""

    def gradient(product):
        loss = lambda *inputs: product(*inputs).square().sum()  # noqa: E731
        return torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(len(inputs[0])))))

    inputs = [[x.detach() for x in draw()] for _ in range(3)]
    stacked = [torch.stack(parts) for parts in zip(*inputs, strict=True)]
    for one, other in zip(gradient(ours)(*stacked), gradient(plain)(*stacked), strict=True):
        assert_close(one, other, tolerance=1e-12)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@each_case
def test_product__autocast_keeps_the_gradients_precision(ours, plain, draw, kept):
    inputs = [x.detach().to(kept).requires_grad_() for x in draw()]
    with torch.autocast("cpu", torch.bfloat16):
        got = ours(*inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = plain(*exact)
    assert_close(got.double(), expected, tolerance=0.03)
    gradients = torch.autograd.grad(got.float().sum(), inputs)
    assert [g.dtype for g in gradients] == [kept] * len(inputs)
    for one, other in zip(gradients, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert_close(one.double(), other, tolerance=0.03)


@pytest.mark.parametrize(
    ("product", "draw"),
    [(group_product, group_inputs), (map_product, map_inputs), (map_product, lambda: map_inputs(channels_last=True))],
)
def test_layout__gradients_lie_as_their_tensors(product, draw):
    inputs = draw()
    result = product(*inputs)
    # Not the cotangent of a sum, which has no strides of its own.
    gradients = torch.autograd.grad(result, inputs, torch.randn_like(result))
    assert [x.stride() for x in gradients] == [x.stride() for x in inputs]


def test_layout__of_torchs_own_gradient_is_another_and_of_samples_that_of_their_maps():
    x, weight = group_inputs()
    _, transposed = torch.autograd.grad(torch.bmm(x, weight.mT), [x, weight], torch.randn(3, 4, 2).double())
    assert transposed.stride() != weight.stride()  # what the function is for
    for ratio in (2, 4):
        x = numbers(2, 3, 2 * ratio, 5 * ratio)
        sampled = MiddleSample.apply(x, ratio)
        (gradient,) = torch.autograd.grad(sampled, x, torch.randn_like(sampled))
        assert sampled.shape == (2, 3, 2, 5) and gradient.stride() == x.stride()


@pytest.mark.parametrize(
    ("function", "plain", "inputs"),
    [
        (GroupProduct, plain_group_product, (numbers(4, 3, 10)[:, :, ::2].mT, numbers(3, 4, 2).permute(1, 2, 0))),
        (MapProduct, plain_map_product, (numbers(2, 3, 8)[..., ::2], numbers(3, 5).mT)),
    ],
)
def test_layout__strided_inputs_are_read_right(function, plain, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    assert not any(x.is_contiguous() for x in inputs)
    got, expected = function.apply(*inputs), plain(*inputs)
    assert_close(got, expected, tolerance=1e-13)
    assert_same_gradients(got, expected, inputs)


@pytest.mark.parametrize("grid", [(1, 1), (3, 2), (2, 5)])
@pytest.mark.parametrize("ratio", [2, 4, 6, 8])
def test_middle_sample__is_bilinear_resizing(ratio, grid):
    x = numbers(2, 3, grid[0] * ratio, grid[1] * ratio)
    got = MiddleSample.apply(x, ratio)
    expected = F.interpolate(x, grid, mode="bilinear", align_corners=False)
    assert_close(got, expected, tolerance=1e-13)
    assert_same_gradients(got, expected, [x])
    x = torch.arange(32.0).view(1, 1, 4, 8)
    assert MiddleSample.apply(x, 4).tolist() == [[[[(9 + 10 + 17 + 18) / 4, (13 + 14 + 21 + 22) / 4]]]]


@pytest.mark.parametrize("ratio", [2, 4, 6])
def test_middle_sample__numerical_gradients_twice_and_for_each_example(ratio):
    x = numbers(3, 1, 2, ratio, 2 * ratio)
    assert gradcheck(lambda x: MiddleSample.apply(x, ratio), x[0].detach().requires_grad_())
    assert gradgradcheck(lambda x: MiddleSample.apply(x, ratio).pow(3), x[0].detach().requires_grad_())
    gradient = torch.func.grad(lambda x: MiddleSample.apply(x, ratio).pow(3).sum())
    x = x.detach()
    assert_close(torch.func.vmap(gradient)(x), torch.stack([gradient(one) for one in x]), tolerance=1e-13)


def test_map_product__half_precision_does_not_round_after_each_image():
    x, weight, gradient = torch.randn(64, 8, 4).bfloat16(), numbers(6, 8).bfloat16(), torch.randn(64, 4, 6).bfloat16()
    (got,) = torch.autograd.grad(MapProduct.apply(x, weight), weight, gradient)
    expected = torch.einsum("bno,bin->oi", gradient.double(), x.double())
    assert ((got - expected).norm() / expected.norm()).item() < 0.003  # rounded once: 0.0017
