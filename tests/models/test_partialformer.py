"""PartialFormer against the slow reference, and against the integers that its tables imply."""

from fractions import Fraction

import pytest
import timm
import torch

from broadsight.models import PartialFormer
from broadsight.models.partialformer import normed_saliency, saliency
from broadsight.papers.macs import PRODUCTS, count
from tests.compare import assert_bfloat16, assert_close, assert_same_model, assert_trains_alike, parameters, randomize
from tests.reference import partialformer as reference
from tests.refusals import refused

SMALL = dict(dim=8, depths=(1, 1, 2, 1), heads=(1, 2, 2, 4), num_classes=5)
MANY = dict(foreground=(49, 49, 196, 49))

# What both are given, or ours -> what the reference is given.
SWITCHES = {
    "default": {},
    "background update alone": (dict(background_identity=False), dict(bg_identity=False)),
    "projection of all tokens": dict(project_all=True),
    "convolution in the mlp": (dict(mlp_conv=True, peg_kernel=3), dict(mlp_dw=True, peg_kernel=3)),
    "stem of two convolutions": dict(stem="conv2"),
    "stem of one convolution": dict(stem="patch7"),
    "pool first": dict(pool_first=True),
    "feature norms": dict(feature_norms=True),
    "head expansion": dict(head_expansion=2),
    "channel hidden": dict(channel_hidden=6),
    "channel hidden of each stage": dict(channel_hidden=(3, 4, 5, 6)),
    "counts": dict(foreground=(400, 200, 100, 30)),
    "fixed counts": dict(foreground=(9, 7, 5, 3), foreground_fixed=True),
    "limit": tuple({"foreground": (1500, 300, 100, 40), key: 6} for key in ("foreground_limit", "foreground_cap")),
    "no background required": (MANY | dict(background_required=False), MANY | dict(foreground_uncapped=True)),
    "fractions": (
        dict(foreground=(Fraction(1, 80), 0.04, 0.25, Fraction(1, 3))),
        dict(foreground=(Fraction(3136, 80), Fraction(784, 25), 49, Fraction(49, 3))),
    ),
    "equations": dict(reading="equations"),
    "one channel": dict(in_chans=1),
}


def pair(switch: str) -> tuple[PartialFormer, reference.PartialFormer]:
    mine, theirs = SWITCHES[switch] if isinstance(SWITCHES[switch], tuple) else 2 * (SWITCHES[switch],)
    ours = randomize(PartialFormer(**SMALL, **mine).double())
    return ours.eval(), reference.PartialFormer(**SMALL, **theirs).double().eval()


@pytest.mark.parametrize("size", [(64, 64), (43, 58)])
@pytest.mark.parametrize("switch", SWITCHES)
def test_model__agrees_with_the_slow_reference_in_value_and_gradient(switch, size):
    ours, slow = pair(switch)
    assert_same_model(ours, slow, torch.randn(2, ours.in_chans, *size, dtype=torch.float64))


@pytest.mark.parametrize("switch", ["default", "pool first"])
def test_model__trains_as_the_slow_reference(switch):
    assert_trains_alike(*pair(switch), statistics=9)


def test_model__constant_images_and_half_precision():
    """Equal scores wherever the image is flat: the lower raster index is foreground, in both."""
    ours, slow = pair("default")
    slow.load_state_dict(ours.state_dict())
    x = torch.full((1, 3, 128, 96), 0.5, dtype=torch.float64)
    assert_close(ours(x), slow(x), "logits", 1e-9)
    # Rounding may move single tokens between foreground and background: the bound is loose.
    assert_bfloat16(PartialFormer(**SMALL), 0.1)


def test_saliency__is_the_channel_mean_in_single_precision_without_gradient():
    x = torch.randn(2, 3, 4, 6, requires_grad=True)
    scores = saliency(x)
    assert scores.shape == (2, 12) and not scores.requires_grad
    torch.testing.assert_close(scores, x.detach().sum(-1).view(2, 12) / 6)
    narrow = x.detach().bfloat16()
    torch.testing.assert_close(saliency(narrow), narrow.float().sum(-1).view(2, 12) / 6, rtol=1e-6, atol=1e-6)
    assert saliency(x.double()).dtype == torch.float64


