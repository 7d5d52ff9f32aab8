"""Attention entropy against weights that are known: by hand, from torch, or from the model's own projections."""

import copy
import json
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import broadsight
from broadsight.analysis import LayerEntropy, attention_entropy, plot_attention_entropy
from broadsight.inspection import attention_rows
from broadsight.inspection.watch import hooked
from broadsight.layers import PartialAttention, SuperTokenAttention
from broadsight.layers.kernels import slices
from tests.analysis.measures.toy_models import Attends, Made
from tests.compare import randomize
from tests.inspection.timm_models import created, images
from tests.refusals import refused
from tests.training.small_runs import refusal
from tests.zoo import SMALLEST, shallow


def entropy(weights: Tensor) -> Tensor:
    """Term by term, of the last axis."""
    return -(weights * weights.clamp(min=torch.finfo(weights.dtype).tiny).log()).sum(-1)


def assert_alike(one: dict[str, LayerEntropy], other: dict[str, LayerEntropy], tolerance: float = 1e-6) -> None:
    assert [(name, x.keys) for name, x in one.items()] == [(name, x.keys) for name, x in other.items()]
    for x, y in zip(one.values(), other.values(), strict=True):
        assert x == pytest.approx(y, abs=tolerance) and x.heads == pytest.approx(y.heads, abs=tolerance)


def assert_rows(found: LayerEntropy, rows: Tensor, tolerance: float = 1e-6) -> None:
    """The mean of entropies (B, heads, N), and that of each head."""
    assert found == pytest.approx(rows.mean().item(), abs=tolerance)
    assert found.heads == pytest.approx(rows.mean((0, 2)).tolist(), abs=tolerance)


def measured(attend, x: Tensor, **options) -> LayerEntropy:
    (found,) = attention_entropy(Attends(attend), x, **options).values()
    return found


def sdpa(x: Tensor, **options) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, **options)


ONE_HOT = 100 * torch.eye(8).expand(2, 3, 8, 8)
TWO_OF_FOUR = torch.tensor([0.0, 0.0, -200.0, -200.0]).expand(1, 1, 5, 4)


@pytest.mark.parametrize(
    ("attend", "x", "heads"),
    [
        (sdpa, torch.zeros(2, 3, 49, 8), [math.log(49)] * 3),
        (sdpa, ONE_HOT, [0] * 3),
        (lambda x: x.softmax(-1), TWO_OF_FOUR, [math.log(2)]),
        (sdpa, torch.stack([0 * ONE_HOT[:, 0], ONE_HOT[:, 0]], 1), [math.log(8), 0]),
    ],
    ids=["uniform", "one hot", "two of four", "one head of each"],
)
def test_by_hand(attend, x, heads):
    found = measured(attend, x)
    assert found.heads == pytest.approx(heads, abs=1e-6) and found == pytest.approx(sum(heads) / len(heads), abs=1e-6)
    uniform = math.log(found.keys)
    assert found.uniform == uniform and found.density == pytest.approx(found / uniform, abs=1e-6)


def test_rounding__does_not_exceed_uniform_nonsense_shows_and_autocast_is_kept_out():
    for keys in (3, 10, 197, 1000):
        found = measured(sdpa, torch.zeros(2, 3, keys, 8))
        assert 1 - 1e-6 < found.density <= 1 and max(found.heads) <= found.uniform and found.keys == keys
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(2, 3, 5, 700).to(dtype)
        found = measured(lambda _, x=x: x.softmax(-1), x)
        assert found == pytest.approx(entropy(x.double().softmax(-1)).mean().item(), abs=1e-5)
    assert math.isnan(measured(sdpa, torch.full((2, 3, 5, 8), torch.nan)))
    x = torch.randn(2, 3, 50, 8).bfloat16().float()
    with torch.autocast("cpu", torch.bfloat16):
        found = measured(sdpa, x)
    assert_rows(found, entropy((x * 8**-0.5 @ x.mT).softmax(-1)))


class Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.softmax(-1)


