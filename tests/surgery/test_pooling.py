"""swap_pool over timm's architectures: shapes, gradients, kept weights, the timm contract, every pooling, refusals."""

import copy
import pickle
from functools import cache

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models import group_parameters
from timm.optim import create_optimizer_v2
from torch import nn

from broadsight import fuse, swap_pool
from broadsight.layers import AveragePool, FlattenPool, FourierPool, GroupLogits, MultiTokenPool
from broadsight.losses import MultiTokenLoss
from broadsight.surgery.pooling import POOLS, PooledModel
from tests.compare import assert_close, assert_threads_apart, randomize
from tests.inspection.timm_models import FIXED, SHRUNK, created, images, without_intermediates
from tests.refusals import refused

TINY = dict(dim=48, heads=4, mlp_dim=96, attn_dim=24)
CLASSES = 7
# Sizes that no stride divides; these pad or stretch what the others refuse.
ODD = ["resnet10t", "regnetx_002", "densenet121", "tinynet_e", "mobilenetv4_conv_small_035", "convnext_atto"]
ODD += ["pvt_v2_b0", "poolformer_s12", "xcit_nano_12_p16_224"]
# Of these the same is known of a relative, and they take the longest.
LONG = ("mvitv2_tiny", "hiera_tiny_224", "coatnet_pico_rw_224", "maxvit_tiny_tf_224", "efficientformerv2_s0")
LONG += ("resmlp_12_224", "fastvit_t8", "tiny_vit_5m_224")
SIZES = dict(level=3, dim=48, groups=2, tokens=4, heads=4, attn_dim=24, mlp_ratio=2)
ONE_TOKEN = dict(groups=1, tokens=1, mean_token=False, gram=False, classifier="linear")
BY_HAND = [(name, "map", {}, SIZES) for name in ("test_resnet", "test_convnext", "test_vit", "densenet121")]
BY_HAND += [("swin_tiny_patch4_window7_224", "map", {}, SIZES), ("pit_ti_224", "map", {}, SIZES | dict(level=2))]
BY_HAND += [("test_resnet", "ga", dict(groups=3), SIZES | dict(groups=3, tokens=1, mean_token=False))]
for heads, expected in ((None, 8), (16, 16)):  # class attention on the last map
    of_cap = dict(level=-1, dim=512, heads=expected, mlp_ratio=2, mlp_groups=1)
    BY_HAND.append(("resnet10t", "cap", dict(heads=heads), ONE_TOKEN | of_cap))
SLOW_ONES = [pytest.param(name, False, marks=pytest.mark.slow) for name in ("convnext_atto", "densenet121")]


@cache
def _template(name: str, pool: str, in_chans: int, **options) -> PooledModel:
    options = {**(TINY if pool in ("map", "map-light", "ga") else {}), "num_classes": CLASSES, **options}
    model = swap_pool(created(name, in_chans), pool, **options)
    torch.manual_seed(0)
    randomize(model.head)
    return model.eval()


def pooled(name: str, pool: str = "map", in_chans: int = 3, **options) -> PooledModel:
    """In eval mode, no weight of the model or the pool at its initial value."""
    make = _template.__wrapped__ if options else _template
    return copy.deepcopy(make(name, pool, in_chans, **options))


def without_gradient(model: nn.Module) -> list[str]:
    return [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in SHRUNK]
)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name) -> PooledModel:
    torch.manual_seed(0)
    return pooled(name, in_chans=1)


def test_models__logits_in_train_and_eval(name, model):
    x = images(name, channels=1)
    logits = model.eval()(x)
    training = model.train()(x)
    assert logits.shape == training.shape == (2, CLASSES) and logits.dtype == torch.float32
    assert logits.isfinite().all() and training.isfinite().all()
    assert not torch.allclose(logits[0], logits[1])  # the image is seen
    groups = model.forward_groups(x, per_token=True)
    assert isinstance(groups, GroupLogits) and groups.distill is None
    assert groups.tokens.shape == groups.average.shape == (2, 2, CLASSES)
    assert groups.per_token.shape == (2, 2, 4, CLASSES)
    assert model(x, groups=True).per_token is None