def test_normed_saliency__is_the_channel_mean_after_the_norm_without_rounding():
    x, norm = torch.randn(2, 3, 4, 6) + 5, torch.nn.LayerNorm(6, eps=1e-6)
    assert not normed_saliency(x, norm).any()  # exactly: as it begins, the norm leaves no mean
    assert not torch.equal(norm(x).mean(-1), torch.zeros(2, 3, 4))  # where its sum has rounding errors
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    scores = normed_saliency(x.requires_grad_(), norm)
    assert scores.shape == (2, 12) and not scores.requires_grad and scores.std() > 0.1
    torch.testing.assert_close(scores, norm(x).mean(-1).flatten(1).detach(), rtol=1e-5, atol=1e-5)
    assert normed_saliency(x.bfloat16(), norm.bfloat16()).dtype == torch.float32


def test_reading__of_the_equations_begins_with_the_first_tokens_and_learns_to_choose():
    model = PartialFormer(**SMALL, reading="equations")
    norm = model.stages[0].blocks[0].norm1
    x = torch.randn(1, 16, 16, 8)
    assert not normed_saliency(x, norm).any()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        model(torch.randn(4, 3, 64, 64)).square().mean().backward()
        optimizer.step()
    assert normed_saliency(x, norm).std() > 1e-5
    refused("unknown reading 'equatoins'; did you mean 'equations'", PartialFormer, **SMALL, reading="equatoins")


# Name: parameters, parameters as a dense backbone, of the blocks of each stage, and MACs at 224 pixels.
SIZES = {
    "partialformer_b0": (5_294_952, 3_765_968, (17_368, 62_488, 708_168, 2_754_156), 416_406_304),
    "partialformer_b1": (8_236_736, 6_625_944, (29_272, 107_800, 1_238_088, 4_853_904), 718_696_576),
    "partialformer_b2": (21_091_504, 19_317_096, (62_376, 235_608, 3_665_040, 14_463_264), 1_913_680_256),
    "partialformer_b3": (36_137_080, 34_199_056, (107_800, 412_696, 6_471_872, 25_624_960), 3_364_922_112),
    "partialformer_b4": (64_529_380, 62_264_124, (235_608, 916_260, 14_463_264, 43_094_448), 6_810_667_904),
}
EXECUTED = {"partialformer_b1": 0.596e9, "partialformer_b4": 5.56e9}


