"""Looks at tokens: of attention pooling against keys that are formed group by group and head by head, super tokens
against a hand-computed map and a loop over pixels, abstract tokens against windows visited one at a time."""

import itertools
import math
import re

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from broadsight.explanation.maps.tokens import (
    AbstractTokenLooks,
    ForegroundLooks,
    FusionLooks,
    PoolLooks,
    SuperTokenLooks,
)
from broadsight.layers import AbstractTokenAttention, MultiTokenPool, PartialAttention, SuperTokenAttention
from broadsight.surgery.fusion import fuse
from broadsight.surgery.pooling import swap_pool
from tests.compare import randomize
from tests.explanation.maps.collected import looks_of
from tests.zoo import shallow

USUAL = dict(level=-1, dim=12, groups=2, tokens=2, gram_groups=6, attn_dim=6, heads=3, mlp_ratio=1, drop=0.0)


def pool_looks(model: nn.Module, *inputs):
    image = inputs[0] if isinstance(inputs[0], Tensor) else inputs[0][-1]  # a pool alone has the map for an image
    return looks_of(PoolLooks, model, *inputs, size=(image.shape[-2], image.shape[-1]))


def pool_weights(block, group: int, tokens: Tensor, image: Tensor) -> Tensor:
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
def test_pool__agree_with_formed_keys(changes):
    torch.manual_seed(0)
    pool = randomize(MultiTokenPool((12,), 5, **(USUAL | changes)).double()).eval()
    x = torch.randn(1, 12, 3, 5, dtype=torch.float64)
    found = {look.title: look for look in pool_looks(pool, [x])}
    made = pool.initial_tokens(x)[0]  # G T D
    tokens = torch.cat([made, made.mean(1, keepdim=True)], 1)
    names = ["token 1", "token 2"] if "distill_tokens" not in changes else ["token 1", "distillation token 1"]
    asking = ["averaged token"] if changes.get("light") else names
    for group in range(2):
        expected = pool_weights(pool.blocks[0], group, tokens[group], x[0].flatten(1).T).mean(0)  # Q Q+n
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


def test_pool__uniform_by_hand():
    pool = MultiTokenPool((12,), 5, **(USUAL | dict(gram=False))).eval()
    nn.init.zeros_(pool.blocks[0].q.weight)  # with it and its bias, every query is zero: 3 tokens and 8 places alike
    for look in pool_looks(pool, [torch.randn(1, 12, 2, 4)]):
        torch.testing.assert_close(look.values, torch.full((2, 4), 1 / 11))
        assert "27.3 %" in look.note


def test_pool__every_layer_asks_and_folded_pools_look_alike():
    torch.manual_seed(0)
    pool = randomize(MultiTokenPool((12, 7), 5, **(USUAL | dict(layers=2, level=0)))).eval()
    maps = [torch.randn(1, 12, 4, 6), torch.randn(1, 7, 2, 3)]
    found = pool_looks(pool, maps)
    assert [(look.layer, look.depth) for look in found] == [("blocks.0", 0)] * 9 + [("blocks.1", 1)] * 7
    assert sum("averaged token" in look.title for look in found if look.depth == 0) == 2
    assert {tuple(look.values.shape) for look in found} == {(2, 3)}
    for look, other in zip(found, pool_looks(fuse(pool), maps), strict=True):
        torch.testing.assert_close(look.values, other.values, rtol=1e-4, atol=1e-6)
        assert (look.title, look.layer) == (other.title, other.layer)


@pytest.mark.parametrize("pool", ["map-light", "cap"])
def test_pool__of_any_pool_with_attention_in_any_model(pool):
    backbone = timm.create_model("resnet10t", num_classes=0)
    model = swap_pool(backbone, pool=pool, num_classes=5, **({} if pool == "cap" else dict(dim=24, heads=2))).eval()
    found = pool_looks(model, torch.randn(1, 3, 64, 96))
    assert PoolLooks.suits(model) and {look.layer for look in found} == {"head.blocks.0"}
    assert {tuple(look.values.shape) for look in found} == {(2, 3) if pool == "cap" else (4, 6)}
    assert all(0 < look.values.sum() < 1 for look in found)
    assert found[0].title == ("group 1, averaged token" if pool == "map-light" else "group 1, token 1")
    assert not PoolLooks.suits(model.backbone)