@torch.enable_grad()
def test_models__every_parameter_receives_a_gradient(name, model):
    """In a loop that knows of the groups, and in one that does not."""
    x = images(name, channels=1)
    for loss in (lambda: MultiTokenLoss("ce")(model(x, groups=True), torch.tensor([1, 2])), lambda: model(x).sum()):
        model.train().zero_grad()
        loss().backward()
        assert without_gradient(model) == []
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
        assert sum(p.grad.any().item() for p in model.backbone.parameters() if p.requires_grad) > 3


def test_models__parameters_are_grouped_and_decayed_as_timms_are(name, model):
    groups = group_parameters(model, model.group_matcher())
    keys, whole = [key for group in groups.values() for key in group], created(name, 1)
    assert sorted(keys) == sorted(key for key, _ in model.named_parameters())
    (head,) = [i for i, group in enumerate(groups.values()) if any(key.startswith("head.") for key in group)]
    assert head == len(groups) - 1  # nothing learns faster than what is new
    if hasattr(model.backbone, "group_matcher"):
        own, prefix = group_parameters(whole, whole.group_matcher()), "backbone."
        ours = [[key.removeprefix(prefix) for key in group if key.startswith(prefix)] for group in groups.values()]
        kept = {key for group in ours for key in group}
        expected = [sorted(kept & set(group)) for group in own.values()]
        assert [sorted(group) for group in ours if group] == [group for group in expected if group]
    coarse = group_parameters(model, model.group_matcher(coarse=True))
    assert sorted(key for group in coarse.values() for key in group) == sorted(keys) and len(coarse) <= len(groups)
    theirs = whole.no_weight_decay() if hasattr(whole, "no_weight_decay") else set()
    assert model.no_weight_decay() & set(keys) == {f"backbone.{key}" for key in theirs} & set(keys)


@pytest.mark.parametrize("name", ODD)
def test_sizes__odd_images(name):
    model = pooled(name, in_chans=1)
    for x in (torch.randn(2, 1, 61, 83), torch.randn(2, 1, 50, 37)):
        logits, maps = model(x), model.pyramid(model.backbone, x)
        assert logits.shape == (2, CLASSES) and logits.isfinite().all() and not torch.allclose(logits[0], logits[1])
        assert model.forward_features(x).shape == (2, 48, *maps[model.pyramid.level].shape[-2:])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("vit_tiny_patch16_224", [(61, 83), (50, 37)]),
        ("deit_tiny_distilled_patch16_224", [(61, 83), (50, 37)]),
        ("swin_tiny_patch4_window7_224", [(60, 84), (64, 160)]),  # whole patches, any number of them
        *(("vit_tiny_patch16_224", 96), ("maxvit_tiny_tf_224", 64), ("hiera_tiny_224", 64), ("levit_128s", 64)),
    ],
)
def test_sizes__models_by_name_take_any_or_the_given_one(name, sizes):
    small = {key: value for key, value in SHRUNK[name].items() if key != "img_size"}
    built = dict(img_size=sizes) if isinstance(sizes, int) else dict(in_chans=1)
    model = swap_pool(name, "map", num_classes=CLASSES, **built, **TINY, **small).eval()
    assert model.in_chans == built.get("in_chans", 3)
    if isinstance(sizes, int):
        assert model.pyramid.image_size == (sizes, sizes)
    for size in [(sizes, sizes)] if isinstance(sizes, int) else sizes:
        assert model(torch.randn(1, model.in_chans, *size)).isfinite().all()


@pytest.mark.parametrize(
    "name", ["test_resnet", "convnext_atto", "test_vit", "swin_tiny_patch4_window7_224", "densenet121", "tinynet_e"]
)
@pytest.mark.parametrize("pool", ["map", "gap"])
def test_weights__are_those_that_timm_creates(name, pool):
    torch.manual_seed(3)
    expected = timm.create_model(name, in_chans=1, **SHRUNK[name]).state_dict()
    torch.manual_seed(3)
    options = TINY if pool == "map" else {}
    model = swap_pool(name, pool, in_chans=1, **SHRUNK[name], **options)
    own = model.backbone.state_dict()
    assert set(own) <= set(expected) and len(own) >= 0.9 * len(expected)
    assert [key for key, value in own.items() if not torch.equal(value, expected[key])] == []
    assert model.num_classes == expected[next(key for key in reversed(expected) if key.endswith("bias"))].shape[0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["test_resnet", "convnext_atto", "test_vit", "densenet121"])