@pytest.mark.slow  # test_verify counts them too, to the digits that are printed
@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_macs__of_every_variant(name):
    total, dense, blocks, macs = SIZES[name]
    model = timm.create_model(name, device=torch.device("meta"))
    assert parameters(model) == total
    assert tuple(parameters(stage.blocks) for stage in model.stages) == blocks
    backbone = timm.create_model(name, features_only=True, device=torch.device("meta"))
    assert parameters(backbone) == dense
    assert backbone.feature_info.channels() == [d * model.num_features // 8 for d in (1, 2, 4, 8)]
    executed, extra = count(model, (1, 3, 224, 224), convention=PRODUCTS)
    assert executed + extra == macs
    assert 0.80 * macs < executed < 0.85 * macs  # the background is never projected
    if name in EXECUTED:
        assert executed == pytest.approx(EXECUTED[name], rel=1e-3)


def test_macs__of_every_part():
    """Of the second variant, in millions, as the closed forms give them."""
    model = timm.create_model("partialformer_b1", device=torch.device("meta"))
    dims, sides = (32, 64, 128, 256), (56, 28, 14, 7)

    def millions(module, *shape):
        return round(sum(count(module, shape, convention=PRODUCTS)) / 1e6, 2)

    assert millions(model.stem, 1, 3, 224, 224) == 48.77
    assert [millions(model.stages[i].downsample, 1, dims[i - 1], *2 * [sides[i - 1]]) for i in (1, 2, 3)] == [14.45] * 3
    blocks = zip(model.stages, sides, dims, strict=True)
    assert [millions(stage.blocks, 1, side, side, dim) for stage, side, dim in blocks] == [81.27, 76.07, 222.90, 228.99]
    assert millions(model.head, 1, 256, 7, 7) == 17.34


# Other readings of the text: parameters of the five variants in millions, and GMACs of the largest.
READINGS = {
    "convolutions in the mlp": ((5.295, 8.237, 21.092, 36.137, 64.529), 6.806),
    "projection of all tokens": ((5.3, 8.2, 21.1, 36.1, 64.5), 6.829),
    "49 tokens in every stage": ((5.3, 8.2, 21.1, 36.1, 64.4), 6.826),
    "twice the heads": ((5.3, 8.2, 21.1, 36.1, 64.5), 6.821),
}


def reading(which: str, dim: int) -> dict:
    hidden = [max(8, dim * 2**i // 32) for i in range(4)]
    conv, pooled = dict(peg_kernel=3, mlp_conv=True), dict(pool_first=True)
    halves = dict(head_expansion=2, channel_hidden=hidden)
    shares = (1 / 80, 1 / 25, 1 / 16, 1 / 3)
    counts = dict(foreground=4 * (49,), background_required=False, stem="conv2")
    return {
        "convolutions in the mlp": conv | dict(foreground=(39, 10, 20, 16)),
        "projection of all tokens": pooled | dict(project_all=True, stem="patch7", foreground=shares),
        "49 tokens in every stage": conv | pooled | counts | halves,
        "twice the heads": halves | dict(foreground=(1 / 256, 1 / 64, 1 / 16, Fraction(1, 2))),
    }[which]


@pytest.mark.parametrize("which", READINGS)
def test_sizes_and_macs__of_other_readings(which):
    millions, macs = READINGS[which]
    same = which == "convolutions in the mlp"  # equal weights, otherwise placed
    for i, dim in enumerate((24, 32, 48, 64, 96)):
        model = timm.create_model(f"partialformer_b{i}", device=torch.device("meta"), **reading(which, dim))
        assert round(parameters(model) / 1e6, 3 if same else 1) == millions[i]
        assert not same or parameters(model) == SIZES[f"partialformer_b{i}"][0]
    assert round(sum(count(model, (1, 3, 224, 224), convention=PRODUCTS)) / 1e9, 3) == macs


def test_widths_and_decay__follow_from_the_arguments():
    model = PartialFormer(**SMALL, mlp_ratio=3, hidden=64)
    assert [stage.blocks[0].mlp.fc1.weight.shape for stage in model.stages] == [(3 * d, d) for d in (8, 16, 32, 64)]
    assert model.head.proj.weight.shape == (64, 64) and model.head_hidden_size == 64
    tokens = {f"stages.{i}.blocks.{j}.attn.token" for i, n in enumerate((1, 1, 2, 1)) for j in range(n)}
    assert model.no_weight_decay() == tokens


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(stem="conv4"), "unknown stem 'conv4'; .*expected one of conv3, conv2, patch7"),
        (dict(depths=(1, 1, 1)), r"depths=\(1, 1, 1\) has 3 entries; expected 4, one for each stage"),
        (dict(heads=(1, 2)), r"heads=\(1, 2\) has 2 entries"),
        (dict(foreground=(39,)), r"foreground=\(39,\) has 1 entries"),
        (dict(foreground=(0, 1, 1, 1)), r"foreground=\(0, 3136\) is not a pair"),
        (dict(foreground=(1.5, 1, 1, 1)), "foreground=1.5 is not a fraction of the tokens; .* above 0 and up to 1$"),
        (dict(foreground=(0.0, 1, 1, 1)), "foreground=0.0 is not a fraction"),
        (dict(channel_hidden=(4, 4)), r"channel_hidden=\(4, 4\) has 2 entries"),
        (dict(peg_kernel=4), "peg_kernel=4 is even; a convolution that keeps the size needs an odd one"),
        (dict(dim=9), "dim=9 is odd; the stem starts with half of it"),
        (dict(heads=(1, 2, 3, 4)), "dim=32 does not split into heads=3"),
    ],
)
def test_wrong_arguments__are_refused(arguments, words):
    refused(words, PartialFormer, **SMALL | arguments)
