"""STViT against tensors computed by an independent implementation in float64."""

from itertools import pairwise

import pytest
import timm
import torch
from torch import nn

import broadsight
from broadsight.models import STViT
from broadsight.papers.macs import FVCORE, PRODUCTS, count, published_macs
from tests.compare import parameters
from tests.golden import checkpoint, images, key_lists
from tests.refusals import refused

IO = {
    "stvit_tiny_io_224x224": "stvit_tiny_weights",
    "stvit_tiny_io_200x168": "stvit_tiny_weights",
    "stvit_tiny_iter2_io_200x136": "stvit_tiny_weights",
    "stvit_tiny_ls_io_128x96": "stvit_tiny_ls_weights",
}

SMALL = dict(dims=(8, 16, 24, 32), depths=(1, 2, 1, 1), heads=(1, 2, 3, 4), projection=16, num_classes=5)


def build(config: dict) -> STViT:
    theirs = dict(dims="embed_dim", heads="num_heads", cells="stoken_size", iterations="n_iter")
    same = ("depths", "mlp_ratio", "projection", "qkv_bias", "num_classes", "in_chans")
    arguments = {ours: config[name] for ours, name in (theirs | dict(zip(same, same, strict=True))).items()}
    return STViT(**arguments, layer_scale=[1e-6 if scaled else None for scaled in config["layerscale"]])


def released(tensors: dict) -> dict:
    return {key.removeprefix("sd."): value for key, value in tensors.items() if key.startswith("sd.")}


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * max(1.0, expected.abs().max().item()))


def far(got: torch.Tensor, expected: torch.Tensor) -> float:
    return (got.reshape(expected.shape) - expected).abs().max().item()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("io", IO)
def test_golden_inference(golden, io, fused):
    tensors, config = golden(io)
    model = broadsight.load_release(build(config), released(golden(IO[io])[0])).eval()
    model = broadsight.fuse(model) if fused else model
    seen = {}
    modules = {"stem": model.stem, "s1b1_attn_out": model.stages[0].blocks[0].attn}
    modules |= {f"merge{i}": model.stages[i].downsample for i in (1, 2, 3)}
    modules |= {f"stage{i + 1}": model.stages[i] for i in range(4)}
    for name, module in modules.items():
        module.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: (inputs, output)}))
    with torch.no_grad():
        features = model.forward_features(tensors["input"])
        assert_close(model.forward_head(features), tensors["logits"])
        if "feat.pooled" in tensors:
            assert_close(model.forward_head(features, pre_logits=True), tensors["feat.pooled"])
    inputs, output = seen.pop("s1b1_attn_out")
    if "feat.s1b1_attn_in" in tensors:
        assert_close(inputs[0], tensors["feat.s1b1_attn_in"])
    residual = inputs[1] if len(inputs) > 1 else 0  # the sum with the residual is fused into the layer
    assert_close(output - residual, tensors["feat.s1b1_attn_out"])
    checked = [name for name in seen if f"feat.{name}" in tensors]
    assert len(checked) >= 2
    for name in checked:
        assert_close(seen[name][1], tensors[f"feat.{name}"])


# Some gradients are exactly zero (a bias before a norm): sums of terms as large as the others, of which rounding is
# left. In double precision, in which the golden ones were computed, nothing is.
@pytest.mark.parametrize(("dtype", "relative", "rounding"), [(torch.float32, 5e-4, 1e-6), (torch.float64, 1e-6, 1e-12)])
def test_golden_training_step(golden, dtype, relative, rounding):
    tensors, config = golden("stvit_tiny_train_72x56")
    tensors = {key: value.to(dtype) if value.is_floating_point() else value for key, value in tensors.items()}
    model = broadsight.load_release(build(config), released(golden("stvit_tiny_weights")[0])).to(dtype).train()
    images = tensors["input"].requires_grad_()
    logits = model(images)
    assert_close(logits, tensors["logits"])
    (logits * tensors["cotangent"]).sum().backward()
    gradients = {f"grad.{STViT.released_name(name)}": p.grad for name, p in model.named_parameters()}
    gradients["grad_input"] = images.grad
    buffers = {f"after.{STViT.released_name(name)}": b for name, b in model.named_buffers()}
    stored = {key for key in tensors if key.startswith(("grad", "after."))}
    assert len(stored) > 100 and stored <= gradients.keys() | buffers.keys()
    largest = max(tensors[key].abs().max().item() for key in stored & gradients.keys())
    for key in stored & gradients.keys():
        limit = relative * tensors[key].abs().max().item() + rounding * largest
        assert far(gradients[key], tensors[key]) <= limit, key
    for key in stored & buffers.keys():
        torch.testing.assert_close(buffers[key], tensors[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["stvit_small", pytest.param("stvit_base", marks=pytest.mark.slow)])
def test_golden__whole_model_gives_the_authors_outputs(golden, name):
    tensors, _ = golden(name.replace("stvit", "stvit_full"))
    model = broadsight.load_release(timm.create_model(name), checkpoint(name)).eval().double()
    for size in ((224, 224), (136, 200)):
        expected = tensors["logits.{}x{}".format(*size)].double()
        with torch.no_grad():
            assert far(model(images(*size)), expected) <= 1e-6 * expected.std()


# Name: parameters, and GMACs at 224 and 384 pixels at the digits to which they are known.
SIZES = {
    "stvit_small": (25_495_624, "4.3665", "14.156"),
    "stvit_base": (51_691_288, "9.8720", "31.489"),
    "stvit_large": (94_971_096, "15.597", "49.748"),
}


# The larger ones take part in the slow tests; test_verify counts them too, to the digits that are printed.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "stvit_small")) for name in SIZES]
)
def test_sizes_and_macs__of_every_variant(name):
    total, *macs = SIZES[name]
    model = timm.create_model(name, device=torch.device("meta"))
    assert parameters(model) == total
    for side, printed in zip((224, 384), macs, strict=True):
        digits = len(printed.split(".")[1])
        assert f"{published_macs(model, (side, side), FVCORE) / 1e9:.{digits}f}" == printed


