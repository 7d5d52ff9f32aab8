"""MAT against the slow reference, and against the integers that its tables imply."""

import pytest
import timm
import torch
from torch import Tensor

from broadsight.layers import BilinearPatchEmbed
from broadsight.models import MAT
from broadsight.papers.macs import FVCORE, count, published_macs
from tests.compare import assert_bfloat16, assert_same_model, assert_trains_alike, parameters, randomize
from tests.reference import mat as reference
from tests.refusals import refused

SMALL = dict(dim=4, depths=(1, 1, 2, 1), heads=(1, 2, 4, 8), num_classes=5)

# Ours -> what the reference is given beside the same.
SWITCHES = {
    "default": (dict(), dict()),
    "mixers everywhere": (dict(mixer_stages=(1, 2, 3, 4)), dict()),
    "mixers in the last stage": (dict(mixer_stages=(4,)), dict()),
    "window attention": (dict(mixer="window"), dict()),
    "no mixer": (dict(mixer="none"), dict(mlp_dw=False)),
    "no mixer, convolution in the mlp": (dict(mixer="none", mlp_conv=True), dict(mlp_dw=True)),
    "no convolution in the mlp": (dict(mlp_conv=False), dict(mlp_dw=False)),
    "embedding by convolution": (dict(embed="conv"), dict()),
    "embedding by merging": (dict(embed="merge"), dict()),
    "token is key": (dict(token_is_key=True), dict()),
    "token is projected": (dict(token_projected=True), dict()),
    "token is key and projected": (dict(token_is_key=True, token_projected=True), dict()),
    "equations": (dict(reading="equations"), dict(token_is_key=True, token_projected=True)),
    "one channel": (dict(in_chans=1), dict()),
}


def pair(switch: str) -> tuple[MAT, reference.MAT]:
    mine, theirs = SWITCHES[switch]
    shared = {key: value for key, value in mine.items() if key not in ("mlp_conv", "reading")}
    return randomize(MAT(**SMALL, **mine).double()), reference.MAT(**SMALL, **shared, **theirs).double()


@pytest.mark.parametrize("size", [(64, 64), (117, 58)])  # the third stage: one padded window, two padded windows
@pytest.mark.parametrize("switch", SWITCHES)
def test_model__agrees_with_the_slow_reference_in_value_and_gradient(switch, size):
    ours, slow = pair(switch)
    assert_same_model(ours, slow, torch.randn(2, ours.in_chans, *size, dtype=torch.float64))


def test_model__several_windows_training_as_the_slow_reference_and_bfloat16():
    assert_same_model(*pair("default"), torch.randn(1, 3, 230, 33, dtype=torch.float64))
    assert_trains_alike(*pair("default"), statistics=7 * 3)
    assert_bfloat16(MAT(**SMALL), 0.05)


