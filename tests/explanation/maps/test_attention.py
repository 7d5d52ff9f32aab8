"""Attention over the image: a spot that everyone attends to has to be found at its place, however tokens are cut."""

import math
from typing import Any

import pytest
import timm
import torch
from timm.models.davit import SpatialBlock
from timm.models.maxxvit import MaxxVitTransformerCfg, PartitionAttentionCl
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.twins import LocallyGroupedAttn
from torch import Tensor, nn

import broadsight
from broadsight.explanation.maps.attention import AttentionLooks, LocalAttentionLooks
from broadsight.explanation.maps.map import Look
from broadsight.layers import CMHSA, GMHSA, AbstractTokenAttention, SuperTokenAttention
from broadsight.surgery.fusion import fuse
from tests.compare import randomize
from tests.explanation.maps.collected import looks_of
from tests.inspection.timm_models import created, images
from tests.zoo import shallow


def at_the_spot(x: Tensor) -> Tensor:
    """Queries that are all the same, and keys that are large where the tokens (..., C) are not zero. -> (..., 3C)."""
    return torch.cat([torch.ones_like(x), 20 * x, x], -1)


class Spot(nn.Module):
    """A block that attends, called with a map (1, H, W, C) of zeros with a one at a place."""

    def __init__(self, block: nn.Module, place: tuple[int, int], call=lambda block, x: block(x)):
        super().__init__()
        self.block, self.place, self.call = block, place, call
        for module in block.modules():
            if isinstance(module, nn.LayerNorm) or type(module).__name__.startswith("LayerNorm"):
                module.forward = lambda x: x
            if hasattr(module, "qkv"):
                module.qkv.forward = at_the_spot

    def forward(self, image: Tensor) -> Any:
        x = torch.zeros(1, *image.shape[-2:], 8)
        x[0, self.place[0], self.place[1]] = 1
        return self.call(self.block, x)


def looks(model: nn.Module, size: tuple[int, int]) -> list[Look]:
    return looks_of(AttentionLooks, model.eval(), torch.zeros(1, 3, *size), size=size)


def swin(shift: int, size: tuple[int, int]) -> nn.Module:
    block = SwinTransformerBlock(8, size, num_heads=2, head_dim=4, window_size=4, shift_size=shift, dynamic_mask=True)
    block.attn.relative_position_bias_table.data.zero_()
    return block


def davit(size: tuple[int, int]) -> nn.Module:
    block = SpatialBlock(8, num_heads=2, window_size=4)
    for module in (block.cpe1, block.cpe2):
        module.proj.weight.data.zero_(), module.proj.bias.data.zero_()
    return block


def maxvit(how: str) -> nn.Module:
    sizes: dict[str, Any] = dict(window_size=(4, 4), grid_size=(4, 4), rel_pos_type=None)
    return PartitionAttentionCl(8, how, cfg=MaxxVitTransformerCfg(dim_head=4, head_first=False, **sizes))


CUT = dict(
    swin=((8, 12), lambda size: swin(0, size), None),
    swin_shifted=((8, 12), lambda size: swin(2, size), None),
    swin_padded=((7, 10), lambda size: swin(0, size), None),
    swin_shifted_and_padded=((7, 10), lambda size: swin(2, size), None),
    maxvit_block=((8, 12), lambda _: maxvit("block"), None),
    maxvit_grid=((8, 12), lambda _: maxvit("grid"), None),
    davit=((7, 10), davit, lambda block, x: block(x.permute(0, 3, 1, 2))),
    twins=((7, 10), lambda _: LocallyGroupedAttn(8, 2, ws=4), lambda block, x: block(x.flatten(1, 2), x.shape[1:3])),
    mat=((7, 10), lambda _: AbstractTokenAttention(8, 2, window=4), None),
)


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("place", [(0, 0), (3, 4), (6, 9), (1, 8)])
def test_windows__are_joined_at_their_places(name, place):
    size, block, call = CUT[name]
    model = Spot(block(size), place, *([call] if call else []))
    found = [look for look in looks(model, size) if look.depth == 0]
    assert [look.title for look in found] == ["head mean", "head 1", "head 2"]
    for look in found:
        about = look.kind, look.form, look.values.shape, look.values.dtype
        assert about == ("attention", "heat", size, torch.float32)
        assert divmod(int(look.values.argmax()), size[1]) == place
        assert look.note.endswith("those of its window; bright is much")
        if "shifted" not in name:  # there, not all of a window may attend to each other
            assert look.values[place].item() == pytest.approx(1, abs=1e-3)
        # Elsewhere, somebody else's window or nothing is left: the spot is the only one.
        assert (look.values > 0.5 * look.values[place]).sum() == 1