@pytest.mark.parametrize("name", SIZES)
def test_released_name__covers_the_released_keys_and_shapes(name):
    released_shapes = key_lists()[name]
    constants = {key for key in released_shapes if key.endswith(("attn.unfold.weights", "attn.fold.weights"))}
    model = timm.create_model(name, device=torch.device("meta"))
    assert len(constants) == 2 * sum(len(stage.blocks) for stage in model.stages)

    def sides(shapes: dict) -> dict:  # linear layers are 1x1 convolutions there, layer scales (1, C, 1, 1) maps
        return {key: [n for n in shape if n != 1] for key, shape in shapes.items()}

    ours = {STViT.released_name(key): value.shape for key, value in model.state_dict().items()}
    assert len(ours) == len(model.state_dict())
    assert sides(ours) == sides({key: shape for key, shape in released_shapes.items() if key not in constants})


def isotropic(dims: tuple, depths: tuple, position: str, **common) -> STViT:
    heads = [dim // 32 for dim in dims]
    return STViT(dims, depths, heads, projection=0, stem="patch", position=position, ffn="plain", **common)


@pytest.mark.parametrize("position", ["relative", "none"])
@pytest.mark.parametrize(
    ("dims", "depths", "millions", "giga"),
    [((96, 192, 384, 768), (2, 2, 6, 2), 30, 4.3), ((64, 128, 320, 512), (3, 5, 9, 3), 24, 4.0)],
)
def test_sizes_and_macs__of_isotropic_variants(dims, depths, millions, giga, position):
    with torch.device("meta"):
        model = isotropic(dims, depths, position)
    stem = 48 * dims[0] + 3 * dims[0]
    transitions = sum(9 * a * b + 3 * b for a, b in pairwise(dims))
    blocks = sum(depth * (12 * dim**2 + 13 * dim) for dim, depth in zip(dims, depths, strict=True))
    # Offsets within 7, 7, 14 and 7 super tokens a side.
    tables = [depth * dim // 32 * side**2 for dim, depth, side in zip(dims, depths, (13, 13, 27, 13), strict=True)]
    total = stem + transitions + blocks + 1000 * dims[-1] + 1000
    assert parameters(model) == total + (sum(tables) if position == "relative" else 0)
    assert round(parameters(model) / 1e6) == millions
    if position == "relative":  # a bias costs no product
        executed, extra = count(model, (1, 3, 224, 224), convention=PRODUCTS)
        assert round((executed + extra) / 1e9, 1) == giga and extra > 0


@pytest.mark.parametrize("size", [(64, 64), (50, 71), (16, 70)])
@torch.no_grad()
def test_model__relative_positions_of_zero_are_none(size):
    dims, depths = (32, 32, 32, 64), (1, 1, 1, 1)
    none, relative = (isotropic(dims, depths, position, num_classes=5).eval() for position in ("none", "relative"))
    tables = [f"stages.{i}.blocks.0.attn.position.table" for i in range(4)]
    assert relative.load_state_dict(none.state_dict(), strict=False) == (tables, [])
    x = torch.randn(2, 3, *size)
    expected = none(x)
    assert not torch.allclose(relative(x), expected, atol=1e-7)
    for table in tables:
        nn.init.zeros_(relative.get_parameter(table))
    torch.testing.assert_close(relative(x), expected)


@torch.no_grad()
def test_model__zero_convolutions_are_none():
    """Position and MLP convolutions are residual: with zero kernels they leave their input alone."""
    conv, plain = STViT(**SMALL).eval(), STViT(**SMALL, position="none", ffn="plain").eval()
    convolutions = {name: p for name, p in conv.named_parameters() if ".cpe." in name or ".mlp.dw." in name}
    for parameter in convolutions.values():
        nn.init.zeros_(parameter)
    assert plain.load_state_dict(conv.state_dict(), strict=False) == ([], list(convolutions))
    x = torch.randn(2, 3, 50, 71)
    torch.testing.assert_close(plain(x), conv(x))


def test_stem__patches_by_hand():
    stem, x = STViT(**SMALL, stem="patch").double().stem, torch.randn(1, 3, 6, 9, dtype=torch.float64)
    patches = nn.functional.pad(x, (0, 3, 0, 2)).unfold(2, 4, 4).unfold(3, 4, 4)  # B C h w 4 4
    y = torch.einsum("bchwyx,ocyx->bohw", patches, stem.conv1.weight) + stem.conv1.bias[:, None, None]
    expected = (y - y.mean(1, keepdim=True)) / (y.var(1, correction=0, keepdim=True) + 1e-6).sqrt()
    assert expected.shape == (1, 8, 2, 3)
    torch.testing.assert_close(stem(x), expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(stem="patches"), "unknown stem 'patches'; .*expected one of conv, patch"),
        (dict(position="absolute"), "unknown position 'absolute'; .*expected one of conv, relative, none"),
        (dict(ffn="none"), "unknown ffn 'none'; .*expected one of conv, plain"),
        (dict(dims=(8, 16)), r"dims=\(8, 16\) has 2 entries; expected 4, one for each stage"),
        (dict(depths=(1, 1, 1)), r"depths=\(1, 1, 1\) has 3 entries"),
        (dict(heads=(1,)), r"heads=\(1,\) has 1 entries"),
        (dict(cells=(8, 4, 1)), r"cells=\(8, 4, 1\) has 3 entries"),
        (dict(iterations=(1, 1)), r"iterations=\(1, 1\) has 2 entries"),
        (dict(layer_scale=(None,)), r"layer_scale=\(None,\) has 1 entries"),
        (dict(heads=(1, 2, 5, 4)), "dim=24 does not split into heads=5"),
    ],
)
def test_wrong_arguments__are_refused(arguments, words):
    refused(words, STViT, **SMALL | arguments)