def test_weights__of_an_object_are_used_in_place(name, training):
    given = created(name, in_chans=4).train(training)
    before = {key: (value, value.clone()) for key, value in given.state_dict(keep_vars=True).items()}
    model = swap_pool(given, "map", **TINY)
    assert model.backbone is given and model.in_chans == 4
    for key, value in model.backbone.state_dict(keep_vars=True).items():
        assert value is before[key][0] and torch.equal(value, before[key][1])
    assert model.training == training and {m.training for m in model.modules()} == {training}
    assert model(torch.randn(2, 4, 64, 64)).shape == (2, model.num_classes)


def test_weights__precision_of_the_backbone_is_the_pools():
    for device, dtype in (("cpu", torch.float64), ("meta", torch.float32)):
        model = swap_pool(created("test_convnext").to(device, dtype), "map", **TINY)
        assert {(p.device.type, p.dtype) for p in model.parameters()} == {(device, dtype)}


@pytest.mark.parametrize(("given", "asked", "expected"), [(13, None, 13), (13, 5, 5), (0, None, 1000), (13, 0, 0)])
def test_classes_and_modes__as_the_model_had_or_as_asked(given, asked, expected):
    for training in (True, False):
        inner = timm.create_model("test_resnet", num_classes=given).train(training)
        inner.bn1.train(not training)
        model = swap_pool(inner, "map", num_classes=asked, **TINY)
        assert model.num_classes == model.head.num_classes == expected
        assert model.training == model.head.training == inner.training == training != inner.bn1.training


@pytest.mark.parametrize(("name", "pool", "options", "arguments"), BY_HAND)
def test_values__are_the_pools_on_the_models_maps(name, pool, options, arguments):
    model, x = pooled(name, pool, **options), images(name)
    maps = model.pyramid(model.backbone, x)
    by_hand = MultiTokenPool([m.shape[1] for m in maps], CLASSES, **arguments).eval()
    by_hand.load_state_dict(model.head.state_dict())
    assert torch.equal(model(x), by_hand(maps))
    groups = model.forward_groups(x, per_token=True)
    for got, expected in zip(groups, by_hand.forward_groups(maps, True), strict=True):
        assert (got is None and expected is None) or torch.equal(got, expected)
    assert_close(model(x), groups.tokens.mean(1), tolerance=1e-5)
    assert groups.per_token.shape == (2, arguments["groups"], arguments["tokens"], CLASSES)
    assert (groups.average is None) == (pool != "map") and model.head.blocks[0].heads == arguments["heads"]
    if pool == "cap":
        last = created(name).forward_features(x)
        assert model.head.merge is None and torch.equal(model.forward_features(x), last) and torch.equal(maps[0], last)


def test_values__options_reach_the_pool():
    x = images("test_resnet")
    for level in (1, 2, 4):  # its grid is that of the map
        model = pooled("test_resnet", level=level)
        assert model.forward_features(x).shape[-2:] == model.pyramid(model.backbone, x)[level].shape[-2:]
    model = pooled("test_resnet", groups=3, tokens=2, pool_options=dict(head_mixing=True, resize="ga", drop=0.25))
    pool = model.head
    assert (pool.groups, pool.tokens, pool.dim, pool.merge.resize) == (3, 2, 48, "ga")
    assert pool.blocks[0].mix_before is not None and pool.blocks[0].heads == 4 and pool.blocks[0].q.out_features == 24
    last = pooled("test_resnet", level=-1)
    assert last.pyramid.channels == (96,) and last.head.level == -1
    chosen = pooled("test_resnet", indices=(2, 3, 4), level=1)
    assert chosen.pyramid.channels == (48, 192, 96) and chosen.head.level == 1
    assert pooled("test_convnext", stem="").pyramid.channels == (24, 32, 48, 64)


