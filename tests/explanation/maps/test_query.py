"""Attention of places: rows of weights computed by hand, at the right token, however tokens are cut or reduced."""

import pytest
import torch
from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor, nn

from broadsight.explanation import look_inside
from broadsight.explanation.maps.attention import AttentionLooks
from broadsight.explanation.maps.map import Look
from broadsight.explanation.maps.query import NOT_ASKING, QueryLooks
from broadsight.inspection.watch import hooked
from broadsight.layers import AbstractTokenAttention, PartialAttention, SuperTokenAttention
from broadsight.layers.kernels import partial_attention as kernel
from broadsight.layers.partial_attention import select_foreground
from broadsight.surgery.fusion import fuse
from tests.compare import randomize
from tests.explanation.maps.collected import looks_of
from tests.explanation.maps.test_attention import CUT, Spot
from tests.inspection.timm_models import created, images
from tests.refusals import refused
from tests.zoo import shallow


def of_heads(x: Tensor, parts: int, heads: int) -> list[Tensor]:
    """(..., parts*C) -> parts of (heads, tokens, d)."""
    x = x.reshape(-1, parts, heads, x.shape[-1] // parts // heads)
    return list(x.permute(1, 2, 0, 3))


def outputs_of(model: nn.Module, layers: list[nn.Module], image: Tensor, **asked) -> tuple[list[Tensor], list[Look]]:
    """What layers gave while the model was looked into, and the looks."""
    kept: dict[nn.Module, Tensor] = {}
    with hooked(layers, after=lambda module, args, y: kept.update({module: y})):
        looks = look_inside(model, image, "query", **asked)
    return [kept[layer] for layer in layers], looks


@pytest.mark.parametrize("fused", [True, False])
def test_vit__is_the_row_of_the_token_there(fused):
    model, x = created("test_vit"), images("test_vit", batch=1)  # 64 x 96: tokens of 16 pixels, a class token first
    for block in model.blocks:
        block.attn.qkv.weight.data *= 3
        block.attn.fused_attn = fused
    attn = model.blocks[2].attn
    (y,), looks = outputs_of(model, [attn.qkv], x, query=[(95, 17), (0, 63)])
    q, k, _ = of_heads(y, 3, attn.num_heads)
    weights = (q @ k.mT / attn.head_dim**0.5).softmax(-1)
    found = [look for look in looks if look.layer == "blocks.2.attn"]
    assert [look.title for look in found] == ["query 1", "query 2"]
    for look, (row, column) in zip(found, ((1, 5), (3, 0)), strict=True):
        expected = weights[:, 1 + row * 6 + column, 1:].unflatten(-1, (4, 6))
        torch.testing.assert_close(look.heads, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(look.values, expected.mean(0), atol=1e-6, rtol=1e-5)
        share = 100 * (1 - expected.mean(0).sum().item())
        assert f"; {share:.1f} % of it went to tokens without a place" in look.note and look.depth == 2
    assert found[0].mark == (95.5 / 96, 17.5 / 64)


def test_swin__shifted_windows_are_where_they_are_in_the_image():
    torch.manual_seed(0)
    (H, W), w, shift = (8, 12), 4, 2
    block = SwinTransformerBlock(8, (H, W), num_heads=2, head_dim=4, window_size=w, shift_size=shift, dynamic_mask=True)
    block, x = randomize(block), torch.randn(1, H, W, 8)
    q, k, _ = (part.detach() for part in of_heads(block.attn.qkv(block.norm1(x)), 3, 2))

    def region(at: int, side: int) -> tuple[int, int]:  # window, and which end of the image in one that has both
        rolled = (at - shift) % side
        return rolled // w, at < shift

    for row, column in ((0, 0), (1, 11), (7, 3), (4, 6)):
        expected = torch.zeros(2, H, W)
        near = [(y, z) for y in range(H) for z in range(W)]
        near = [at for at in near if (region(at[0], H), region(at[1], W)) == (region(row, H), region(column, W))]
        logits = torch.empty(2, len(near))
        for i, (y, z) in enumerate(near):
            bias = block.attn.relative_position_bias_table[(row - y + w - 1) * (2 * w - 1) + column - z + w - 1]
            logits[:, i] = (q[:, row * W + column] * k[:, y * W + z]).sum(-1) / 2 + bias.detach()
        for (y, z), weight in zip(near, logits.softmax(-1).T, strict=True):
            expected[:, y, z] = weight
        (look,) = looks_of(QueryLooks, block, x, size=(H, W), place=(row, column))
        torch.testing.assert_close(look.heads, expected, atol=1e-6, rtol=1e-5)
        assert "its own window alone" in look.note


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("place", [(0, 0), (6, 9), (1, 8)])
def test_windows__light_up_where_the_place_is(name, place):
    size, block, call = CUT[name]
    look = looks_of(
        QueryLooks,
        Spot(block(size), place, *([call] if call else [])).eval(),
        torch.zeros(1, 3, *size),
        size=size,
        place=place,
    )[0]
    assert divmod(int(look.values.argmax()), size[1]) == place and look.values[place].item() > 0.99
    assert look.values.shape == size and 1 <= (look.values > 0).sum() <= 16


def test_pvt__keys_are_on_a_coarser_grid():
    model, x = created("pvt_v2_b0"), torch.randn(1, 3, 128, 192)
    attn = model.stages[0].blocks[0].attn
    (q, kv), looks = outputs_of(model, [attn.q, attn.kv], x, query=[(100, 37)])  # strides 4 and 32
    (q,), (k, _) = of_heads(q, 1, attn.num_heads), of_heads(kv, 2, attn.num_heads)
    expected = (q[:, 37 // 4 * 48 + 100 // 4] @ k[0].T / q.shape[-1] ** 0.5).softmax(-1).view(1, 4, 6)
    torch.testing.assert_close(looks[0].heads, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("iterations", [1, 2])
def test_super_tokens__the_composed_row_is_what_the_layer_does(iterations):
    """With values and projection left as they are, each head of the output is the map times the pixels."""
    torch.manual_seed(0)
    attn = randomize(SuperTokenAttention(8, cell=(2, 3), heads=2, iterations=iterations, qkv_bias=False).double())
    attn.qkv.weight.data.view(2, 3, 4, 8)[:, 2] = torch.eye(8).view(2, 4, 8)
    attn.proj.weight.data, attn.proj.bias.data = torch.eye(8).double(), torch.zeros(8).double()
    x = torch.randn(1, 8, 5, 7, dtype=torch.float64)
    expected = attn(x)[0].detach().unflatten(0, (2, 4)).float()  # heads d H W
    for row, column in ((0, 0), (4, 6), (2, 3)):
        (look,) = looks_of(QueryLooks, attn, x, size=(5, 7), place=(row, column))
        found = torch.einsum("hyx,hdyx->hd", look.heads, x[0].unflatten(0, (2, 4)).float())
        torch.testing.assert_close(found, expected[..., row, column], atol=1e-5, rtol=1e-4)
        assert "through super tokens" in look.note


@pytest.mark.parametrize("reading", ["fitted", "equations"])
def test_mat__its_window_and_the_summaries_of_windows(reading):
    torch.manual_seed(0)
    attn, x, (row, column) = (
        randomize(AbstractTokenAttention(8, 2, window=4, reading=reading)),
        torch.randn(1, 7, 10, 8),
        (5, 6),
    )
    kept: list[Tensor] = []
    with torch.no_grad(), hooked([attn.fuse_kv], after=lambda module, args, y: kept.append(y)):
        attn(x)
    local, fused = looks_of(QueryLooks, attn, x, size=(7, 10), place=(row, column))
    q, k, _ = (part.detach() for part in of_heads(attn.qkv(x), 3, 2))
    q, k = q[:, row * 10 + column], k.unflatten(1, (7, 10))[:, 4:, 4:8].flatten(1, 2)  # 3 x 4 of the window are there
    if reading == "equations":
        k = torch.cat([k, attn.qkv(attn.token.view(1, -1)).detach().view(3, 2, 1, 4)[1]], 1)
    expected = torch.zeros(2, 7, 10)
    expected[:, 4:, 4:8] = (torch.einsum("hd,hnd->hn", q, k) / 2).softmax(-1)[:, :12].unflatten(-1, (3, 4))
    torch.testing.assert_close(local.heads, expected, atol=1e-6, rtol=1e-5)
    summary = (torch.einsum("hd,hnd->hn", q, of_heads(kept[0], 2, 2)[0]) / 2).softmax(-1).view(2, 2, 3)
    expected = summary.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :7, :10]
    torch.testing.assert_close(fused.heads, expected, atol=1e-6, rtol=1e-5)
    assert (local.title, fused.title, local.depth, fused.depth) == ("query 1", "query 1, fusion", 0, 0)


@pytest.mark.parametrize("bytes_at_once", [kernel.QUERY_BYTES, 4000])
def test_partial__foreground_sees_the_foreground_and_background_asks_nothing(bytes_at_once, monkeypatch):
    monkeypatch.setattr(kernel, "QUERY_BYTES", bytes_at_once)  # the second: queries come in several parts
    torch.manual_seed(0)
    model, x, kept = randomize(shallow("partialformer_b0")).eval(), torch.randn(1, 3, 128, 128), list[tuple]()
    attn: PartialAttention = model.stages[1].blocks[0].attn  # ty: ignore[unresolved-attribute]
    with torch.no_grad(), hooked([attn], before=lambda module, args, _: kept.append(args)):
        model(x)
    tokens, scores = kept[0]  # 16 x 16, each of 8 pixels
    index = select_foreground(scores, attn.foreground_count(256))
    chosen = torch.cat([attn.token, tokens[:, index]], 1)
    bias = torch.cat([attn.q_bias, torch.zeros_like(attn.q_bias), attn.v_bias])
    q, k, _ = of_heads(nn.functional.linear(chosen, attn.qkv.weight, bias).detach(), 3, attn.heads)
    weights = torch.einsum("eh,hnm->enm", attn.head_up.detach().flatten(1), q @ k.mT * attn.scale).softmax(-1)
    behind = next(at for at in range(256) if at not in index)
    places = [int(index[0]), int(index[-1]), behind]
    looks = look_inside(model, x, "query", query=[(8 * (at % 16) + 3, 8 * (at // 16) + 3) for at in places])
    first, last, background = [look for look in looks if look.depth == 1]
    for look, row in ((first, 1), (last, len(index))):
        expected = torch.zeros(len(weights), 256).index_copy(1, index, weights[:, row, 1:]).view(-1, 16, 16)
        torch.testing.assert_close(look.heads, expected, atol=1e-6, rtol=1e-5)
    assert background.title == "query 3, background" and "asks nothing" in background.note
    assert not background.values.flatten()[index].any() and background.values.sum().item() == pytest.approx(1, abs=1e-5)
    assert all(look.values.ndim == 2 for look in looks_of(AttentionLooks, model, x, size=(128, 128)))


@pytest.mark.parametrize("name", ["stvit_small", "mat_1", "partialformer_b0", "emsnet_xxtiny"])
def test_ours__changes_nothing_and_all_layers_of_attention_answer(name):
    torch.manual_seed(0)
    model, x = randomize(shallow(name)).eval(), torch.randn(1, 3, 100, 76)
    given: list[Tensor] = []
    with torch.no_grad(), hooked([model], after=lambda module, args, y: given.append(y)):
        expected = model(x)
        looks = look_inside(model, x, "query", query=[(3, 4), (75, 99)])
    assert torch.equal(given[1], expected)
    assert {look.depth for look in looks} == set(range(2 if name == "mat_1" else 4))
    for look in looks:
        assert look.values.isfinite().all() and (look.values >= 0).all() and look.heads.shape[1:] == look.values.shape
    if name == "emsnet_xxtiny":  # of cells that add up to 1, each at all of its places
        assert looks[0].values[::6, ::6].sum().item() == pytest.approx(1, abs=1e-5)
    else:
        folded = look_inside(fuse(model), x, "query", query=[(3, 4), (75, 99)])
        for look, other in zip(looks, folded, strict=True):
            torch.testing.assert_close(look.values, other.values, atol=1e-4, rtol=1e-2)


def test_refused__and_layers_that_no_place_asks():
    image = torch.randn(1, 3, 64, 96)
    refused(
        "ResNet has no query to look at; it has gradcam; query: ",
        look_inside,
        created("resnet10t"),
        image,
        query=[(3, 4)],
    )
    refused("the kind query needs query; .*such as", look_inside, created("test_vit"), image, "query")
    refused("not among gradcam", look_inside, created("test_vit"), image, "gradcam", query=[(3, 4)])
    words = "query 96,3 is outside of the image, which is 96x64; expected x from 0 to 95, y from 0 to 63"
    refused(words, look_inside, created("test_vit"), image, query=[(96, 3)])
    xcit = created("xcit_nano_12_p16_224")
    refused("Xcit ran without query to show: .*channels", look_inside, xcit, image, query=[(3, 4)])
    cait = created("cait_xxs24_224")
    collector = QueryLooks(cait, (64, 64))
    collector.marks = [(0.5, 0.5)]
    with torch.no_grad(), collector:
        cait(images("cait_xxs24_224", batch=1))
    assert set(collector.skipped.values()) == {NOT_ASKING} and len(collector.looks()) == len(cait.blocks)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in cait.modules())
