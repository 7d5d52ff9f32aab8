"""Looks at abstract tokens against windows that are visited one at a time, without any padding."""

import math

import pytest
import torch
from torch import Tensor, nn

from broadsight.explanation.maps.tokens import AbstractTokenLooks, FusionLooks
from broadsight.layers import AbstractTokenAttention
from tests.compare import randomize
from tests.explanation.maps import collected
from tests.zoo import shallow


def looks_of(layer: nn.Module, x: Tensor):
    found = [collected.looks_of(kind, layer, x) for kind in (AbstractTokenLooks, FusionLooks)]
    return [{look.title: look for look in looks} for looks in found]


def weights(query: Tensor, key: Tensor) -> Tensor:
    """Mean over heads of softmax(q k / sqrt(d)); (N, h, d), (M, h, d) -> (N, M)."""
    return torch.stack([(query[:, i] @ key[:, i].T / math.sqrt(query.shape[2])).softmax(1) for i in range(4)]).mean(0)


@pytest.mark.parametrize("switches", [{}, dict(token_is_key=True, token_projected=True)])
@pytest.mark.parametrize("size", [(6, 9), (4, 7), (2, 2)])
def test_looks__agree_with_windows_one_at_a_time(switches, size):
    torch.manual_seed(0)
    layer = randomize(AbstractTokenAttention(8, 4, 3, **switches).double())
    x = 2 * torch.randn(1, *size, 8, dtype=torch.float64)
    tokens, fusion = looks_of(layer, x)
    token = layer.token.view(1, 8)
    q, k, v = (part.unflatten(-1, (4, 2)) for part in layer.qkv(x[0]).chunk(3, -1))  # each H W heads 2
    asked, as_key, as_value = layer.qkv(token).view(3, 1, 4, 2) if switches else token.view(1, 4, 2).expand(3, 1, 4, 2)
    corners = [(i, j) for i in range(0, size[0], 3) for j in range(0, size[1], 3)]
    summaries = []
    for i, j in corners:
        part = slice(i, i + 3), slice(j, j + 3)
        keys, values = k[part].flatten(0, 1), v[part].flatten(0, 1)
        shape, count = k[part].shape[:2], len(keys)
        if switches:
            keys, values = torch.cat([keys, as_key]), torch.cat([values, as_value])
        expected = weights(asked, keys)[0, :count].view(shape)
        torch.testing.assert_close(tokens["in its window"].values[part], expected.float())
        per_head = torch.einsum("qhd,khd->hqk", asked, keys) / math.sqrt(2)
        summaries.append(torch.einsum("hqk,khd->qhd", per_head.softmax(-1), values).view(8))
    summary = torch.stack(summaries)
    q_mix, k_mix, v_mix = (part.unflatten(-1, (4, 2)) for part in layer.mix_qkv(summary).chunk(3, -1))
    per_head = torch.einsum("qhd,khd->hqk", q_mix, k_mix) / math.sqrt(2)
    mixed = layer.mix_proj(torch.einsum("hqk,khd->qhd", per_head.softmax(-1), v_mix).reshape(-1, 8))
    received = weights(q_mix, k_mix).mean(0)
    handed = weights(q.flatten(0, 1), layer.fuse_kv(mixed)[:, :8].unflatten(-1, (4, 2)))  # H*W windows
    largest = handed.max(1)
    assert fusion["window of most attention"].values.equal(largest.indices.view(size))
    torch.testing.assert_close(fusion["largest attention"].values, largest.values.view(size).float())
    for number, (i, j) in enumerate(corners):
        part = slice(i, i + 3), slice(j, j + 3)
        for look, expected in ((tokens["received in the mixing"], received), (fusion["received"], handed.mean(0))):
            torch.testing.assert_close(look.values[part], expected[number].float().expand(look.values[part].shape))
    assert all(look.values.shape == size for look in (*tokens.values(), *fusion.values()))


def test_looks__by_hand():
    layer = AbstractTokenAttention(1, 1, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.token.fill_(1.0)
        layer.qkv.weight[1] = 1.0  # the key of a pixel is its value, all else is zero
    x = torch.log(torch.tensor([[1.0, 3.0, 1.0], [2.0, 2.0, 4.0], [5.0, 5.0, 9.0]])).view(1, 3, 3, 1)
    tokens, fusion = looks_of(layer, x)
    expected = torch.tensor([[1 / 8, 3 / 8, 1 / 5], [2 / 8, 2 / 8, 4 / 5], [5 / 10, 5 / 10, 1.0]])
    torch.testing.assert_close(tokens["in its window"].values, expected)
    torch.testing.assert_close(fusion["received"].values, torch.full((3, 3), 0.25))


def test_looks__a_few_rows_at_a_time_are_the_same(monkeypatch):
    torch.manual_seed(0)
    layer = randomize(AbstractTokenAttention(8, 4, 3))
    x = torch.randn(1, 7, 8, 8)
    whole = looks_of(layer, x)
    monkeypatch.setattr("broadsight.inspection.attention_rows.WEIGHTS_BYTES", 1)
    for one, other in zip(whole, looks_of(layer, x), strict=True):
        assert one.keys() == other.keys()
        for title, look in one.items():
            torch.testing.assert_close(look.values, other[title].values)


def test_suits__only_layers_with_abstract_tokens():
    model = shallow("mat_1").eval()
    assert AbstractTokenLooks.suits(model) and FusionLooks.suits(model)
    assert not FusionLooks.suits(shallow("mat_1", mixer="window", device="meta"))
    found = collected.looks_of(FusionLooks, model, torch.randn(1, 3, 96, 64), size=(96, 64))
    assert [look.depth for look in found] == [0, 0, 0, 1, 1, 1]
    assert {look.layer for look in found} == {"stages.2.blocks.0.attn", "stages.3.blocks.0.attn"}
    assert found[0].values.shape == (6, 4)