SPELLINGS = [lambda x: x.softmax(-1), lambda x: x.softmax(dim=3), nn.Softmax(dim=-1), Inside.apply]
SPELLINGS += [lambda x: torch.softmax(x, dim=-1), lambda x: torch.softmax(x, -1, torch.float32)]
SPELLINGS += [lambda x: torch.special.softmax(x, -1), lambda x: F.softmax(x, dim=-1)]
SPELLINGS += [lambda x: F.softmax(input=x, dim=3, dtype=torch.float32)]


@pytest.mark.parametrize("softmax", SPELLINGS)
def test_softmax__in_every_spelling(softmax):
    x = torch.randn(2, 3, 5, 7)
    found = measured(softmax, x)
    assert_rows(found, entropy(x.softmax(-1)))
    assert found.keys == 7


def test_softmax__over_other_axes_or_outside_attention_does_not_count_and_several_are_numbered():
    x = torch.randn(2, 3, 5, 7)
    for other in (lambda x: x.softmax(1), lambda x: x.softmax(-2), lambda x: x[0, 0].softmax(-1), torch.sigmoid):
        assert "has no attention weights" in refusal(lambda other=other: measured(other, x))

    model = Made(lambda self, x: self.gated(x.softmax(-1)).softmax(-1), gated=Attends(sdpa))
    (found,) = attention_entropy(model, x).values()
    assert found.keys == 5

    def attend(x: Tensor) -> Tensor:
        return sdpa(x) + sdpa(x[:, :, :2]).sum() + x.softmax(-1)

    found = attention_entropy(Attends(attend), torch.randn(3, 2, 5, 7), batch_size=2)
    assert {name: x.keys for name, x in found.items()} == {"attn": 5, "attn#2": 2, "attn#3": 7}


HEADS = [((2, 5, 7), 2, None), ((2, 3, 5, 7), 3, 1), ((2, 3, 5, 7), None, 1), ((2, 3, 5, 7), 4, None)]
HEADS += [((2, 3, 4, 5, 7), 3, 1), ((2, 3, 4, 5, 7), 4, 2), ((2, 3, 4, 5, 7), None, None)]


@pytest.mark.parametrize(("shape", "heads", "axis"), HEADS)
def test_heads__are_where_the_module_says(shape, heads, axis):
    logits = torch.randn(shape)
    model = Attends(lambda x: logits.softmax(-1), heads)
    (found,) = attention_entropy(model, torch.zeros(1, 1, 1, 1)).values()
    rows = entropy(logits.softmax(-1))
    expected = rows.mean() if axis is None else rows.movedim(axis, 0).flatten(1).mean(1)
    assert found.heads == pytest.approx(expected.view(-1).tolist()) and found == pytest.approx(rows.mean().item())


def seen_by_torch(q: Tensor, k: Tensor, **options) -> Tensor:
    """The weights of torch's own attention: with the identity as values it gives them away."""
    values = torch.eye(k.shape[-2], dtype=k.dtype).expand(*k.shape[:-1], -1)
    return F.scaled_dot_product_attention(q, k, values, **options)


BOOLEAN = torch.rand(2, 1, 5, 6, generator=torch.Generator().manual_seed(0)) > 0.4
BOOLEAN[..., 0] = True
PRODUCTS = [{}, dict(scale=0.7), dict(is_causal=True), dict(enable_gqa=True), dict(attn_mask=BOOLEAN)]
PRODUCTS += [dict(attn_mask=BOOLEAN[0, 0]), dict(attn_mask=torch.linspace(-3, 3, 60).view(2, 5, 6), scale=0.1)]


@pytest.mark.parametrize("options", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [1 << 20, 1])
def test_product__of_every_kind(options, dtype, limit, monkeypatch):
    monkeypatch.setattr(attention_rows, "WEIGHTS_BYTES", limit)
    heads = 4 if "enable_gqa" in options else 2
    q = torch.randn(2, heads, 5, 8, dtype=torch.float64).to(dtype)
    k = torch.randn(2, 2, 6, 8, dtype=torch.float64).to(dtype)
    precise = {name: x.double() if torch.is_tensor(x) and x.dtype != torch.bool else x for name, x in options.items()}
    expected = entropy(seen_by_torch(q.double(), k.double(), **precise))
    options = {name: x.to(dtype) if torch.is_tensor(x) and x.dtype != torch.bool else x for name, x in options.items()}
    found = measured(lambda x: F.scaled_dot_product_attention(q, k, k, **options), torch.zeros(1, 1, 1, 1))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2 if "attn_mask" in options else 1e-6}
    assert_rows(found, expected, tolerance[dtype])
    assert found.keys == 6