CONTRACT = ["test_resnet", "test_convnext", "test_vit", "dla46_c"]
WITH_POOLS = [(name, "map") for name in CONTRACT] + [("test_convnext", pool) for pool in POOLS if pool != "map"]
each_pool = pytest.mark.parametrize(("name", "pool"), WITH_POOLS, ids=[f"{name}, {pool}" for name, pool in WITH_POOLS])


@each_pool
def test_classifier__replaced_and_removed(name, pool):
    model, x = pooled(name, pool), images(name)
    features = model.forward_features(x)
    assert features.ndim == 4 and features.shape[:2] == (2, model.num_features)
    before, old = model.forward_head(features, pre_logits=True), model.get_classifier()
    assert before.shape == (2, model.head_hidden_size)
    assert torch.equal(model.forward_head(features), model(x)) and model(x).shape == (2, CLASSES)
    model.reset_classifier(5)
    assert model.num_classes == model.head.num_classes == 5 and model(x).shape == (2, 5)
    classifier = model.get_classifier()
    assert classifier is not old and any(5 in p.shape for p in classifier.parameters())
    model.reset_classifier(0)
    assert model.num_classes == 0 and model(x).shape == (2, model.head_hidden_size)
    if pool in ("gap", "vgg", "dft", "cap"):  # the others norm what they classify, by norms that are new as well
        assert_close(model(x), before, tolerance=1e-6)
    for num_classes, pooling in ((0, ""), (3, None)):  # still not pooled
        model.reset_classifier(num_classes, pooling)
        assert torch.equal(model(x), features)
    model.reset_classifier(3, "map")
    assert model(x).shape == (2, 3)


@pytest.mark.parametrize("name", CONTRACT)
def test_intermediates__are_the_backbones(name):
    model, x, whole = pooled(name), images(name), created(name)
    if not hasattr(whole, "forward_intermediates"):
        pytest.skip(f"timm {timm.__version__} gives no intermediate features of {name}")
    for indices in (None, 2, [1, 3]):
        expected = whole.forward_intermediates(x, indices=indices, intermediates_only=True)
        got = model.forward_intermediates(x, indices=indices, intermediates_only=True)
        assert len(got) == len(expected) > 1
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    final, maps = model.forward_intermediates(x, indices=[3])
    assert torch.equal(maps[0], expected[1]) and final.shape[0] == 2
    assert [entry["num_chs"] for entry in model.feature_info] == [entry["num_chs"] for entry in whole.feature_info]


@pytest.mark.parametrize("name", ["resnet10t", "test_vit", "densenet121", "test_convnext"])
@torch.enable_grad()
def test_checkpointing__changes_nothing(name):
    model, x = pooled(name, pool_options=dict(drop=0.0)).train(), images(name, batch=4)
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    logits = [one(x) for one in (model, other)]
    for one in logits:
        one.square().sum().backward()
    assert torch.equal(*logits)
    for (key, p), (_, again) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert_close(again.grad, p.grad, key, 1e-5)