def vit(prefix: dict, size: tuple[int, int]) -> Any:
    """One block, tokens of patches of 4 pixels; all attend to what is bright."""
    model = timm.models.VisionTransformer(
        img_size=size, patch_size=4, embed_dim=8, depth=2, num_heads=2, num_classes=2, pos_embed="none", **prefix
    )
    nn.init.constant_(model.patch_embed.proj.weight, 1 / 48)
    nn.init.zeros_(model.patch_embed.proj.bias)
    for block in model.blocks:
        block.norm1.forward = lambda x: x
        block.attn.qkv.forward = at_the_spot
        nn.init.zeros_(block.attn.proj.weight), nn.init.zeros_(block.attn.proj.bias)
        nn.init.zeros_(block.mlp.fc2.weight), nn.init.zeros_(block.mlp.fc2.bias)
    for name in ("cls_token", "reg_token"):
        if getattr(model, name, None) is not None:
            nn.init.zeros_(getattr(model, name))
    return model.eval()


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("place", [(0, 0), (2, 5), (4, 6), (3, 0)])
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_vit__looks_at_the_bright_patch(class_token, registers, place, fused):
    pooling, words = ("token", "attention of the class token") if class_token else ("avg", "receives, on average over")
    size, image = (20, 28), torch.zeros(1, 3, 20, 28)
    model = vit(dict(class_token=class_token, reg_tokens=registers, global_pool=pooling), size)
    for block in model.blocks:
        block.attn.fused_attn = fused
    image[..., 4 * place[0] : 4 * place[0] + 4, 4 * place[1] : 4 * place[1] + 4] = 1
    expected = model(image)
    collector = AttentionLooks(model, size)
    with collector:
        assert torch.equal(model(image), expected)
    found = collector.looks()
    titles = [(i, f"blocks.{i}.attn", title) for i in range(2) for title in ("head mean", "head 1", "head 2")]
    assert [(look.depth, look.layer, look.title) for look in found] == titles
    for look in found:
        assert look.values.shape == (5, 7) and words in look.note
        assert divmod(int(look.values.argmax()), 7) == place and look.values[place].item() > 0.99


