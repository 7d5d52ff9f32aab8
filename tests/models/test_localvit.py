"""LocalViT against its equations written slowly, its printed size, and timm's contract of a ViT."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models import group_parameters
from torch import Tensor, nn

import broadsight
from broadsight.deployment import capture, prepare
from broadsight.layers import ContextBroadcast
from broadsight.models.localvit import LocalViT
from tests.compare import assert_all_close, assert_close, assert_equal_to, outputs_and_gradients, parameters, randomize
from tests.refusals import refused

SMALL = dict(embed_dim=12, depth=2, num_heads=2, img_size=64, num_classes=5)


def small(**kwargs) -> LocalViT:
    torch.manual_seed(0)
    return randomize(LocalViT(**{**SMALL, **kwargs})).double().eval()


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_size__by_hand_and_in_the_paper():
    """The paper prints 5.9 M and 1.3 G."""
    dim, hidden = 192, 768
    attention = 2 * dim + 4 * dim**2 + 4 * dim
    squeeze = hidden * 4 + 4 + 4 * hidden + hidden
    local = 2 * dim * hidden + 9 * hidden + 4 * hidden + 2 * dim + squeeze
    total = 12 * (attention + local) + 769 * dim + 197 * dim + dim + 2 * dim + 193 * 1000
    assert parameters(timm.create_model("localvit_tiny", device="meta")) == total == 5_908_696


def norm(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    scale = layer.weight / (layer.running_var + layer.eps).sqrt()
    return (x - layer.running_mean[:, None, None]) * scale[:, None, None] + layer.bias[:, None, None]


def swish(x: Tensor) -> Tensor:
    return x * ((x + 3).clamp(0, 6) / 6)


def local(mlp, x: Tensor) -> Tensor:
    """(C, h, w) -> (C, h, w)."""
    x = swish(norm(mlp.norm1, torch.einsum("oc,chw->ohw", mlp.fc1.weight[:, :, 0, 0], x)))
    near = F.pad(x, (1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1)  # C h w 3 3
    x = swish(norm(mlp.norm2, torch.einsum("chwyx,cyx->chw", near, mlp.dw.weight[:, 0])))
    squeezed = (mlp.se.fc1.weight[:, :, 0, 0] @ x.mean((1, 2)) + mlp.se.fc1.bias).relu()
    gate = ((mlp.se.fc2.weight[:, :, 0, 0] @ squeezed + mlp.se.fc2.bias + 3).clamp(0, 6)) / 6
    return norm(mlp.norm3, torch.einsum("oc,chw->ohw", mlp.fc2.weight[:, :, 0, 0], x * gate[:, None, None]))


def slow(model: nn.Module, batch: Tensor) -> Tensor:
    results = []
    for image in batch:
        patches = F.pad(image, (0, -image.shape[2] % 16, 0, -image.shape[1] % 16))
        grid = F.conv2d(patches[None], model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=16)[0]
        C, h, w = grid.shape
        positions = model.pos_embed[0, 1:].T.reshape(1, C, 4, 4)
        if (h, w) != (4, 4):
            positions = F.interpolate(positions, (h, w), mode="bicubic", antialias=True)
        tokens = torch.cat([model.cls_token[0] + model.pos_embed[0, :1], (grid + positions[0]).flatten(1).T])
        for block in model.blocks:
            q, k, v = block.attn.qkv(block.norm1(tokens)).view(len(tokens), 3, 2, C // 2).permute(1, 2, 0, 3)
            mixed = ((q @ k.mT) / (C // 2) ** 0.5).softmax(-1) @ v  # heads N d
            tokens = tokens + block.attn.proj(mixed.transpose(0, 1).flatten(1))
            places = tokens[1:].T.reshape(C, h, w)
            tokens = torch.cat([tokens[:1], (places + local(block.mlp, places)).flatten(1).T])
        results.append(model.head(model.norm(tokens)[0]))
    return torch.stack(results)


@pytest.mark.parametrize("size", [(64, 64), (50, 90), (1, 20)])
def test_model__agrees_with_the_slow_form_in_value_and_gradient(size):
    """As exact as float32: timm resizes positions in it, and torch has its sixth of the gates' gradient in it."""
    assert_equal_to(slow, small(), images(2, 3, *size), tolerance=1e-6)