SWINS = dict(swin_isotropic=23_096_172, swin_isotropic_norpe=23_068_456, swin_isotropic_global=23_146_572)


@pytest.mark.parametrize("name", SWINS)
def test_swin__of_the_isotropic_comparison(name):
    model = timm.create_model(name, device="meta")
    blocks = [block for stage in model.layers for block in stage.blocks]
    sides = [13] * 20 if name != "swin_isotropic_global" else [13] * 8 + [27] * 9 + [13] * 3
    biases = [side**2 * block.attn.num_heads for side, block in zip(sides, blocks, strict=True)]
    tables = sum(biases) if name != "swin_isotropic_norpe" else 0
    dims, depths = (64, 128, 320, 512), (3, 5, 9, 3)
    total = 49 * 64 + 2 * 64 + sum(4 * a * b + 8 * a for a, b in pairwise(dims)) + 2 * 512 + 513 * 1000 + tables
    total += sum(depth * (12 * dim**2 + 13 * dim) for dim, depth in zip(dims, depths, strict=True))
    assert parameters(model) == total == SWINS[name]
    assert model(torch.empty(1, 3, 70, 33, device="meta")).shape == (1, 1000)
    maps = timm.create_model(name, features_only=True, device="meta")(torch.empty(1, 3, 224, 224, device="meta"))
    assert [m.shape[1:] for m in maps] == [(dim, 56 // 2**i, 56 // 2**i) for i, dim in enumerate(dims)]


@torch.no_grad()
def test_swin__without_positions_is_with_biases_of_zero():
    shallow = dict(depths=(1, 2, 1, 1), num_classes=5)
    plain, usual = (timm.create_model(f"swin_isotropic{end}", **shallow).eval() for end in ("_norpe", ""))
    missing, unexpected = usual.load_state_dict(plain.state_dict(), strict=False)
    assert {key.rpartition(".")[2] for key in missing} == {"relative_position_bias_table"} and not unexpected
    for key in missing:
        nn.init.zeros_(usual.get_parameter(key))
    for size in ((224, 224), (100, 64)):
        x = torch.randn(1, 3, *size)
        torch.testing.assert_close(plain(x), usual(x))
    plain.set_input_size((448, 448))
    assert plain.layers[0].blocks[0].attn.window_size == (14, 14) and plain(torch.randn(1, 3, 448, 448)).shape == (1, 5)
    refused("unknown position 'absolute'", timm.create_model, "swin_isotropic", position="absolute")
    refused(r"dims=\(8, 16\) has 2 entries", timm.create_model, "swin_isotropic", dims=(8, 16))