def shares(x: Tensor, cell: tuple[int, int], iterations: int) -> dict[tuple[int, int], dict[tuple[int, int], float]]:
    """Of every pixel (y, x), what each super token (row, column) around it holds; x (C, H, W). Pixel by pixel."""
    C, H, W = x.shape
    (h, w), (p, q) = cell, (-(-H // cell[0]), -(-W // cell[1]))
    pixels = torch.zeros(C, p * h, q * w, dtype=x.dtype)
    pixels[:, :H, :W] = x
    places = [(y, z) for y in range(p * h) for z in range(q * w)]
    cells = itertools.product(range(p), range(q))
    tokens = {(i, j): pixels[:, i * h : (i + 1) * h, j * w : (j + 1) * w].mean((1, 2)) for i, j in cells}
    found = {}
    for _ in range(iterations):
        for y, z in places:
            around = [(y // h + i, z // w + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
            logits = [float(pixels[:, y, z] @ tokens[at]) * C**-0.5 if at in tokens else 0.0 for at in around]
            total = sum(map(math.exp, logits))
            found[y, z] = {at: math.exp(n) / total for at, n in zip(around, logits, strict=True) if at in tokens}
        for at in tokens:
            held = {place: found[place].get(at, 0.0) for place in places}
            tokens[at] = sum(share * pixels[:, y, z] for (y, z), share in held.items()) / sum(held.values())
    return found


STRAYED = math.exp(25) / (math.exp(25) + math.exp(-12.5) + 7)  # seven of the nine lie beyond the border


def test_super_tokens__by_hand():
    for x, labels, held in (
        # super tokens 2.5 and -5
        ([[5.0, 5.0, -5.0, -5.0], [5.0, -5.0, -5.0, -5.0]], [[0, 0, 1, 1], [0, 1, 1, 1]], STRAYED),
        # one super token: 2; nothing belongs to those beyond the border
        ([[3.0, 3.0], [3.0, -1.0]], [[0, 0], [0, 0]], math.exp(-2) / (math.exp(-2) + 8)),
    ):
        association, share = looks_of(SuperTokenLooks, SuperTokenAttention(1, 2, 1), torch.tensor([[x]]))
        assert association.values.tolist() == labels and share.values[1, 1].item() == pytest.approx(held, rel=1e-6)
        assert (association.form, share.form) == ("labels", "heat")
        assert (association.kind, association.layer, association.depth) == ("super-tokens", "", 0)


@pytest.mark.parametrize(
    ("cell", "iterations", "size", "memory", "residual"),
    [
        ((2, 2), 1, (6, 4), torch.contiguous_format, False),
        ((2, 3), 2, (5, 7), torch.channels_last, True),
        ((4, 1), 3, (7, 3), torch.contiguous_format, True),
    ],
)
def test_super_tokens__agree_with_a_loop_over_pixels(cell, iterations, size, memory, residual):
    torch.manual_seed(0)
    layer = SuperTokenAttention(4, cell, 2, iterations).double()
    x = (2 * torch.randn(1, 4, *size, dtype=torch.float64)).contiguous(memory_format=memory)
    association, share = looks_of(SuperTokenLooks, layer, x, *([torch.randn_like(x)] if residual else []))
    assert association.values.shape == share.values.shape == size
    columns, expected = -(-size[1] // cell[1]), shares(x[0], cell, iterations)
    for place in itertools.product(*map(range, size)):
        (row, column), largest = max(expected[place].items(), key=lambda item: item[1])
        assert association.values[place] == row * columns + column
        assert share.values[place].item() == pytest.approx(largest, rel=1e-5)


def test_super_tokens__shares_of_a_half_precision_run_and_layers_with_cells_alone():
    model = shallow("stvit_small").eval()
    assert SuperTokenLooks.suits(model) and not SuperTokenLooks.suits(nn.Conv2d(3, 3, 1))
    found = looks_of(SuperTokenLooks, model.bfloat16(), torch.randn(1, 3, 40, 72).bfloat16())
    found_at = [(look.layer, look.depth) for look in found]
    assert found_at == [("stages.0.blocks.0.attn", 0)] * 2 + [("stages.1.blocks.0.attn", 1)] * 2
    assert {look.values.dtype for look in found} == {torch.int64, torch.float32}


def window_looks(layer: nn.Module, x: Tensor):
    found = [looks_of(kind, layer, x) for kind in (AbstractTokenLooks, FusionLooks)]
    return [{look.title: look for look in looks} for looks in found]


def weights(query: Tensor, key: Tensor) -> Tensor:
    """Mean over heads of softmax(q k / sqrt(d)); (N, h, d), (M, h, d) -> (N, M)."""
    return torch.stack([(query[:, i] @ key[:, i].T / math.sqrt(query.shape[2])).softmax(1) for i in range(4)]).mean(0)


@pytest.mark.parametrize("switches", [{}, dict(token_is_key=True, token_projected=True)])
@pytest.mark.parametrize("size", [(6, 9), (4, 7), (2, 2)])
def test_abstract_tokens__agree_with_windows_one_at_a_time(switches, size):
    torch.manual_seed(0)
    layer = randomize(AbstractTokenAttention(8, 4, 3, **switches).double())
    x = 2 * torch.randn(1, *size, 8, dtype=torch.float64)
    tokens, fusion = window_looks(layer, x)
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


def test_abstract_tokens__by_hand_and_a_few_rows_at_a_time(monkeypatch):
    layer = AbstractTokenAttention(1, 1, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.token.fill_(1.0)
        layer.qkv.weight[1] = 1.0  # the key of a pixel is its value, all else is zero
    x = torch.log(torch.tensor([[1.0, 3.0, 1.0], [2.0, 2.0, 4.0], [5.0, 5.0, 9.0]])).view(1, 3, 3, 1)
    tokens, fusion = window_looks(layer, x)
    expected = torch.tensor([[1 / 8, 3 / 8, 1 / 5], [2 / 8, 2 / 8, 4 / 5], [5 / 10, 5 / 10, 1.0]])
    torch.testing.assert_close(tokens["in its window"].values, expected)
    torch.testing.assert_close(fusion["received"].values, torch.full((3, 3), 0.25))
    # a few rows at a time are the same
    torch.manual_seed(0)
    layer, x = randomize(AbstractTokenAttention(8, 4, 3)), torch.randn(1, 7, 8, 8)
    whole = window_looks(layer, x)
    monkeypatch.setattr("broadsight.inspection.attention_rows.WEIGHTS_BYTES", 1)
    for one, other in zip(whole, window_looks(layer, x), strict=True):
        assert one.keys() == other.keys()
        for title, look in one.items():
            torch.testing.assert_close(look.values, other[title].values)


def test_abstract_tokens__only_layers_with_abstract_tokens():
    model = shallow("mat_1").eval()
    assert AbstractTokenLooks.suits(model) and FusionLooks.suits(model)
    assert not FusionLooks.suits(shallow("mat_1", mixer="window", device="meta"))
    found = looks_of(FusionLooks, model, torch.randn(1, 3, 96, 64), size=(96, 64))
    assert [look.depth for look in found] == [0, 0, 0, 1, 1, 1]
    assert {look.layer for look in found} == {"stages.2.blocks.0.attn", "stages.3.blocks.0.attn"}
    assert found[0].values.shape == (6, 4)


class Block(nn.Module):
    """Partial attention with given scores at several depths. (B, H, W, C) -> (B, H, W, C)"""

    def __init__(self, attn: PartialAttention, scores: Tensor):
        super().__init__()
        self.attn, self.scores = attn, scores

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x.flatten(1, 2), self.scores.flatten(1)).view(x.shape)


def test_foreground__of_scores_set_by_hand():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            fine = torch.tensor([[[9.0, 0.0, 7.0, 0.0], [0.0, 7.0, 0.0, 7.0]]])  # of equals, the first in the raster
            self.first = Block(PartialAttention(4, 2, (3, 8)), fine)
            self.second = Block(PartialAttention(4, 2, (1, 0)), torch.tensor([[[0.0, 1.0]]]))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.avg_pool2d(self.first(x).permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1))

    found = looks_of(ForegroundLooks, Model(), torch.randn(1, 2, 4, 4))
    titles = [look.title for look in found if look.depth == 1]
    assert titles == ["foreground", "history up to layer 2", "background query"]
    by = {(look.title, look.depth): look for look in found}
    assert by["foreground", 0].values.tolist() == [[True, False, True, False], [False, True, False, False]]
    assert by["foreground", 1].values.tolist() == [[False, True]]
    assert by["history up to layer 1", 0].values.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0]]
    assert by["history up to layer 2", 1].values.tolist() == [[0.5, 0, 1, 0.5], [0, 0.5, 0.5, 0.5]]
    assert by["background query", 1].values.tolist() == [[1.0, 0.0]]  # there is but one
    assert [by["foreground", i].layer for i in (0, 1)] == ["first.attn", "second.attn"]
    assert by["foreground", 0].form == "mask" and by["foreground", 0].note.startswith("3 of 8 places")


def test_foreground__background_query_agrees_with_the_equations():
    torch.manual_seed(0)
    attn = randomize(PartialAttention(6, 2, (2, 6), head_expansion=2).double())
    scores = torch.randn(1, 2, 3, dtype=torch.float64)
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64)
    (look,) = [look for look in looks_of(ForegroundLooks, Block(attn, scores), x) if look.title == "background query"]
    rows = x[0].view(6, 6)
    order = scores.flatten().argsort(descending=True)
    queried = torch.cat([attn.token[0], rows[order[:2]]])  # abstract token and foreground
    bias = torch.cat([attn.q_bias, torch.zeros(6, dtype=torch.float64), attn.v_bias])
    q, k, v = (part.unflatten(-1, (2, 3)) for part in F.linear(queried, attn.qkv.weight, bias).chunk(3, -1))
    maps = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(3)
    maps = torch.einsum("eh,hqk->eqk", attn.head_up, maps).softmax(-1)
    maps = torch.einsum("he,eqk->hqk", attn.head_down, maps)
    query = attn.proj(torch.einsum("hqk,khd->qhd", maps, v).reshape(3, 6))[0].view(2, 3)
    keys = F.linear(rows[order[2:]], attn.qkv.weight[6:12]).unflatten(-1, (2, 3))
    expected = torch.zeros(6, dtype=torch.float64)
    expected[order[2:]] = (torch.einsum("hd,khd->hk", query, keys) / math.sqrt(3)).softmax(-1).mean(0)
    torch.testing.assert_close(look.values, expected.view(2, 3).float())
    # all foreground, and no map around
    attn = PartialAttention(4, 2, (1, 1), background_required=False)
    found = looks_of(ForegroundLooks, attn, torch.randn(1, 12, 4), torch.randn(1, 12), size=(30, 42))
    assert [look.title for look in found] == ["foreground", "history up to layer 1"]
    assert found[0].values.shape == (3, 4) and bool(found[0].values.all())


def test_foreground__of_a_model_of_odd_size():
    model = shallow("partialformer_b0").eval()
    assert ForegroundLooks.suits(model) and not ForegroundLooks.suits(nn.Conv2d(3, 3, 1))
    found = looks_of(ForegroundLooks, model, torch.randn(1, 3, 52, 76))
    masks = [look.values for look in found if look.form == "mask"]
    assert [tuple(mask.shape) for mask in masks] == [(13, 19), (7, 10), (4, 5), (2, 3)]
    counts = [model.stages[i].blocks[0].attn.foreground_count(mask.numel()) for i, mask in enumerate(masks)]
    assert [int(mask.sum()) for mask in masks] == counts
    for mask, look in zip(masks, (look for look in found if look.title == "background query"), strict=True):
        assert not look.values[mask].any() and abs(look.values.sum().item() - 1) < 1e-5
    (last,) = [look for look in found if look.title == "history up to layer 4"]
    assert last.values.shape == (13, 19) and last.values.max() <= 1
