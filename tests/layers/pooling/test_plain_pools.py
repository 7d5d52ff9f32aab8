"""The poolings that MAP is compared with, against torch's own operations."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from broadsight.layers import AveragePool, FlattenPool, FourierPool
from tests.compare import assert_close, randomize
from tests.refusals import refused

CHANNELS = (4, 6, 10)
CLASSES = 7

POOLS = {
    "average": partial(AveragePool, CHANNELS, CLASSES),
    "average, normed": partial(AveragePool, CHANNELS, CLASSES, norm=True),
    "flatten": partial(FlattenPool, CHANNELS, CLASSES, grid=(3, 2)),
    "flatten, wide": partial(FlattenPool, CHANNELS, CLASSES, grid=(3, 2), hidden=13),
    "fourier": partial(FourierPool, CHANNELS, CLASSES),
    "fourier, wide": partial(FourierPool, CHANNELS, CLASSES, frequencies=3, hidden=13),
}
average, flatten, fourier = POOLS["average"], POOLS["flatten"], POOLS["fourier"]
each_pool = pytest.mark.parametrize("make", POOLS.values(), ids=POOLS)


def maps(height: int = 6, width: int = 4, batch: int = 3, dtype=torch.float64) -> list[Tensor]:
    """Lowest level first, each half as large as the one before."""
    sizes = [(height << i, width << i) for i in (2, 1, 0)]
    return [torch.randn(batch, c, *size, dtype=dtype) for c, size in zip(CHANNELS, sizes, strict=True)]


def drawn(make, **options) -> nn.Module:
    return randomize(make(**options)).double().eval()


@each_pool
def test_pool__classifies_the_last_map_alone_and_takes_a_new_classifier(make):
    pool, features = drawn(make), maps()
    pooled = pool(features, pre_logits=True)
    assert pooled.shape == (3, pool.num_features)
    assert_close(pool(features), F.linear(pooled, pool.fc.weight, pool.fc.bias), tolerance=1e-12)
    assert pool.merge_maps(features) is features[-1]
    assert torch.equal(pool.classify(features[-1]), pool(features))
    assert torch.equal(pool([torch.full_like(x, torch.nan) for x in features[:-1]] + features[-1:]), pool(features))
    assert not torch.allclose(pool([*features[:-1], features[-1].flip(1)]), pool(features))
    pool, features = drawn(make), maps()
    pooled, before = pool(features, pre_logits=True), pool.fc.weight
    pool.reset_classifier(5)
    weight = pool.fc.weight
    assert pool.num_classes == 5 and weight is not before
    assert weight.dtype == torch.float64 and weight.shape == (5, pool.num_features)
    assert weight.std().item() == pytest.approx(0.02, rel=0.5) and not pool.fc.bias.any()
    assert_close(pool(features), F.linear(pooled, weight), tolerance=1e-12)
    pool.reset_classifier(0)
    assert pool.num_classes == 0 and torch.equal(pool(features), pooled)
    pool.reset_classifier(CLASSES)
    assert pool(features).shape == (3, CLASSES) and pool.fc.weight.dtype == torch.float64


@each_pool
def test_pool__every_parameter_receives_a_gradient_and_dropout_acts_in_training_alone(make):
    pool = drawn(make).train()
    pool(maps()).square().sum().backward()
    assert [name for name, p in pool.named_parameters() if p.grad is None or not p.grad.abs().max() > 0] == []
    pool, features = drawn(make, drop=0.5), maps(batch=8)
    seen = []
    pool.fc.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    pool(features)
    pool.train()(features)
    whole, dropped = (x[seen[0] != 0] for x in seen)
    assert whole.numel() > 20 and 0.2 < (dropped == 0).double().mean() < 0.8


@each_pool
def test_pool__takes_any_memory_format_and_half_precision_but_no_wrong_maps(make):
    pool, features = drawn(make), maps()
    refused(r"2 feature maps; expected a list of 3 maps with \(4, 6, 10\) channels", pool, features[1:])
    refused(r"one tensor; expected a list of 3 maps", pool, features[-1])
    refused(r"expected \(B, C, H, W\) with C = \(4, 6, 10\)", pool, features[::-1])
    pool, features = drawn(make), maps()
    last, expected = [x.contiguous(memory_format=torch.channels_last) for x in features], pool(features)
    assert last[-1].stride() != features[-1].stride()
    assert_close(pool(last), expected, tolerance=1e-12)
    half = pool.bfloat16()([x.bfloat16() for x in features])
    assert half.dtype == torch.bfloat16
    assert_close(half.double(), expected, tolerance=0.05)


@pytest.mark.parametrize("size", [(1, 1), (6, 4), (5, 9)])
def test_average__by_hand(size):
    x = torch.randn(2, 10, *size, dtype=torch.float64)
    pool, normed, features = drawn(average), drawn(average, norm=True), [*maps(batch=2)[:-1], x]
    mean = x.sum((2, 3)) / (size[0] * size[1])
    assert pool.num_features == 10 and isinstance(pool.norm, nn.Identity)
    assert_close(pool(features), mean @ pool.fc.weight.mT + pool.fc.bias, tolerance=1e-12)
    centred = mean - mean.mean(1, keepdim=True)
    scaled = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()
    expected = scaled * normed.norm.weight + normed.norm.bias
    assert_close(normed(features, pre_logits=True), expected, tolerance=1e-12)


@pytest.mark.parametrize("hidden", [None, 13])
def test_flatten__by_hand(hidden):
    pool, x = drawn(flatten, hidden=hidden), maps(3, 2)[-1]
    first = (x.reshape(3, 60) @ pool.fc1.weight.mT + pool.fc1.bias).clamp(min=0)
    second = (first @ pool.fc2.weight.mT + pool.fc2.bias).clamp(min=0)
    assert pool.num_features == (hidden or 10) and second.any()
    assert_close(pool.pool(x), second, tolerance=1e-12)


@pytest.mark.parametrize("size", [(6, 4), (9, 8), (7, 5), (1, 1), (2, 9)])
def test_flatten__other_grids_are_averaged_to_its_own(size):
    pool, x = drawn(flatten), torch.randn(2, 10, *size, dtype=torch.float64)
    grid = torch.empty(2, 10, 3, 2, dtype=torch.float64)
    for i, j in product(range(3), range(2)):
        rows = slice(i * size[0] // 3, -(-(i + 1) * size[0] // 3))
        columns = slice(j * size[1] // 2, -(-(j + 1) * size[1] // 2))
        grid[:, :, i, j] = x[:, :, rows, columns].mean((2, 3))
    assert_close(pool.pool(x), pool.pool(grid), tolerance=1e-12)


@pytest.mark.parametrize("frequencies", [1, 3, 4])
@pytest.mark.parametrize("size", [(4, 4), (7, 7), (5, 8), (14, 9), (1, 1), (2, 3), (3, 1)])
def test_fourier__magnitudes_and_gradients_are_those_of_the_transform(size, frequencies):
    pool = drawn(fourier, frequencies=frequencies)
    x = torch.randn(2, 10, *size, dtype=torch.float64, requires_grad=True)
    # Frequencies beyond those of the map are the map's own, again from the start.
    rows, columns = ([f % length for f in range(frequencies)] for length in size)
    expected = torch.fft.fft2(x)[:, :, rows][..., columns].abs() / (size[0] * size[1])
    assert expected.max() > 0.1
    got, cotangent = pool.magnitudes(x), torch.randn_like(expected)
    assert_close(got, expected, "magnitudes", 1e-6)  # the waves are computed in float32
    hidden = (expected.reshape(2, -1) @ pool.fc1.weight.mT + pool.fc1.bias).clamp(min=0)
    assert_close(pool.pool(x), hidden, "pooled", 1e-6)
    gradients = [torch.autograd.grad(y, x, cotangent)[0] for y in (got, expected)]
    assert_close(*gradients, "gradient", 1e-5)


@pytest.mark.parametrize("shift", [(1, 0), (0, 3), (4, 2)])
def test_fourier__shifting_round_the_edge_changes_nothing(shift):
    pool, features = drawn(fourier), maps(7, 6)
    shifted = [*features[:-1], features[-1].roll(shift, (2, 3))]
    assert not torch.allclose(shifted[-1], features[-1])
    assert_close(pool(shifted), pool(features), tolerance=1e-5)
    mirrored = [*features[:-1], features[-1].flip(2)]
    assert not torch.allclose(pool(mirrored), pool(features), rtol=1e-2)  # it does see the image


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fourier__gradients_are_finite_where_there_is_nothing(dtype):
    """At zero the magnitude has no gradient; constant maps are zero at all frequencies but the lowest."""
    pool = drawn(fourier).to(dtype)
    for x in (torch.zeros(2, 10, 6, 6, dtype=dtype), torch.ones(2, 10, 6, 6, dtype=dtype)):
        x.requires_grad_()
        magnitudes = pool.magnitudes(x)
        magnitudes.sum().backward()
        assert magnitudes.isfinite().all() and x.grad.isfinite().all()
        assert magnitudes[:, :, 1:].max() < 1e-2


def test_fourier__constant_map_by_hand():
    magnitudes = drawn(fourier).magnitudes(torch.full((1, 10, 5, 7), -3.0, dtype=torch.float64))
    expected = torch.zeros(1, 10, 4, 4, dtype=torch.float64)
    expected[:, :, 0, 0] = 3
    assert_close(magnitudes, expected, tolerance=1e-6)


@torch.no_grad()
def test_fourier__float16_keeps_small_magnitudes():
    pool, x = fourier().half(), (1e-3 * torch.randn(2, CHANNELS[-1], 6, 4)).half()
    assert_close(pool.magnitudes(x).double(), pool.magnitudes(x.double()), tolerance=1e-2)
