"""Looks at attention pooling against keys that are formed group by group and head by head."""

import re

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from broadsight.explanation.maps.tokens import PoolLooks
from broadsight.layers import MultiTokenPool
from broadsight.surgery.fusion import fuse
from broadsight.surgery.pooling import swap_pool
from tests.compare import randomize
from tests.explanation.maps import collected

USUAL = dict(level=-1, dim=12, groups=2, tokens=2, gram_groups=6, attn_dim=6, heads=3, mlp_ratio=1, drop=0.0)


def looks_of(model: nn.Module, *inputs):
    image = inputs[0] if isinstance(inputs[0], Tensor) else inputs[0][-1]  # a pool alone has the map for an image
    return collected.looks_of(PoolLooks, model, *inputs, size=(image.shape[-2], image.shape[-1]))


def weights(block, group: int, tokens: Tensor, image: Tensor) -> Tensor:
    """Soft-max weights (heads, Q, Q+n) of one group; tokens (Q, D), image (n, D). As the equations read."""
    scale, shift = block.norm1.weight.view(block.groups, -1)[group], block.norm1.bias.view(block.groups, -1)[group]
    normed = F.layer_norm(torch.cat([tokens, image]), tokens.shape[-1:], eps=1e-6) * scale + shift

    def project(layer, x: Tensor) -> Tensor:
        bias = layer.bias.view(block.groups, -1)[group]
        return (x @ layer.weight[group].T + bias).unflatten(-1, (block.heads, -1)).transpose(0, 1)

    query, key = project(block.q, normed[: len(tokens)]), project(block.k, normed)
    logits = query @ key.mT * query.shape[-1] ** -0.5
    if block.mix_before is not None:
        mixed = torch.einsum("ij,jqk->iqk", block.mix_before.weight[group], logits)
        logits = logits + mixed + block.mix_before.bias.view(block.groups, -1)[group][:, None, None]
    return logits.softmax(-1)


@pytest.mark.parametrize("changes", [{}, dict(head_mixing=True), dict(light=True), dict(distill_tokens=1, tokens=1)])
def test_looks__agree_with_formed_keys(changes):
    torch.manual_seed(0)
    pool = randomize(MultiTokenPool((12,), 5, **(USUAL | changes)).double()).eval()
    x = torch.randn(1, 12, 3, 5, dtype=torch.float64)
    found = {look.title: look for look in looks_of(pool, [x])}
    made = pool.initial_tokens(x)[0]  # G T D
    tokens = torch.cat([made, made.mean(1, keepdim=True)], 1)
    names = ["token 1", "token 2"] if "distill_tokens" not in changes else ["token 1", "distillation token 1"]
    asking = ["averaged token"] if changes.get("light") else names
    for group in range(2):
        expected = weights(pool.blocks[0], group, tokens[group], x[0].flatten(1).T).mean(0)  # Q Q+n
        rows = [2] if changes.get("light") else [0, 1]
        for row, name in zip(rows, asking, strict=True):
            look = found[f"group {group + 1}, {name}"]
            torch.testing.assert_close(look.values, expected[row, 3:].view(3, 5).float())
            (percent,) = re.findall(r"([\d.]+) %", look.note)
            assert float(percent) == pytest.approx(100 * expected[row, :3].sum().item(), abs=0.06)
            assert ("before the heads are mixed again" in look.note) == ("head_mixing" in changes)
        if len(rows) > 1:
            mean = found[f"group {group + 1}, mean"]
            torch.testing.assert_close(mean.values, expected[rows, 3:].mean(0).view(3, 5).float())
            assert "2 tokens that ask, the averaged one not among them" in mean.note
    assert len(found) == (3 if changes.get("light") else 7)
    both = torch.stack([found[f"group {g}, {name}"].values for g in (1, 2) for name in asking]).mean(0)
    torch.testing.assert_close(found["all groups, mean"].values, both)


def test_looks__uniform_by_hand():
    pool = MultiTokenPool((12,), 5, **(USUAL | dict(gram=False))).eval()
    nn.init.zeros_(pool.blocks[0].q.weight)  # with it and its bias, every query is zero: 3 tokens and 8 places alike
    for look in looks_of(pool, [torch.randn(1, 12, 2, 4)]):
        torch.testing.assert_close(look.values, torch.full((2, 4), 1 / 11))
        assert "27.3 %" in look.note


def test_looks__every_layer_asks_and_folded_pools_look_alike():
    torch.manual_seed(0)
    pool = randomize(MultiTokenPool((12, 7), 5, **(USUAL | dict(layers=2, level=0)))).eval()
    maps = [torch.randn(1, 12, 4, 6), torch.randn(1, 7, 2, 3)]
    found = looks_of(pool, maps)
    assert [look.layer for look in found] == ["blocks.0"] * 9 + ["blocks.1"] * 7
    assert [look.depth for look in found] == [0] * 9 + [1] * 7
    assert sum("averaged token" in look.title for look in found if look.depth == 0) == 2
    assert {tuple(look.values.shape) for look in found} == {(2, 3)}
    for look, other in zip(found, looks_of(fuse(pool), maps), strict=True):
        torch.testing.assert_close(look.values, other.values, rtol=1e-4, atol=1e-6)
        assert (look.title, look.layer) == (other.title, other.layer)


@pytest.mark.parametrize("pool", ["map-light", "cap"])
def test_looks__of_any_pool_with_attention_in_any_model(pool):
    backbone = timm.create_model("resnet10t", num_classes=0)
    model = swap_pool(backbone, pool=pool, num_classes=5, **({} if pool == "cap" else dict(dim=24, heads=2))).eval()
    found = looks_of(model, torch.randn(1, 3, 64, 96))
    assert PoolLooks.suits(model) and {look.layer for look in found} == {"head.blocks.0"}
    assert {tuple(look.values.shape) for look in found} == {(2, 3) if pool == "cap" else (4, 6)}
    assert all(0 < look.values.sum() < 1 for look in found)
    assert found[0].title == ("group 1, averaged token" if pool == "map-light" else "group 1, token 1")
    assert not PoolLooks.suits(model.backbone)