@pytest.mark.parametrize("pool", ["map", "cap"])
@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "convnext_atto"])
def test_layer_decay__the_pool_learns_fastest(name, pool):
    model = pooled(name, pool)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, layer_decay=0.7, weight_decay=0.05)
    names = {p: key for key, p in model.named_parameters()}
    listed = [names[p] for group in optimizer.param_groups for p in group["params"]]
    assert sorted(listed) == sorted(names.values())
    scales = {names[p]: group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    assert {scale for key, scale in scales.items() if key.startswith("head.")} == {1.0}
    below = {scale for key, scale in scales.items() if not key.startswith("head.")}
    assert len(below) > 3 and max(below) < 1
    first = {"resnet10t": "conv1.0", "vit_tiny_patch16_224": "patch_embed.proj", "convnext_atto": "stem.0"}[name]
    assert scales[f"backbone.{first}.weight"] == min(below)
    decayed = {names[p] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed and not decayed & model.no_weight_decay()
    assert ("head.learned" in model.no_weight_decay()) == (pool == "cap") == ("head.learned" in names.values())


@each_pool
def test_copies__are_equal(name, pool, tmp_path):
    model, x = pooled(name, pool), images(name)
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    sizes = TINY if model.head.dim == 48 else {}
    other = swap_pool(randomize(created(name)), pool, num_classes=CLASSES, **sizes).eval()
    assert not torch.equal(other(x), expected)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize(("name", "met"), [("test_convnext", "stages.0"), ("dla46_c", "level3")])
def test_threads__do_not_see_each_other(name, met):
    """Both threads are past the stem before either goes on."""
    expected = assert_threads_apart(pooled(name), f"backbone.{met}", [images(name) for _ in range(2)])
    assert (expected[0] - expected[1]).abs().max() > 1e-3 * expected[0].abs().max()  # far above the tolerance


@pytest.mark.parametrize(("name", "groups"), [("test_convnext", True), *SLOW_ONES])
def test_compile__is_one_graph(name, groups):
    model, x = pooled(name), images(name)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    got, expected = compiled(x, groups=groups), model(x, groups=groups)
    for one, other in zip(got[:2], expected[:2], strict=True):
        assert_close(one, other, tolerance=1e-5)


@pytest.mark.parametrize("name", ["convnext_atto", "test_resnet"])
def test_export__gives_the_same_numbers(name):
    model, x = pooled(name), images(name)
    program, another = torch.export.export(model, (x,), strict=False), images(name)
    assert_close(program.module()(another), model(another), tolerance=1e-5)
    assert torch.equal(model(another), model(another))  # and the model still runs


@pytest.mark.parametrize("pool", POOLS)
def test_precision__stays_close_and_is_kept_with_the_mode_of_a_reset_classifier(pool):
    model, x = pooled("test_convnext", pool), images("test_convnext")
    for dtype, tolerance in ((torch.bfloat16, 0.15), (torch.float64, 1e-4)):
        got = copy.deepcopy(model).to(dtype)(x.to(dtype))
        assert got.dtype == dtype
        assert_close(got.float(), model(x), tolerance=tolerance)
    for training in (True, False):
        model = pooled("test_resnet", pool).double().train(training)
        for num_classes in (5, 0, 4):
            model.reset_classifier(num_classes)
            assert {p.dtype for p in model.parameters()} == {torch.float64}
            assert {module.training for module in model.modules()} == {training}


@pytest.mark.parametrize("name", CONTRACT)
def test_memory__channels_last_changes_nothing(name):
    model, x = pooled(name), images(name)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert_close(last(x.contiguous(memory_format=torch.channels_last)), model(x), tolerance=1e-4)


@pytest.mark.parametrize("how", ["map-light", "light=True", "lighten"])
def test_light__classifies_with_the_averaged_tokens(how):
    full, x = pooled("test_convnext"), images("test_convnext")
    light = copy.deepcopy(full).lighten()
    if how != "lighten":
        light = pooled("test_convnext", "map-light") if how == "map-light" else pooled("test_convnext", light=True)
        light.load_state_dict(full.state_dict())
    assert_close(light(x), full.forward_groups(x).average.mean(1), tolerance=1e-6)
    assert not torch.allclose(light(x), full(x), rtol=1e-2)
    G, T, D = 2, 4, 48
    dropped = G * (T * D * CLASSES + CLASSES + 2 * T * D)
    assert sum(p.numel() for p in full.parameters()) - sum(p.numel() for p in light.parameters()) == dropped
    assert light.head_hidden_size == G * D
    assert light.forward_head(light.forward_features(x), pre_logits=True).shape == (2, G * D)
    assert light.forward_groups(x).tokens is None and light.get_classifier() is light.head.average_classifier


def test_gap__is_timms_own_model_and_norms_where_that_does():
    whole, x, model = created("resnet10t"), images("resnet10t"), swap_pool(created("resnet10t"), "gap").eval()
    assert isinstance(model.head, AveragePool) and model.num_classes == 1000
    model.head.fc.load_state_dict(whole.fc.state_dict())
    assert_close(model(x), whole(x), tolerance=1e-6)
    whole, x = created("test_convnext"), images("test_convnext")
    model = swap_pool(created("test_convnext"), "gap").eval()
    model.head.fc.load_state_dict(whole.head.fc.state_dict())
    model.head.norm.load_state_dict(whole.head.norm.state_dict())
    assert_close(model(x), whole(x), tolerance=1e-4)
    mean = whole.forward_features(x).mean((2, 3))
    normed = F.layer_norm(mean, mean.shape[1:], whole.head.norm.weight, whole.head.norm.bias, 1e-6)
    assert_close(model.forward_head(model.forward_features(x), pre_logits=True), normed, tolerance=1e-5)


@pytest.mark.parametrize(("pool", "kind"), [("vgg", FlattenPool), ("dft", FourierPool)])
@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "dla46_c"])
def test_flat_pools__are_their_layers_on_the_last_map(name, pool, kind):
    model = pooled(name, pool)
    assert isinstance(model.head, kind)
    for size in [(64, 96), (160, 160)]:
        x = torch.randn(2, 3, *size)
        last = created(name).forward_features(x)
        assert torch.equal(model.forward_features(x), last)
        assert_close(model(x), model.head.fc(model.head.pool(last)), tolerance=1e-6)
    if pool == "vgg":
        height, width = model.pyramid.sizes[-1]
        assert model.head.grid == (height, width) and model.head.fc1.in_features == last.shape[1] * height * width