def gradients(size: int, dtype: torch.dtype) -> tuple[MAT, dict[str, Tensor]]:
    """Of a narrow model whose offsets have left zero, by parameter; projections are cut into query, key and value."""
    model = randomize(MAT(dim=4, depths=(1, 1, 1, 2), heads=(1, 2, 4, 8), num_classes=5)).to(dtype).train()
    model(torch.randn(2, 3, size, size, dtype=dtype)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    parts = {}
    for name, p in model.named_parameters():
        roles = {"mix_qkv": "qkv", "fuse_kv": "kv"}.get(name.split(".")[-2], "") or ["all"]
        parts |= {f"{name}:{role}": part for role, part in zip(roles, p.grad.chunk(len(roles)), strict=True)}
    return model, parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient__a_single_window_in_the_last_stage_leaves_its_mixing_untouched(dtype):
    """At 224 pixels both soft-maxes over windows have one entry there: their queries and keys cannot matter.

    On some processors the difference that should be zero keeps a rounding error.
    """
    model, parts = gradients(224, dtype)
    idle = [f"{layer}.{kind}:{role}" for kind in ("weight", "bias") for layer, role in IDLE]
    expected = {f"stages.3.blocks.{j}.attn.{name}" for j in (0, 1) for name in idle}
    largest = {name: p.grad.abs().max() * torch.finfo(dtype).eps for name, p in model.named_parameters()}
    assert [name for name in sorted(expected) if parts[name].abs().max() > largest[name.split(":")[0]]] == []
    assert {name for name, part in parts.items() if not part.any()} <= expected
    C = model.num_features
    assert sum(parts[name].numel() for name in expected) == 2 * (3 * C**2 + 3 * C)


def test_gradient__several_windows_in_the_last_stage_train_everything():
    _, parts = gradients(256, torch.float64)
    assert [name for name, part in parts.items() if not part.any()] == []
    for attn in ("stages.3.blocks.0.attn", "stages.3.blocks.1.attn"):
        value = parts[f"{attn}.mix_qkv.weight:v"].abs().max()
        for layer, role in IDLE:
            assert parts[f"{attn}.{layer}.weight:{role}"].abs().max() > 1e-10 * value  # far more than rounding


IDLE = [("mix_qkv", "q"), ("mix_qkv", "k"), ("fuse_kv", "k")]  # where there is one window


# Keyword arguments of the second variant: parameters and MACs at 224 pixels.
ROWS = {
    "mat_1": ({}, 6_713_664, 389_259_584),
    "mat_2": ({}, 10_767_496, 665_815_552),
    "mat_3": ({}, 17_008_164, 1_042_428_320),
    "mat_4": ({}, 29_056_584, 1_933_274_240),
    "mat_5": ({}, 50_107_944, 3_155_607_808),
    "mixers in stages 1 to 4": (dict(mixer_stages=(1, 2, 3, 4)), 10_874_312, 782_580_224),
    "mixers in stages 2 to 4": (dict(mixer_stages=(2, 3, 4)), 10_852_360, 707_009_024),
    "mixers in stage 4": (dict(mixer_stages=(4,)), 9_766_792, 567_996_928),
    "pure mlp": (dict(mixer="none"), 5_699_464, 460_867_072),
    "window attention": (dict(mixer="window"), 7_802_248, 659_262_976),
    "embedding by convolution": (dict(embed="conv"), 11_106_856, 703_297_024),
    "embedding by merging": (dict(embed="merge"), 10_891_816, 679_036_928),
}


def on_meta(name: str, **switches) -> MAT:
    return timm.create_model(name, device=torch.device("meta"), **switches)


@pytest.mark.slow  # test_verify counts them too, to the digits that are printed
@pytest.mark.parametrize("row", ROWS)
def test_sizes_and_macs__of_every_row(row):
    switches, total, macs = ROWS[row]
    model = on_meta(row if row.startswith("mat_") else "mat_2", **switches)
    assert parameters(model) == total
    assert published_macs(model, (224, 224), FVCORE) == macs


def test_sizes_and_macs__of_every_part():
    model = on_meta("mat_2")
    stages = model.stages
    parts = [
        (model.stem, (1, 3, 224, 224), 5_376, 22_679_552),
        (stages[1].downsample, (1, 32, 56, 56), 2_912, 2_308_096),
        (stages[2].downsample, (1, 64, 28, 28), 9_920, 1_956_864),
        (stages[3].downsample, (1, 128, 14, 14), 36_224, 1_781_248),
        (stages[0].blocks[0], (1, 56, 56, 32), 9_696, 29_804_544),
        (stages[1].blocks[0], (1, 28, 28, 64), 35_776, 27_747_328),
        (stages[2].blocks[0], (1, 14, 14, 128), 303_872, 43_021_824),
        (stages[2].blocks[0].attn, (1, 14, 14, 128), 165_248, 15_951_872),
        (stages[3].blocks[0], (1, 7, 7, 256), 1_197_568, 40_898_304),
        (stages[3].blocks[0].attn, (1, 7, 7, 256), 658_176, 14_518_272),
        (stages[3].norm, (1, 7, 7, 256), 512, 5 * 256 * 49),
        (model.head, (1, 256, 7, 7), 1280 * 256 + 1_284_840, 49 * (1280 * 256 + 3840) + 1_280_000),
    ]
    for module, shape, size, macs in parts:
        assert (parameters(module), sum(count(module, shape, convention=FVCORE))) == (size, macs)


def test_arguments__give_widths_heads_and_decay_and_sampling_at_the_patch_centres():
    model = MAT(**SMALL)
    embeds = [module for module in model.modules() if isinstance(module, BilinearPatchEmbed)]
    assert len(embeds) == 3 and not any(embed.offset_proj.weight.any() for embed in embeds)
    assert all(embed.offset_dw.weight.any() for embed in embeds)
    model = MAT(**SMALL, mlp_ratio=3, hidden=64, window=5)
    assert [stage.blocks[0].mlp.fc1.weight.shape for stage in model.stages] == [(3 * d, d) for d in (4, 8, 16, 32)]
    assert model.head.proj.weight.shape == (64, 32) and model.head_hidden_size == 64
    assert model.stages[2].blocks[0].attn.window == 5
    tokens = {"stages.2.blocks.0.attn.token", "stages.2.blocks.1.attn.token", "stages.3.blocks.0.attn.token"}
    assert model.no_weight_decay() == tokens
    full = MAT(dim=32, depths=(1, 1, 1, 1), heads=(8, 16), mixer_stages=(1, 2, 3, 4))
    assert [stage.blocks[0].attn.heads for stage in full.stages] == [2, 4, 8, 16]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(mixer="matt"), "unknown mixer 'matt'; .*expected one of mat, window, none"),
        (dict(embed="pool"), "unknown embed 'pool'; .*expected one of bilinear, conv, merge"),
        (dict(mixer_stages=(0, 3)), r"mixer_stages=\(0, 3\) are not stages; choose among 1, 2, 3 and 4"),
        (dict(depths=(1, 1, 1)), r"depths=\(1, 1, 1\) has 3 entries; expected 4, one for each stage"),
        (dict(heads=(1, 2, 4)), r"heads=\(1, 2, 4\) has 3 entries"),
        (dict(dim=5), "dim=5 is odd; the stem starts with half of it"),
        (dict(heads=(1, 2, 3, 4)), "dim=16 does not split into heads=3"),
    ],
)
def test_wrong_arguments__are_refused(arguments, words):
    refused(words, MAT, **SMALL | arguments)