@torch.no_grad()
def test_class_token__is_its_row_and_the_mean_that_of_heads():
    model, x = created("test_vit"), images("test_vit", batch=1)
    model.blocks[1].attn.qkv.weight.data *= 3
    kept = []
    handle = model.blocks[1].attn.qkv.register_forward_hook(lambda module, args, y: kept.append(y))
    collector = AttentionLooks(model, (x.shape[-2], x.shape[-1]))
    with collector:
        model(x)
    handle.remove()
    attn, grid = model.blocks[1].attn, (x.shape[-2] // 16, x.shape[-1] // 16)
    q, k, _ = kept[0].view(-1, 3, attn.num_heads, attn.head_dim).permute(1, 2, 0, 3)  # heads N d
    expected = (q[:, :1] @ k.mT / attn.head_dim**0.5).softmax(-1)[:, 0, 1:].unflatten(-1, grid)
    mean, *heads = [look.values for look in collector.looks() if look.depth == 1]
    assert torch.allclose(torch.stack(heads), expected, atol=1e-6) and torch.allclose(mean, expected.mean(0), atol=1e-6)


def test_cells__that_reach_beyond_the_map_are_cut_off():
    """Cells of 4 on a map of 6 x 10: the last row has two of the map, the last column two."""

    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = randomize(SuperTokenAttention(8, cell=4, heads=2))

        def forward(self, image: Tensor) -> Tensor:
            return self.attn(torch.randn(1, 8, *image.shape[-2:]))

    mean, *heads = looks(Mixes(), (6, 10))
    assert mean.values.shape == (6, 10) and len(heads) == 2
    assert mean.values.unique().numel() == 6 and mean.values[::4, ::4].sum().item() == pytest.approx(1, abs=1e-5)
    assert (mean.values[4:, 8:] == mean.values[5, 9]).all() and (mean.values[:4, :4] == mean.values[0, 0]).all()


def test_skipped__where_places_are_unknown():
    xcit = timm.models.Xcit(img_size=64, embed_dim=32, depth=1, num_heads=2, cls_attn_layers=1)
    hiera = timm.create_model("hiera_tiny_224", img_size=64, stages=(1, 1, 1, 1))
    assert not AttentionLooks.suits(hiera)
    ordered = "its tokens are not in the order of their places"
    for model, count, words in ((xcit, 3, "it attends to channels, which are everywhere"), (hiera, 0, ordered)):
        collector = AttentionLooks(model.eval(), (64, 64))
        with torch.no_grad(), collector:
            model(torch.randn(1, 3, 64, 64))
        assert (len(collector.looks()), set(collector.skipped.values())) == (count, {words})


ALL = {(24, 16), (12, 8), (6, 4), (3, 2)}
OURS = [("mat_1", {(6, 4), (3, 2)}, "abstract tokens"), ("partialformer_b0", ALL, "foreground")]
OURS += [("emsnet_xxtiny", ALL, "c-mhsa"), ("stvit_small", None, None)]


@pytest.mark.parametrize(("name", "shapes", "words"), OURS)
@torch.no_grad()
def test_ours__have_attention_over_the_image(name, shapes, words):
    model, x = randomize(shallow(name)).eval(), torch.randn(1, 3, 96, 64)
    expected = model(x)
    collector = AttentionLooks(model, (96, 64))
    with collector:
        assert torch.equal(model(x), expected)
    found = collector.looks()
    assert found and all((look.values >= 0).all() and look.values.ndim == 2 for look in found)
    assert shapes is None or {tuple(look.values.shape) for look in found} == shapes
    assert words is None or all(words in reason for reason in collector.skipped.values())


def test_suits__transformers_and_not_a_pool_on_a_cnn():
    assert AttentionLooks.suits(created("test_vit"))
    assert not AttentionLooks.suits(timm.create_model("test_resnet"))
    assert not AttentionLooks.suits(broadsight.swap_pool("test_resnet", "map", num_classes=5))


@pytest.mark.parametrize("size", [(5, 4), (1, 3), (4, 6)])
def test_local__agree_with_windows_one_by_one(size):
    torch.manual_seed(0)
    layer = randomize(CMHSA(64).double())
    x = torch.randn(1, *size, 64, dtype=torch.float64)
    found = {look.title.removeprefix("C-MHSA, "): look.values for look in looks_of(LocalAttentionLooks, layer, x)}
    padded = torch.zeros(size[0] + 3, size[1] + 3, 64, dtype=torch.float64)
    padded[1 : size[0] + 1, 1 : size[1] + 1] = x[0]
    mass, windows = torch.zeros(size), torch.zeros(size)
    for row in range(-(-size[0] // 2)):
        for column in range(-(-size[1] // 2)):
            around = padded[2 * row : 2 * row + 3, 2 * column : 2 * column + 3]  # of the centre (2*row, 2*column)
            centre = torch.einsum("yxc,cyx->c", around, layer.dw.weight[:, 0])
            weights = (layer.mix.weight @ centre).view(2, 9, 9).softmax(-1)  # heads outputs values
            entropy = -(weights * weights.log()).sum(-1).mean().item()
            assert found["concentration"][row, column].item() == pytest.approx(1 - entropy / math.log(9), abs=1e-6)
            for place in range(9):
                y, z = 2 * row - 1 + place // 3, 2 * column - 1 + place % 3
                if 0 <= y < size[0] and 0 <= z < size[1]:
                    mass[y, z] += weights[:, :, place].sum(1).mean().item()
                    windows[y, z] += 1
    torch.testing.assert_close(found["received"], mass)
    torch.testing.assert_close(found["received, over uniform"], mass / windows)


def test_local__uniform_by_hand():
    layer = CMHSA(32)
    nn.init.zeros_(layer.mix.weight)
    received, over, concentration = looks_of(LocalAttentionLooks, layer, torch.randn(1, 4, 3, 32))
    one_two_four = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1], [1, 2, 1]])  # no window begins at the last row
    torch.testing.assert_close(received.values, one_two_four)
    torch.testing.assert_close(over.values, torch.ones(4, 3))
    torch.testing.assert_close(concentration.values, torch.zeros(2, 2), atol=1e-6, rtol=0)


def test_local__of_all_cells():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.near, self.far = CMHSA(32), randomize(GMHSA(64).double())

        def forward(self, x: Tensor) -> Tensor:
            self.near(x[..., :32].float())
            return self.far(x)

    torch.manual_seed(0)
    model, x = Pair(), torch.randn(1, 3, 4, 64, dtype=torch.float64)
    found = looks_of(LocalAttentionLooks, model, x)
    assert [(look.layer, look.depth) for look in found] == [("near", 0)] * 3 + [("far", 0)]
    qk = (x.view(12, 64) @ model.far.qkv.weight.T)[:, :128].view(12, 2, 2, 32)
    weights = [(qk[:, 0, head] @ qk[:, 1, head].T / math.sqrt(32)).softmax(1) for head in range(2)]
    torch.testing.assert_close(found[-1].values, torch.stack(weights).mean((0, 1)).view(3, 4).float())


def test_local__of_a_model_and_its_folded_form():
    torch.manual_seed(0)
    model = shallow("emsnet_xxtiny").eval()
    x = torch.randn(1, 3, 72, 100)
    found, folded = looks_of(LocalAttentionLooks, model, x), looks_of(LocalAttentionLooks, fuse(model), x)
    assert LocalAttentionLooks.suits(fuse(model)) and not LocalAttentionLooks.suits(GMHSA(32))
    assert [look.depth for look in found] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [tuple(look.values.shape) for look in found[:4]] == [(5, 7), (5, 7), (3, 4), (3, 5)]
    for look, other in zip(found, folded, strict=True):
        torch.testing.assert_close(look.values, other.values, rtol=1e-3, atol=1e-5)
        assert (look.title, look.depth) == (other.title, other.depth)
    assert found[3].layer == "stages.0.blocks.0.mixer.dynamic.global_.attn"
    assert folded[3].layer == "stages.0.blocks.0.mixer.global_.attn"
    without_far = shallow("emsnet_xxtiny", mixer="c_mhsa").eval()
    assert {look.title.split(",")[0] for look in looks_of(LocalAttentionLooks, without_far, x)} == {"C-MHSA"}