@pytest.mark.parametrize("name", ["test_resnet", "regnetx_002", "mobilenetv4_conv_small_035", "vit_tiny_patch16_224"])
@torch.enable_grad()
def test_plain_pools__every_parameter_receives_a_gradient(name):
    for pool in ("gap", "cap", "vgg", "dft"):
        model = pooled(name, pool).train()
        model(images(name)).square().sum().backward()
        assert without_gradient(model) == [] and model.has_groups == (pool == "cap")


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        (
            "test_resnet",
            dict(pool="map_light"),
            "^unknown pool 'map_light'; did you mean 'map-light'\\? expected one of",
        ),
        ("test_resnets", dict(pool="map"), "^unknown model 'test_resnets'; nearest: test_resnet"),
        ("qqqqqqqqqqqqq", dict(pool="map"), "^unknown model 'qqqqqqqqqqqqq'$"),
        ("test_resnet", dict(pool="map", bananas=3), "^test_resnet cannot be created: .*bananas"),
        ("test_vit", dict(pool="map", bananas=3), "^test_vit cannot be created: .*bananas"),
        ("test_vit", dict(pool="map", bananas=3, img_size=64), "^test_vit cannot be created: .*bananas"),
        (lambda: nn.Conv2d(3, 4, 3), dict(pool="map"), "^Conv2d offers no feature maps to pool: .*forward_features"),
        (nn.Identity, dict(pool="map"), "^Identity offers no feature maps to pool: "),
        (lambda: created("test_resnet"), dict(pool="map", in_chans=1, img_size=64), "^in_chans given with a "),
        (lambda: pooled("test_resnet"), dict(pool="gap"), "has been swapped already; swap it in a fresh backbone$"),
        ("test_resnet", dict(pool="map", pool_options=dict(head_mixin=1)), "'head_mixin'; did you mean 'head_mixing'"),
        ("test_resnet", dict(pool="gap", pool_options=dict(grid=3)), "^AveragePool has no argument 'grid'"),
        ("test_resnet", dict(pool="map", heads=5), "^attn_dim=24 does not split into heads=5; choose a divisor"),
        ("test_resnet", dict(pool="map", tokens=5), "do not split over 5 tokens"),
        ("test_resnet", dict(pool="map", mlp_dim=99), "^the MLP's hidden width=99 does not split into "),
        ("test_resnet", dict(pool="map", groups=0), "^groups=0; expected 1 or more$"),
        ("test_resnet", dict(pool="map", level=5), "^level=5 of 5 feature maps; choose at most 4$"),
    ],
)
def test_refused__in_one_line(model, arguments, words):
    arguments = {**(TINY if arguments["pool"] in ("map", "ga") else {}), **arguments}
    refused(words, swap_pool, model if isinstance(model, str) else model(), **arguments)