@torch.no_grad()
def test_contract__intermediates_classifiers_sizes_and_channels():
    model, x = small(depth=3), images(2, 3, 50, 64)
    final, maps = model.forward_intermediates(x)
    assert [m.shape for m in maps] == 3 * [(2, 12, 4, 4)] and torch.equal(final, model.forward_features(x))
    assert torch.equal(model.forward_head(final), model(x))
    tokens, prefix = model.forward_intermediates(
        x, [1], return_prefix_tokens=True, norm=True, output_fmt="NLC", intermediates_only=True
    )[0]
    stopped = model.forward_intermediates(x, [1], stop_early=True)[0]
    assert torch.equal(stopped, torch.cat([prefix, tokens], 1))
    found = model.forward_intermediates(x, 1, output_dict=True, return_prefix_tokens=True)
    assert torch.equal(found["image_features"], final) and torch.equal(found["image_intermediates"][0], maps[2])
    model.reset_classifier(7, "avg")
    assert model(x).shape == (2, 7)
    model.set_input_size((96, 32))
    assert model.pos_embed.shape == (1, 1 + 6 * 2, 12) and model(images(1, 3, 96, 32)).shape == (1, 7)
    assert model.prune_intermediate_layers([1]) == [1] and len(model.blocks) == 2
    features = timm.create_model("localvit_tiny", depth=4, features_only=True, in_chans=1)
    assert [m.shape for m in features(torch.randn(1, 1, 32, 40))] == 3 * [(1, 192, 2, 3)]
    assert small(class_token=False, global_pool="avg")(x).shape == (2, 5)
    refused("LocalViT has no init_values; leave it out", small, init_values=0.1)
    refused("which no mask hides", model.forward_features, x, is_causal=True)
    refused("unknown output_fmt 'NHWC'", model.forward_intermediates, x, output_fmt="NHWC")
    refused(r"images have shape \(2, 4, 8, 8\)", model, images(2, 4, 8, 8))


def test_contract__checkpointing_changes_nothing_and_groups_follow_the_depth():
    x, results = images(2, 3, 48, 64), []
    for checkpointed in (False, True):
        model = small(drop_path_rate=0.5).train()
        model.set_grad_checkpointing(checkpointed)
        torch.manual_seed(3)
        (output,), gradients = outputs_and_gradients(model, nn.Module.__call__, [x])
        results.append({"output": output, **gradients})
    assert_all_close(*results, 1e-9)
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    assert groups.keys() == {name for name, _ in model.named_parameters()}
    assert {groups[name] for name in groups if name.startswith("blocks.1.")} == {2}
    assert model.blocks[1].drop_path.drop_prob == 0.5  # of the attention, as released


@pytest.mark.slow
@torch.no_grad()
def test_broadcast_fused_and_exported__any_number_of_images():
    model, x = small(), images(3, 3, 64, 64)
    fused = broadsight.fuse(model)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())
    assert_close(fused(x), model(x))
    with_context = broadsight.add_context_broadcast(small())
    found = {name: m for name, m in with_context.named_modules() if isinstance(m, ContextBroadcast)}
    assert list(found) == [f"blocks.{i}.mlp.context_broadcast" for i in range(2)]
    for one in (model, with_context):
        program = capture(prepare(one, (64, 64)), (3, 64, 64)).module()
        bare = torch.export.export(one, (x[:2],), dynamic_shapes={"x": {0: torch.export.Dim("batch", max=64)}}).module()
        for batch in (1, 3):
            assert_close(program(x[:batch]), one(x[:batch]))
            assert_close(bare(x[:batch]), one(x[:batch]))
