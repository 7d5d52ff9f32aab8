"""Necks change nothing at first, then tell every stage what its tokens saw: a pool's own, or those of the neck."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from broadsight.layers import MultiTokenNeck, MultiTokenPool, PoolNeck
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


# ---- The tokens of a pool


def pool_neck(groups: int = 2, tokens: int = 4, **options) -> PoolNeck:
    sizes = dict(level=3, dim=32, heads=4, groups=groups, tokens=tokens)
    return PoolNeck(MultiTokenPool((6, *CHANNELS), 5, **{**sizes, **options}), CHANNELS).double()


def pooled(batch: int = 2) -> list[torch.Tensor]:
    """What the pool takes: the stages' maps and one of a stem."""
    return [torch.randn(batch, 6, 48, 72, dtype=torch.float64).requires_grad_(), *stages(batch)]


@pytest.mark.parametrize(
    ("groups", "tokens", "means"),
    [
        (2, 4, [0.5, 2.5, 4.5, 6.5]),  # ResNet's pool: two tokens a stage, the groups one after the other
        (4, 2, [0.5, 2.5, 4.5, 6.5]),
        (4, 3, [1, 4, 7, 10]),
        (5, 3, [1, 4.5, 8.5, 12.5]),  # three, and four in the others
        (1, 1, [0, 0, 0, 0]),  # CAP: one for all
        (2, 1, [0, 0, 1, 1]),
    ],
)
def test_pool_neck__stage_adds_the_mean_of_its_part_of_the_tokens(groups, tokens, means, monkeypatch):
    ours = pool_neck(groups, tokens, gram=False)
    numbers = torch.arange(groups * tokens, dtype=torch.float64).view(1, groups, tokens, 1)
    known = torch.cat([numbers, torch.full_like(numbers[:, :, :1], 99)], 2).expand(2, -1, -1, 32)  # and the average
    monkeypatch.setattr(ours.pool, "attended_tokens", lambda merged: known)
    for place, to in enumerate(ours.to_stages):
        nn.init.constant_(to.weight, 1 / 32)
        nn.init.constant_(to.bias, 10 * place)
    features = stages()
    for place, (x, told) in enumerate(zip(features, ours(features, pooled()), strict=True)):
        assert_close(told, x + means[place] + 10 * place, "map", 1e-12)


@pytest.mark.parametrize(
    "options", [{}, dict(gram=False, light=True), dict(tokens=1, groups=1, distill_tokens=1)], ids=str
)
def test_pool_neck__is_an_identity_at_first_and_every_weight_learns_on_one_image(options):
    ours = pool_neck(**options).train()
    assert not any("classifier" in name for name in ours.state_dict())
    features = stages(1)
    assert all(map(torch.equal, ours(features, pooled(1)), features))
    for to in ours.to_stages:
        nn.init.normal_(to.weight)
    kept = {name: value.clone() for name, value in ours.named_buffers()}
    seen = pooled(1)
    sum(x.square().sum() for x in ours(features, seen)).backward()
    assert [name for name, p in ours.named_parameters() if p.grad is None] == []
    assert all(x.grad.abs().sum() > 0 for x in seen)
    assert all(torch.equal(value, kept[name]) for name, value in ours.named_buffers())  # statistics of BatchNorms


def test_pool_neck__gram_tokens_of_a_fresh_pool_are_of_usual_size_and_trained_statistics_stay():
    ours = pool_neck()
    assert 0.5 < ours.pool.initial_tokens(ours.pool.merge_maps(pooled())).std() < 1.5
    pool = MultiTokenPool(CHANNELS, 5, level=2, dim=32, heads=4, groups=2, tokens=4)
    pool.gram.embed_norm.running_var.uniform_(0.5, 2)
    kept = pool.gram.embed_norm.running_var.clone()
    assert torch.equal(PoolNeck(pool, CHANNELS).pool.gram.embed_norm.running_var, kept)