def test_refused__arguments_leave_the_object_as_it_was():
    """So that the call can be repeated: a model that has lost its classifier would be taken to have 1000 classes."""
    model = timm.create_model("test_resnet", num_classes=10)
    keys, wrong = list(model.state_dict()), [dict(pool="mop"), dict(pool="gap", light=True)]
    for arguments in (*wrong, dict(pool="map", bananas=1), dict(pool="map", pool_options=dict(bananas=1))):
        refused("", swap_pool, model, **arguments)
        assert list(model.state_dict()) == keys and model.num_classes == 10


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("shape", [(2, 4, 64, 64), (3, 64, 64), (2, 64, 64, 3)])
def test_refused__what_are_no_images(pool, shape):
    model = pooled("test_resnet", pool)
    words = r"^images have shape \(.*\); expected \(batch, 3, height, width\)$"
    for method in (model, model.forward_features, model.forward_intermediates):
        refused(words, method, torch.zeros(shape))


@pytest.mark.parametrize("pool", ["gap", "vgg", "dft", "cap", "ga"])
def test_refused__what_a_model_has_not(pool):
    model, x = pooled("test_resnet", pool), images("test_resnet")
    for call in () if model.has_groups else (model.forward_groups, lambda x: model(x, groups=True)):
        refused(r"^(Average|Flatten|Fourier)Pool has no groups of tokens; pool with 'map' or 'ga'$", call, x)
    assert model.has_groups == (pool in ("cap", "ga"))
    refused(r"^ResNet has no set_input_size; create it with img_size=\.\.\.$", model.set_input_size, img_size=64)
    refused("light form", model.lighten)
    words = rf"^light=True with pool='{pool}'; only map and map-light have a light form$"
    refused(words, swap_pool, created("test_resnet"), pool, light=True)


def test_refused__by_models_without_intermediates_and_of_fixed_sizes():
    model = swap_pool(without_intermediates(created("dla46_c")), "gap")
    words = r"^DLA gives no intermediate features; model.pyramid gives its maps$"
    refused(words, model.forward_intermediates, images("dla46_c"))
    for name in FIXED:  # so that this table does not hide models that take any
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            created(name)(torch.randn(1, 3, 64, 160))


@pytest.mark.parametrize("frozen", ["", "layer1", "stem", "stages", "blocks"])
@pytest.mark.parametrize("name", ["test_resnet", "convnext_atto", "test_vit"])
@torch.enable_grad()
def test_object__frozen_by_its_owner_is_whole(name, frozen):
    inner, untouched = created(name), created(name)
    untouched.load_state_dict(inner.state_dict())
    for key, parameter in inner.named_parameters():
        parameter.requires_grad_(not key.startswith(frozen))
    model = swap_pool(inner, "map", **TINY).eval()
    expected = swap_pool(untouched, "map", **TINY).eval()
    assert model.backbone.state_dict().keys() == expected.backbone.state_dict().keys()
    x = torch.randn(1, 3, 64, 64) if name != "test_vit" else torch.randn(1, 3, *model.pyramid.image_size)
    for got, wanted in zip(model.pyramid(model.backbone, x), expected.pyramid(expected.backbone, x), strict=True):
        assert torch.equal(got, wanted)
    model.train()(torch.cat([x, x])).sum().backward()
    frozen_ones = {key for key, p in model.backbone.named_parameters() if not p.requires_grad}
    given = {key for key, _ in untouched.named_parameters() if key.startswith(frozen)}
    assert frozen_ones >= given & model.backbone.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["test_resnet", "convnext_atto", "vit_tiny_patch16_224"])
def test_onnx__gives_the_same_numbers(name, fused, tmp_path):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    model = swap_pool(name, "map", num_classes=7, pool_options=dict(head_mixing=True), **TINY).eval()
    model = fuse(model) if fused else model
    x, path = torch.randn(2, 3, *model.pyramid.image_size), tmp_path / "model.onnx"
    batch = ({0: torch.export.Dim("batch", max=64)},)
    torch.onnx.export(model, (x,), path, dynamo=True, dynamic_shapes=batch)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = torch.randn(5, 3, *model.pyramid.image_size)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert_close(torch.from_numpy(got), model(x), tolerance=1e-4)
