"""PVT against its equations written slowly, and against the sizes of its paper."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import broadsight
from broadsight.deployment import capture, prepare
from broadsight.layers import ContextBroadcast
from broadsight.models.pvt import PVT
from tests.compare import assert_close, assert_equal_to, parameters, randomize
from tests.refusals import refused

SMALL = dict(dims=(8, 16, 24, 32), depths=(1, 2, 1, 1), heads=(1, 2, 3, 4), num_classes=5)
# Counted by hand from the paper's settings, of which it prints 13.2, 24.5, 44.2 and 61.4 M.
SIZES = dict(pvt_tiny=13_229_288, pvt_small=24_485_864, pvt_medium=44_208_104, pvt_large=61_369_320)
DEPTHS = dict(pvt_tiny=(2, 2, 2, 2), pvt_small=(3, 4, 6, 3), pvt_medium=(3, 4, 18, 3), pvt_large=(3, 8, 27, 3))


def small(**kwargs) -> PVT:
    torch.manual_seed(0)
    return randomize(PVT(**{**SMALL, **kwargs})).double().eval()


@pytest.mark.parametrize("name", SIZES)
def test_size__by_hand_and_in_the_paper(name):
    total, inner = 0, 3
    settings = zip((64, 128, 320, 512), DEPTHS[name], (8, 8, 4, 4), (8, 4, 2, 1), strict=True)
    for i, (dim, depth, ratio, side) in enumerate(settings):
        total += inner * dim * (16 if i == 0 else 4) + 3 * dim + dim * (56 // 2**i) ** 2  # patches, norm, positions
        reduced = side**2 * dim**2 + 3 * dim if side > 1 else 0
        total += depth * (4 * dim**2 + 4 * dim + reduced + 2 * ratio * dim**2 + ratio * dim + dim + 4 * dim)
        inner = dim
    total += 2 * 512 + 2 * 512 + 513 * 1000  # class token and its position, norm, classifier
    assert parameters(timm.create_model(name, device="meta")) == total == SIZES[name]
    without = timm.create_model(name, class_token=False, device="meta")
    assert parameters(without) == total - 2 * 512


def attention(layer, x: Tensor, keys: Tensor) -> Tensor:
    """Every head of every token alone. (N, C), (M, C) -> (N, C)."""
    parts = []
    heads, (k, v) = layer.num_heads, layer.kv(keys).chunk(2, -1)
    width = x.shape[-1] // heads
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        parts.append((layer.q(x)[:, part] @ k[:, part].T / width**0.5).softmax(-1) @ v[:, part])
    return layer.proj(torch.cat(parts, -1))


def reduced(layer, x: Tensor, height: int, width: int) -> Tensor:
    """Keys: each patch flattened and projected alone, what is beyond the border being zero. (N, C) -> (M, C)."""
    side = layer.sr_ratio
    if side == 1:
        return x
    grid, rows = x.view(height, width, -1), []
    for top in range(0, height, side):
        for left in range(0, width, side):
            patch = torch.zeros(side, side, x.shape[-1], dtype=x.dtype)
            inside = grid[top : top + side, left : left + side]
            patch[: inside.shape[0], : inside.shape[1]] = inside
            rows.append(torch.einsum("yxc,ocyx->o", patch, layer.sr.weight) + layer.sr.bias)
    return layer.norm(torch.stack(rows))


def slow(model: nn.Module, images: Tensor) -> Tensor:
    """One image at a time, every stage from its tokens (N, C)."""
    results = []
    for image in images:
        grid = image
        for i, stage in enumerate(model.stages):
            embed = stage.downsample if i else model.stem
            grid = F.pad(grid, (0, -grid.shape[2] % embed.conv1.stride[0], 0, -grid.shape[1] % embed.conv1.stride[0]))
            grid = F.conv2d(grid[None], embed.conv1.weight, embed.conv1.bias, stride=embed.conv1.stride)[0]
            C, height, width = grid.shape
            tokens = F.layer_norm(grid.flatten(1).T, (C,), embed.norm.weight, embed.norm.bias, 1e-5)
            tokens = tokens + F.interpolate(embed.pos_embed, (height, width), mode="bilinear")[0].flatten(1).T
            if i == 3:
                tokens = torch.cat([stage.cls_token[0] + stage.cls_pos_embed[0], tokens])
            for block in stage.blocks:
                normed = block.norm1(tokens)
                tokens = tokens + attention(block.attn, normed, reduced(block.attn, normed, height, width))
                tokens = tokens + block.mlp(block.norm2(tokens))
            grid = tokens.T.reshape(C, height, width) if i < 3 else tokens
        results.append(model.head.fc(model.norm(grid)[0]))
    return torch.stack(results)


@pytest.mark.parametrize("size", [(64, 64), (43, 70), (5, 3)])
def test_model__agrees_with_the_slow_form_in_value_and_gradient(size):
    assert_equal_to(slow, small(), torch.randn(2, 3, *size, dtype=torch.float64), tolerance=1e-9)


def test_positions__are_those_learned_at_224_pixels_and_between_them_elsewhere():
    embed = small().stem
    nn.init.zeros_(embed.conv1.weight)
    nn.init.zeros_(embed.norm.weight)
    nn.init.zeros_(embed.norm.bias)
    assert torch.equal(embed(torch.zeros(1, 3, 224, 224).double()), embed.pos_embed)
    ramp = torch.arange(56.0, dtype=torch.float64).expand(1, 8, 56, 56)
    embed.pos_embed.data = ramp.clone()
    found = embed(torch.zeros(1, 3, 224, 112).double())
    assert_close(found, (2 * ramp[..., :28] + 0.5), tolerance=1e-12)  # the middles of pairs


@torch.no_grad()
def test_class_token__is_classified_or_left_out():
    model, x = small(), torch.randn(2, 3, 64, 96, dtype=torch.float64)
    features, maps = model.forward_intermediates(x)
    assert features.shape == (2, 1 + 2 * 3, 32) and maps[-1].shape == (2, 32, 2, 3)
    assert torch.equal(model.forward_head(features, pre_logits=True), features[:, 0])
    assert model.no_weight_decay() >= {"stages.3.cls_token", "stem.pos_embed", "stages.3.cls_pos_embed"}
    plain = small(class_token=False)
    assert plain.forward_features(x).shape == (2, 32, 2, 3) and plain(x).shape == (2, 5)
    plain.load_state_dict(plain.adapt_checkpoint(model.state_dict()))
    refused("unknown global_pool 'tokn'; did you mean 'token'", small, global_pool="tokn")
    refused(r"reductions=\(8, 4, 2, 2\) reduce the last stage; a class token needs a 1", small, reductions=(8, 4, 2, 2))


def test_context_broadcast__is_in_every_mlp_and_sees_the_class_token_in_the_last_stage():
    model = timm.create_model("pvt_small_cb", device="meta")
    found = {name: m for name, m in model.named_modules() if isinstance(m, ContextBroadcast)}
    stages = [name.split(".")[1] for name in found]
    assert [stages.count(str(i)) for i in range(4)] == [3, 4, 6, 3] and all(".mlp.fc2." in name for name in found)
    assert [m.class_token for name, m in found.items() if name.startswith("stages.3.")] == [True] * 3
    assert not any(m.class_token for name, m in found.items() if not name.startswith("stages.3."))


@pytest.mark.slow
@torch.no_grad()
def test_runtimes__any_number_of_images():
    model, x = small(), torch.randn(3, 3, 64, 48, dtype=torch.float64)
    program = capture(prepare(model, (64, 48)), (3, 64, 48)).module()
    bare = torch.export.export(model, (x[:2],), dynamic_shapes={"x": {0: torch.export.Dim("batch", max=64)}}).module()
    for batch in (1, 3):
        assert_close(program(x[:batch]), model(x[:batch]))
        assert_close(bare(x[:batch]), model(x[:batch]))


@torch.no_grad()
def test_dense__pyramids_of_any_size_plain_and_under_the_pool():
    shallow = dict(depths=(1, 1, 1, 1))
    for name in ("pvt_small", "map_pvt_small"):
        backbone = timm.create_model(name, features_only=True, **shallow).eval()
        assert [m.shape[1:] for m in backbone(torch.randn(1, 3, 70, 96))] == [
            (64, 18, 24), (128, 9, 12), (320, 5, 6), (512, 3, 3)
        ]  # fmt: skip
    model = broadsight.dense.build("mask_rcnn", "pvt_small", 3, backbone_args=shallow).eval()
    (found,) = model([torch.rand(3, 64, 96)])
    assert found["masks"].shape[2:] == (64, 96)