def test_product__arguments_by_position_one_query_for_all_images_and_masked_rows():
    x, q = torch.randn(2, 3, 5, 8), torch.randn(3, 1, 8)
    found = measured(lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.0, True), x)
    assert_rows(found, entropy(seen_by_torch(x, x, is_causal=True)))
    found = measured(lambda x: F.scaled_dot_product_attention(q.expand(2, -1, -1, -1), x, x), x)
    assert_rows(found, entropy((q * 8**-0.5 @ x.mT).softmax(-1)))
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[1] = False

    def plain(x: Tensor) -> Tensor:
        return (x * 8**-0.5 @ x.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ x

    for attend in (lambda x: sdpa(x, attn_mask=mask), plain):
        assert_rows(measured(attend, x), entropy((x * 8**-0.5 @ x.mT).softmax(-1))[:, :, [0, 2, 3, 4]])


def asks(self: Made, x: Tensor, need_weights: bool = False) -> Any:
    """Tokens are the seven rows of an image; the first five ask the last six."""
    queries, keys = x[:, 0, :5], F.pad(x[:, 0, 1:], (0, self.attn.kdim - 8))
    if not self.attn.batch_first:
        queries, keys = queries.transpose(0, 1), keys.transpose(0, 1)
    return self.attn(queries, keys, keys, need_weights=need_weights, average_attn_weights=False, **self.masks)


LAYERS = [{}, dict(batch_first=True), dict(bias=False, add_bias_kv=True, batch_first=True)]
LAYERS += [dict(kdim=11, vdim=11, add_zero_attn=True)]
PADDING = ~BOOLEAN[:, 0, 0].repeat(2, 1)[:3]
MASKS = [{}, dict(attn_mask=~BOOLEAN[0, 0]), dict(attn_mask=torch.linspace(-3, 3, 180).view(6, 5, 6))]
MASKS += [dict(key_padding_mask=PADDING), dict(key_padding_mask=PADDING, attn_mask=~BOOLEAN[0, 0])]


@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("masks", MASKS)
@torch.no_grad()
def test_multi_head__is_what_torch_says(options, masks):
    model = randomize(Made(asks, attn=nn.MultiheadAttention(8, 2, **options), masks=masks)).eval()
    x = torch.randn(3, 1, 7, 8)
    assert_rows(attention_entropy(model, x)["attn"], entropy(model(x, need_weights=True)[1].double()))


@pytest.mark.parametrize("mask", [None, ~BOOLEAN[0, 0, :, :5], ~BOOLEAN[:, 0, :, :5].repeat(2, 1, 1)])
def test_multi_head__as_a_function(mask):
    x, weight, bias = torch.randn(5, 2, 8), torch.randn(24, 8), torch.randn(24)  # N B C
    options = dict(in_proj_weight=weight, in_proj_bias=bias, attn_mask=mask, training=False, bias_k=None, bias_v=None)
    options |= dict(out_proj_weight=torch.eye(8), out_proj_bias=None, add_zero_attn=False, dropout_p=0.0)

    def attend(x: Tensor, **others) -> Any:
        return F.multi_head_attention_forward(x, x, x, 8, 2, **options, **others)

    found = measured(lambda _: attend(x, need_weights=False), torch.zeros(1, 1, 1, 1))
    assert_rows(found, entropy(attend(x, average_attn_weights=False)[1]), 1e-5)


def test_multi_head__in_torchs_encoder_with_its_fast_path():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    model = Made(lambda self, x: self.layers(x.flatten(2).mT), layers=encoder)
    found = attention_entropy(model, torch.randn(2, 8, 3, 3))
    assert list(found) == ["layers.layers.0.self_attn", "layers.layers.1.self_attn"]
    assert all(0 < x < math.log(9) and len(x.heads) == 2 for x in found.values())


def test_vit__is_what_its_projections_give():
    model = created("test_vit")
    x = images("test_vit")
    for block in model.blocks:
        block.attn.qkv.weight.data *= 3  # random weights attend almost uniformly, and an error would hardly show
    inputs: list[Tensor] = []
    attns = [block.attn for block in model.blocks]
    with torch.no_grad(), hooked(attns, before=lambda module, args, _: inputs.append(args[0])):
        model(x)
    found = attention_entropy(model, x)
    assert list(found) == [f"blocks.{i}.attn" for i in range(len(model.blocks))]
    for block, tokens, one in zip(model.blocks, inputs, found.values(), strict=True):
        heads, (B, N, C) = block.attn.num_heads, tokens.shape
        q, k, _ = block.attn.qkv(tokens).view(B, N, 3, heads, C // heads).unbind(2)  # B N heads d
        rows = entropy((torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(C // heads)).softmax(-1))
        assert one.keys == N and 0.1 < one.density < 0.9
        assert one == pytest.approx(rows.mean().item(), rel=1e-5)
        assert one.heads == pytest.approx(rows.mean((0, 2)).tolist(), rel=1e-5)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "hiera_tiny_224"])
def test_fused__and_written_out_are_the_same(name):
    model, x = created(name), images(name)
    found = {}
    for fused in (True, False):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        found[fused] = attention_entropy(model, x)
    assert_alike(found[True], found[False], 1e-5)


PATTERNS = {
    r"blocks\.\d+\.attn": "vit_tiny_patch16_224 deit_tiny_distilled_patch16_224 hiera_tiny_224",
    r"(blocks(_token_only)?|cls_attn_blocks)\.\d+\.attn": "cait_xxs24_224 xcit_nano_12_p16_224",
    r"(layers|transformers)\.\d\.blocks\.\d\.attn": "swin_tiny_patch4_window7_224 pit_ti_224",
    r"stages\.\d\.blocks\.\d\.attn": "pvt_v2_b0 mvitv2_tiny coatnet_pico_rw_224",
    r"stages\.\d\.blocks\.\d\.attn_(block|grid)\.attn": "maxvit_tiny_tf_224",
    r"stages\.\d\.(blocks\.\d\.attn|downsample\.attn_downsample)": "levit_128s",
    r"stages\.\d\.(blocks\.\d\.token_mixer|downsample\.attn)": "efficientformerv2_s0",
    r"stages\.\d\.1\.transformer\.\d\.attn": "mobilevit_xxs",
}
FAMILIES = {name: pattern for pattern, names in PATTERNS.items() for name in names.split()}


def assert_sensible(found: dict[str, LayerEntropy]) -> None:
    for name, one in found.items():
        assert 0 <= one <= math.log(one.keys) == one.uniform, name
        assert 0 <= one.density <= 1 and one.keys >= 1
        assert all(0 <= head <= one.uniform for head in one.heads)
        assert one == pytest.approx(sum(one.heads) / len(one.heads), abs=1e-6)


@pytest.mark.parametrize(("name", "pattern"), FAMILIES.items(), ids=list(FAMILIES))
def test_families__one_entry_for_every_attention(name, pattern):
    model = created(name)
    expected = [key for key, _ in model.named_modules() if re.fullmatch(pattern, key)]
    found = attention_entropy(model, images(name))
    assert sorted(found) == sorted(expected) and len(found) > 1
    assert_sensible(found)
    for key, one in found.items():
        module = model.get_submodule(key)
        assert len(one.heads) == getattr(module, "heads" if name.startswith("hiera") else "num_heads")


def test_blocks_that_attend_by_themselves_and_layers_of_ours():
    """Super tokens without their association with pixels, a soft-max too; a background apart from the foreground."""
    model = timm.create_model("vit_base_patch16_xp_224", embed_dim=48, depth=2, num_heads=3, img_size=64)
    found = attention_entropy(model, torch.randn(2, 3, 64, 64))
    assert {name: (len(x.heads), x.keys) for name, x in found.items()} == {"blocks.0": (3, 17), "blocks.1": (3, 17)}
    assert_sensible(found)
    attn = randomize(SuperTokenAttention(16, cell=4, heads=2))
    found = attention_entropy(Made(lambda self, x: self.attn(x), attn=attn), torch.randn(2, 16, 12, 20))
    assert list(found) == ["attn"] and found["attn"].keys == 15 and len(found["attn"].heads) == 2

    def call(self: Made, x: Tensor) -> Tensor:
        return self.attn(x.flatten(2).mT, x.flatten(2).sum(1))

    model = Made(call, attn=PartialAttention(16, 2, (1, 4), head_expansion=3))
    found = attention_entropy(model, torch.zeros(2, 16, 4, 5))
    assert [(one.keys, len(one.heads)) for one in found.values()] == [(6, 6), (20, 1)]  # five and the abstract token
    assert [*found.values()] == pytest.approx([math.log(6), math.log(15)], abs=1e-2)  # nobody looks at the foreground
    pooled = broadsight.swap_pool("test_resnet", "map", num_classes=5)
    found = attention_entropy(pooled, torch.randn(2, 3, 64, 64))
    assert len(found) == 1
    assert_sensible(found)


OURS = dict(stvit={"attn"}, mat={"attn", "attn#2", "attn#3", "attn#4"})
OURS |= dict(partialformer={"attn", "attn#2"}, emsnet={"mixer", "mixer#2"})


@pytest.mark.parametrize("name", SMALLEST)
def test_ours__alone_in_slices_and_fused_the_same(name, monkeypatch):
    family = next((family for family in OURS if name.startswith(family)), None)
    if family is None:
        pytest.skip("has no attention of its own")
    model = randomize(shallow(name)).eval()
    x = torch.randn(3, 3, 96, 64)
    found = attention_entropy(model, x)
    assert {key.rpartition(".")[2] for key in found} == OURS[family]
    assert_sensible(found)
    monkeypatch.setattr(slices, "STAGE_BYTES", 1)
    for other in (attention_entropy(model, x), attention_entropy(broadsight.fuse(model), x)):
        assert list(other) == list(found)
        assert all(one == pytest.approx(two, abs=2e-3) for one, two in zip(other.values(), found.values(), strict=True))


@pytest.mark.parametrize("kind", ["cb", "scaled", "gate"])
def test_context_broadcast__is_measured_like_any_model(kind):
    plain, x = created("test_vit"), images("test_vit")
    mixed = broadsight.add_context_broadcast(copy.deepcopy(plain), kind)
    before, after = attention_entropy(plain, x), attention_entropy(mixed, x)
    assert list(before) == list(after)
    assert_sensible(after)
    first, *later = [one == pytest.approx(two) for one, two in zip(before.values(), after.values(), strict=True)]
    assert first  # nothing was broadcast before it
    assert all(later) if kind == "scaled" else not any(later)  # "scaled" starts at zero


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_batches__of_unequal_size_average_exactly(batch_size):
    model, x = created("test_vit").double(), images("test_vit", batch=5).double()
    whole = attention_entropy(model, x, batch_size=5)
    for given in (x, [x[:3], x[3:]], iter([x[:1], x[1:1], x[1:]]), [(x[:4], torch.zeros(4)), [x[4:], None, "c"]]):
        assert_alike(attention_entropy(model, given, batch_size=batch_size), whole, 1e-11)
    loader, sizes = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.arange(5)), batch_size=3), []
    model.register_forward_pre_hook(lambda m, args: sizes.append(len(args[0])))
    assert_alike(attention_entropy(model, loader, batch_size=batch_size), whole, 1e-11)
    assert sizes == {1: [1] * 5, 2: [2, 1, 2]}.get(batch_size, [3, 2])


def test_dtype__is_the_models():
    model, x = created("test_vit"), images("test_vit")
    exact = attention_entropy(model, x)
    assert_alike(attention_entropy(model, x.double()), exact)
    half = attention_entropy(model.bfloat16(), x)
    assert [*half.values()] == pytest.approx([*exact.values()], abs=0.05)
    assert_sensible(half)


SIZES = [torch.zeros(1, 3, 64, 64), torch.zeros(1, 3, 96, 64)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.zeros(3, 8, 8), r"shape \(3, 8, 8\); expected \(B, C, H, W\); pass images\[None\]"),
        (torch.zeros(8), r"shape \(8,\); expected \(B, C, H, W\)$"),
        (torch.zeros(0, 3, 8, 8), "images are empty"),
        ([], "images are empty"),
        ([{"image": torch.zeros(1, 3, 8, 8)}], "is a dict; expected a tensor"),
        (3, "images are a int"),
        (SIZES, r"blocks\.0\.attn attends to \d+ keys now and to \d+ before; pass images of"),
    ],
)
def test_refused__what_are_no_images_of_one_size(given, words):
    refused(words, attention_entropy, created("test_vit"), given)


