"""The neck changes nothing at first, then tells every stage what its tokens saw."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from broadsight.layers import MultiTokenNeck
from tests.compare import assert_close, randomize
from tests.refusals import refused

CHANNELS = (8, 12, 20, 24)
SIZES = ((24, 36), (12, 18), (6, 9), (3, 5))


def stages(batch: int = 2, sizes=SIZES, dtype=torch.float64) -> list[torch.Tensor]:
    pairs = zip(CHANNELS, sizes, strict=True)
    return [torch.randn(batch, channels, *size, dtype=dtype).requires_grad_() for channels, size in pairs]


def neck(**options) -> MultiTokenNeck:
    return MultiTokenNeck(CHANNELS, **{"dim": 32, "heads": 4, **options}).double()


def by_hand(neck: MultiTokenNeck, features: list[torch.Tensor]) -> list[torch.Tensor]:
    """One group, learned tokens, eval mode: written from the spec's text, with keys and values formed."""
    block, merge = neck.block, neck.merge
    grid = features[2].shape[-2:]
    resized = []
    for x in features:
        if x.shape[-2] > grid[0]:
            x = F.interpolate(x, grid, mode="bilinear", align_corners=False)
        elif x.shape[-2] < grid[0]:
            x = F.adaptive_avg_pool2d(x, grid)
        resized.append(x)
    merged = F.conv2d(torch.cat(resized, 1), merge.weight[:, :, None, None])
    norm = merge.norm
    merged = F.batch_norm(merged, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
    image = F.gelu(merged).flatten(2).mT
    B, n, D = image.shape
    tokens = neck.learned.expand(B, -1, -1)
    normed = F.layer_norm(torch.cat([tokens, image], 1), (D,), block.norm1.weight, block.norm1.bias, 1e-6)

    def heads(layer, x):
        return F.linear(x, layer.weight[0], layer.bias).unflatten(-1, (block.heads, -1)).transpose(1, 2)

    q, k, v = heads(block.q, normed[:, : tokens.shape[1]]), heads(block.k, normed), heads(block.v, normed)
    attention = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    found = (attention @ v).transpose(1, 2).flatten(2)
    tokens = tokens + F.linear(found, block.proj.weight[0], block.proj.bias)
    hidden = F.layer_norm(tokens, (D,), block.norm2.weight, block.norm2.bias, 1e-6)
    hidden = F.relu(F.linear(hidden, block.mlp.fc1.weight[0], block.mlp.fc1.bias))
    tokens = tokens + F.linear(hidden, block.mlp.fc2.weight[0], block.mlp.fc2.bias)
    parts = [tokens[:, 2 * i : 2 * i + 2].mean(1) for i in range(4)]
    return [x + neck.to_stages[i](neck.norms[i](parts[i]))[:, :, None, None] for i, x in enumerate(features)]


@pytest.mark.parametrize(
    "options",
    [{}, dict(groups=2, tokens=4), dict(gram=True, tokens=4), dict(norm="group"), dict(norm="frozen"), dict(level=1)],
    ids=str,
)
def test_neck__is_an_identity_at_first(options):
    features = stages(4)
    for mode in (True, False):
        for before, after in zip(features, neck(**options).train(mode)(features), strict=True):
            assert torch.equal(before, after)


def test_neck__equals_the_text_for_lists_and_dicts():
    ours = randomize(neck()).eval()
    features = stages()
    for i, (got, expected) in enumerate(zip(ours(features), by_hand(ours, features), strict=True)):
        assert not torch.equal(expected, features[i])
        assert_close(got, expected, f"stage {i}", 1e-10)
    ours, features = randomize(neck()).eval(), OrderedDict(zip("abcd", stages(), strict=True))
    told = ours(features)
    assert isinstance(told, OrderedDict) and list(told) == list("abcd")
    assert all(map(torch.equal, told.values(), ours(list(features.values()))))


def test_neck__gradient_reaches_every_stage_through_the_tokens():
    assert neck().learned.std(1).min() > 0  # the tokens of a stage differ
    ours = randomize(neck(groups=2, tokens=4))
    features = stages()
    for i in range(4):
        gradients = torch.autograd.grad(ours.stage_vectors(features)[i].sum(), features)
        assert all(gradient.abs().sum() > 0 for gradient in gradients)
    sum(x.square().sum() for x in ours(features)).backward()
    assert [name for name, p in ours.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    "sizes", [((1, 1),) * 4, ((33, 50), (17, 25), (9, 13), (5, 7)), ((64, 8), (32, 4), (16, 2), (8, 1))]
)
def test_neck__any_size(sizes):
    features = stages(sizes=sizes)
    for x, told in zip(features, randomize(neck()).eval()(features), strict=True):
        assert told.shape == x.shape and told.isfinite().all()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_neck__any_number_of_stages(count):
    channels = tuple(range(8, 8 + count))
    ours = MultiTokenNeck(channels, dim=32, tokens=2 * count)
    features = [torch.randn(2, width, 2 ** (5 - i), 2 ** (5 - i)) for i, width in enumerate(channels)]
    assert all(torch.equal(a, b) for a, b in zip(ours(features), features, strict=True))


def test_norm__frozen_keeps_its_statistics_and_group_sees_one_image():
    for norm, frozen in [("frozen", True), ("batch", False)]:
        ours = neck(norm=norm).train()
        ours(stages())
        assert ours.merge.norm.training != frozen and ours.merge.norm.running_mean.any() != frozen
    ours = randomize(neck(norm="group"))
    assert isinstance(ours.merge.norm, nn.GroupNorm)
    features = stages()
    alone = [ours([x[i : i + 1] for x in features]) for i in range(2)]
    for got, expected in zip(zip(*alone, strict=True), ours(features), strict=True):
        assert_close(torch.cat(got), expected, "map", 1e-10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(tokens=6), "tokens=6 .*4 stages.*multiple of 4"),
        (dict(norm="layer"), "unknown norm 'layer'.*group"),
        (dict(heads=5), "attn_dim=32.*heads=5"),
        (dict(level=4), "level=4.*4 feature maps"),
    ],
)
def test_neck__refuses_what_does_not_fit(options, words):
    refused(words, neck, **options)
    refused("3 feature maps; expected a list of 4", neck(), stages()[:3])