def test_refused__no_batch_size_no_model_and_none_with_attention():
    model, x = created("test_vit"), images("test_vit")
    assert "batch_size=0 lets no image pass" in refusal(lambda: attention_entropy(model, x, batch_size=0))
    assert "model is a str; expected a model" in refusal(lambda: attention_entropy("test_vit", x))  # ty: ignore
    for name in ("test_resnet", "test_convnext", "mixer_s32_224", "efficientvit_b0"):
        model = created(name)
        words = f"^{type(model).__name__} has no attention weights; looked for .*pass a vision transformer"
        refused(words, attention_entropy, model, images(name))


def test_watching__goes_on_after_a_failure_that_the_model_expects_and_compiles_nothing():
    def fails(x: Tensor) -> Tensor:
        sdpa(x)
        raise RuntimeError("out of order")

    def tries(self: Made, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except RuntimeError:
            return x.softmax(-1)  # outside of any attention

    found = attention_entropy(Made(tries, inner=Attends(fails)), torch.randn(2, 1, 4, 5))
    assert {name: one.keys for name, one in found.items()} == {"inner.attn": 4}

    def compiler(graph, inputs):
        raise AssertionError("nothing could be watched in what comes out")

    model, x = created("test_vit"), images("test_vit")
    expected = attention_entropy(model, x)
    assert attention_entropy(torch.compile(model, backend=compiler), x) == expected
    inside = copy.deepcopy(model)
    inside.blocks[0] = torch.compile(inside.blocks[0], backend=compiler)
    inside.compile(backend=compiler)
    assert attention_entropy(inside, x) == expected


def test_entropy__is_a_float_everywhere_also_in_a_copy_and_a_file():
    found = LayerEntropy(1.5, [1, 2.0], 10)
    assert isinstance(found, float) and found + 1 == 2.5 and json.loads(json.dumps({"a": found})) == {"a": 1.5}
    assert torch.tensor([found]).item() == 1.5 and f"{found:.2f}" == "1.50"
    assert found.heads == (1.0, 2.0) and found.uniform == math.log(10) and found.density == 1.5 / math.log(10)
    assert LayerEntropy(0.0, [0.0], 1).density == 1
    assert np.asarray([found]).dtype == np.float64
    pickled = [pickle.loads(pickle.dumps(found, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for again in (copy.copy(found), copy.deepcopy(found), *pickled):
        assert (again, again.heads, again.keys, type(again)) == (1.5, (1.0, 2.0), 10, LayerEntropy)


SERIES = {
    "one": {f"blocks.{i}.attn": LayerEntropy(1 + i / 4, (1.0,), 10 + i) for i in range(4)},
    "other": {f"blocks.{i}.attn": LayerEntropy(2 - i / 4, (1.0,), 20) for i in range(3)},
}


def test_plot__draws_a_line_for_each_model_and_the_uniform_one(tmp_path):
    (panel,) = plot_attention_entropy(SERIES, tmp_path / "entropy.png").axes
    assert (tmp_path / "entropy.png").read_bytes().startswith(b"\x89PNG")
    lines = {line.get_label(): line for line in panel.lines}
    assert list(lines) == ["one", "other", "uniform"] == [text.get_text() for text in panel.get_legend().get_texts()]
    assert list(lines["one"].get_xdata()) == [1, 2, 3, 4] and list(lines["one"].get_ydata()) == [1, 1.25, 1.5, 1.75]
    assert list(lines["other"].get_ydata()) == [2, 1.75, 1.5]
    assert list(lines["uniform"].get_ydata()) == pytest.approx([math.log(10 + i) for i in range(4)])
    for of in ("get_color", "get_marker"):
        assert len({getattr(line, of)() for line in lines.values()}) == 3
    assert "layer" in panel.get_xlabel() and "nats" in panel.get_ylabel()
    said = refusal(lambda: plot_attention_entropy(SERIES["one"]))  # ty: ignore
    assert "'blocks.0.attn' is no result of attention_entropy but a LayerEntropy" in said
