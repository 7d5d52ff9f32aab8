"""Released MAP checkpoints: every name has its place, and whole models loaded so give the authors' outputs."""

import re
from copy import deepcopy

import pytest
import timm
import torch
from torch import Tensor, nn

import broadsight
from broadsight.layers import MultiTokenPool
from broadsight.layers.pooling.multi_token_pool import class_attention_pool
from broadsight.models._faster_vit import packaged
from broadsight.weights.released_map import (
    MODELS,
    model_from_release,
    model_to_release,
    pool_from_release,
    pool_to_release,
)
from broadsight.weights.released_stvit import released_tensors
from tests.compare import assert_all_close, assert_close, assert_identical, randomize
from tests.golden import checkpoint, images, key_lists
from tests.refusals import refused
from tests.zoo import FASTER_VIT, marked, needs_faster_vit

GOLDEN_HEADS = ["paper_r50", "release_r50", "convnext", "pit", "mobilenet", "nogram", "ga", "fastervit"]
# Ours -> the authors', where they differ.
AUTHORS_NAMES = {"map_mobilenetv1": "map_mobilenet_v1"}

Weights = dict[str, Tensor]


def pool_of(config: dict, **changes) -> MultiTokenPool:
    names = dict(groups="n_groups", tokens="n_tokens", heads="num_heads", classifier="head")
    same = ("level", "dim", "gram", "gram_dim", "gram_groups", "attn_dim", "head_mixing", "mean_token", "mlp_ratio")
    arguments = {ours: config[theirs] for ours, theirs in names.items()} | {name: config[name] for name in same}
    arguments |= dict(mlp_groups=config["mlp_groups"])
    return MultiTokenPool(config["channels"], config["num_classes"], **(arguments | changes))


def weights_in(tensors: Weights) -> Weights:
    return {name[3:]: value for name, value in tensors.items() if name.startswith("sd.")}


SMALL = dict(level=2, dim=12, groups=3, tokens=2, gram_dim=8, gram_groups=2, attn_dim=8, heads=4, mlp_groups=2)
# With two digits too: numbers in names must not be sorted as text
VARIANTS = [dict(), dict(head_mixing=True), dict(classifier="linear"), dict(mean_token=False), dict(gram=False)]
VARIANTS += [dict(groups=1), dict(groups=11), dict(layers=12), dict(light=True), dict(level=-1)]
VARIANTS += [dict(level=-1, dim=10, mlp_groups=1)]


def small_pool(num_classes: int = 5, **changes) -> MultiTokenPool:
    return randomize(MultiTokenPool((4, 6, 10), num_classes, **(SMALL | changes)))


@pytest.mark.parametrize("name", GOLDEN_HEADS)
def test_pool__golden_weights_there_and_back(golden, name):
    tensors, config = golden(f"map_{name}")
    pool, released = pool_of(config), weights_in(tensors)
    ours = pool_from_release(pool, released)
    assert ours.keys() == pool.state_dict().keys()
    pool.load_state_dict(ours)
    constants = {key: value for key, value in released.items() if key.endswith("bp_index")}
    assert len(constants) == config["n_groups"] * config["gram"]
    assert_identical(pool_to_release(pool, ours) | constants, released)


def test_pool__every_variant_and_any_subset_there_and_back():
    for changes in VARIANTS:
        pool = small_pool(**changes)
        state = pool.state_dict()
        assert_identical(pool_from_release(small_pool(**changes), pool_to_release(pool, state)), state)
    pool = small_pool()
    everything = pool_to_release(pool, pool.state_dict())
    gradients = {name: torch.randn_like(p) for name, p in pool.named_parameters() if "blocks" in name}
    translated = pool_to_release(pool, gradients)
    assert translated.keys() == {name for name in everything if "attention" in name}
    assert all(value.shape == everything[name].shape for name, value in translated.items())
    assert pool_to_release(pool, {}) == {}
    before = deepcopy(pool.state_dict())
    for value in everything.values():  # copies
        value.zero_()
    assert_identical(pool.state_dict(), before)


def test_pool__what_the_release_does_not_know_and_counts_which_are_optional():
    pool = small_pool(distill_tokens=2)
    key = "distill_classifier.norm.weight"
    refused(f"^'{key}' has no counterpart in the release; ", pool_to_release, pool, {key: pool.state_dict()[key]})
    with pytest.raises(RuntimeError, match=f"^'{key}' and 3 more has no counterpart in the release; .*"):
        pool_from_release(pool, {})
    refused(r"^'merge' is not a tensor of this module; ", pool_to_release, pool, {"merge": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"^'merge.weight' has shape \(20, 12\); expected \(12, 20\)$"):
        pool_to_release(pool, {"merge.weight": pool.state_dict()["merge.weight"].mT})
    pool = small_pool().eval()
    released = pool_to_release(pool, pool.state_dict())
    refused("has no counterpart in the release", pool_from_release, broadsight.fuse(pool), released, error=RuntimeError)
    pool = small_pool()
    released = pool_to_release(pool, pool.state_dict())
    counts = [name for name in released if name.endswith("num_batches_tracked")]
    assert len(counts) == 1 + 2 * SMALL["groups"]
    released |= {name: torch.tensor(10 + i) for i, name in enumerate(counts)}
    loaded = pool_from_release(pool, released)
    gram = "mmcap.mmcap.0.gram_token_extraction"
    names = {"merge.norm": "mmcap.multi_scale.concat_conv.1", "gram.reduce_norm": f"{gram}.ch_reduction.1"}
    for ours, theirs in (names | {"gram.embed_norm": f"{gram}.bp_reduction.1"}).items():
        assert loaded[f"{ours}.num_batches_tracked"] == released[f"{theirs}.num_batches_tracked"]
    without = {name: value for name, value in released.items() if name not in counts}
    assert_identical(pool_from_release(pool, without), pool.state_dict())


def test_pool__cap_names(golden):
    tensors, config = golden("map_cap")
    cap = class_attention_pool(config["dim"], config["num_heads"])
    pool = MultiTokenPool((config["dim"],), config["num_classes"], **cap).eval()
    released = weights_in(tensors)
    ours = pool_from_release(pool, released)
    assert_identical(pool_to_release(pool, ours, cap=True), released)
    pool.load_state_dict(ours)
    assert_close(pool([tensors["in.feat0"]]), tensors["eval.logits"], "logits", 2e-5)
    # The names of MAP serve the same pool.
    mapped = pool_to_release(pool, ours)
    assert "mmcap.mmcap.0.x_cls" in mapped and "heads.0.weight" in mapped
    assert_identical(pool_from_release(pool, mapped), ours)
    less = {name: value for name, value in released.items() if name != "fc.weight"}
    more = released | mapped
    refused(r"^'fc\.weight' is missing; ", pool_from_release, pool, less, error=RuntimeError)
    refused(r"^'heads\.0\.bias' and 18 more is unexpected; ", pool_from_release, pool, more, error=RuntimeError)
    several = small_pool(gram=False)  # the names of CAP are for one group of the last map
    words = r"^'mmcap\..*' and \d+ more is missing; "
    refused(words, pool_from_release, several, {"pool.x_cls": torch.zeros(1, 2, 12)}, error=RuntimeError)


def key_list(architecture: str) -> dict[str, dict]:
    """Released names of a model: shape, dtype, whether parameter or buffer, and timm's name in the backbone."""
    return key_lists()[AUTHORS_NAMES.get(architecture, architecture)]


def test_names__faster_vit_keeps_its_own_with_this_head():
    model = MODELS["map_faster_vit_3"]
    recomputed = set()
    for released, entry in key_list("map_faster_vit_3").items():
        if entry["part"] == "backbone":
            assert model.backbone(released) == released
            if entry["kind"] == "buffer" and not released.endswith(("running_mean", "running_var", "tracked")):
                recomputed.add(released)
            assert bool(re.match(model.recomputed, released)) == (released in recomputed)
    assert recomputed
    # The head; of the others the whole model is looked at, below
    arguments = dict(level=3, dim=384, groups=5, tokens=3, gram_groups=32, heads=32, head_mixing=True)
    with torch.device("meta"):
        pool = MultiTokenPool((128, 256, 512, 1024, 1024), 1000, **arguments, classifier="linear")
    prefix = MODELS["map_faster_vit_3"].head
    entries = {name: entry for name, entry in key_list("map_faster_vit_3").items() if entry["part"] == "head"}
    names = [name for name in entries if not name.endswith("bp_index")]
    expected = {name.removeprefix(prefix): tuple(entries[name]["shape"]) for name in names}
    assert not any(name.startswith(prefix) for name in expected)
    got = pool_to_release(pool, pool.state_dict())
    assert {name: tuple(value.shape) for name, value in got.items()} == expected


@pytest.mark.parametrize("architecture", [name for name in MODELS if name != "map_faster_vit_3"])
def test_names__backbone_and_registered_model_exactly(architecture):
    named = key_list(architecture).items()
    names = {entry["timm"]: released for released, entry in named if entry["part"] == "backbone"}
    assert len(names) > 100
    assert {name: MODELS[architecture].backbone(name) for name in names} == names
    with torch.device("meta"):
        model = timm.create_model(architecture)
    got = released_tensors(model, model.state_dict())
    entries = {name: entry for name, entry in key_list(architecture).items() if not name.endswith("bp_index")}
    expected = {name: (entry["shape"], f"torch.{entry['dtype']}") for name, entry in entries.items()}
    assert {name: (list(value.shape), str(value.dtype)) for name, value in got.items()} == expected


LARGE = ("map_convnext_tiny", "map_maxvit_tiny", FASTER_VIT)
WHOLE = ["map_mobilenetv1", "map_resnet50", "map_pit_s", *LARGE]


@pytest.mark.parametrize("architecture", marked(WHOLE, slow=LARGE))
def test_model__gives_the_authors_outputs(golden, architecture, monkeypatch):
    name = AUTHORS_NAMES.get(architecture, architecture).removeprefix("map_")
    expected = {name: value.double() for name, value in golden(f"map_full_{name}")[0].items()}
    model = timm.create_model(architecture).eval().double()
    broadsight.load_release(model, checkpoint(AUTHORS_NAMES.get(architecture, architecture)))
    maps: list[Tensor] = []
    merge_maps = model.head.merge_maps
    monkeypatch.setattr(model.head, "merge_maps", lambda features: merge_maps(maps.extend(features) or features))
    with torch.no_grad():
        merged = model.forward_features(images(224, 224))
        logits, aggregate = model.head.classify_groups(merged), model.forward_head(merged)

    tolerance = 1e-3 if architecture == FASTER_VIT else 1e-5  # whose outputs were computed in single precision
    levels = [i for i in range(9) if f"feat{i}.mean_hw" in expected]
    for i, x in zip(levels[-len(maps) :], maps, strict=True):  # of MobileNetV1 we make the last map alone
        assert_close(x.mean((2, 3)), expected[f"feat{i}.mean_hw"], f"mean of map {i}", tolerance)
        assert_close(x.std((2, 3)), expected[f"feat{i}.std_hw"], f"deviation in map {i}", tolerance)

    def check(got: Tensor, name: str) -> None:
        assert (got - expected[name]).abs().max() <= tolerance * expected["agg"].std(), name

    check(aggregate, "agg")
    for g in range(model.head.groups):
        check(logits.tokens[:, g], f"logits.g{g}")
        if logits.average is not None:
            check(logits.average[:, g], f"light.logits.g{g}")


@needs_faster_vit
@pytest.mark.slow
def test_model__faster_vit_with_released_weights_has_the_maps_of_the_package():
    weights, own = checkpoint(FASTER_VIT), packaged(0).eval()
    model = broadsight.load_release(timm.create_model(FASTER_VIT).eval(), weights)
    # What follows from the rest stays as it was made; of the file it is not looked at
    backbone = {name: value for name, value in weights.items() if name in own.state_dict() and "relative_" not in name}
    left = own.load_state_dict(backbone, strict=False).missing_keys
    assert all("relative_" in name or name.startswith("norm.") for name in left)
    x = images(224, 224).float()
    with torch.no_grad():
        maps = [own.patch_embed(x)]
        for level in own.levels:
            maps.append(level(maps[-1]))
        got = model.pyramid(model.backbone, x)
        assert_all_close(dict(enumerate(got)), dict(enumerate(maps)), tolerance=1e-5)
        assert_close(model(x), model.head(maps), tolerance=1e-4)
    got = released_tensors(model, model.state_dict())
    assert got.keys() == {name for name in weights if "relative_" not in name and not name.endswith("bp_index")}
    places = "pos_embed", "to_global_feature.pos"  # two names of one layer, to which these weights give two values
    first, second = (f"levels.2.global_tokenizer.{place}.bias" for place in places)
    assert torch.equal(got[first], got[second]) and torch.equal(got[second], weights[second])
    del weights[first]
    refused(f"^'{first}' is missing; ", broadsight.load_release, model, weights, error=RuntimeError)


@pytest.mark.parametrize("architecture", ["map_mobilenetv1", "map_pit_s"])
def test_model__names_there_and_back(architecture):
    weights = checkpoint(AUTHORS_NAMES.get(architecture, architecture))
    model = timm.create_model(architecture)
    broadsight.load_release(model, {f"module.{name}": value for name, value in weights.items()})
    constants = {name: value for name, value in weights.items() if name.endswith("bp_index")}
    assert_identical(released_tensors(model, model.state_dict()) | constants, weights)


def test_model__light_takes_the_full_checkpoint_and_one_without_a_release_none():
    weights = checkpoint(AUTHORS_NAMES.get("map_pit_s", "map_pit_s"))
    light = broadsight.load_release(timm.create_model("map_pit_s").lighten(), weights)
    full = broadsight.load_release(timm.create_model("map_pit_s"), weights)
    assert light.state_dict().keys() < full.state_dict().keys()
    assert all(torch.equal(value, full.state_dict()[key]) for key, value in light.state_dict().items())
    strange = weights | {"headsmen": torch.zeros(1)}
    refused(r"^'headsmen' is unexpected; ", broadsight.load_release, light, strange, error=RuntimeError)
    model = broadsight.swap_pool("test_resnet", "map", dim=24, heads=4, mlp_dim=48)
    expected = "^no released weights are known for 'test_resnet'; expected one of map_mobilenetv1, "
    refused(expected, broadsight.load_release, model, {})
    refused(expected, released_tensors, model, {})


class OwnFasterViT(nn.Module):
    """Of somebody's FasterViT what names are made of: a convolution, a norm, and buffers that can be recomputed."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.levels = nn.ModuleList([nn.Module()])
        self.levels[0].pos_embed = nn.Linear(2, 4)
        self.levels[0].pos_embed.register_buffer("relative_bias", torch.randn(1, 4))
        self.register_buffer("grid", torch.randn(3))


class OwnModel(nn.Module):
    def __init__(self, **changes):
        super().__init__()
        self.backbone, self.head = randomize(OwnFasterViT()), small_pool(**changes)
        self.pretrained_cfg = {"architecture": "map_faster_vit_3"}


def test_own_faster_vit__there_and_back():
    model, other = OwnModel(), OwnModel()
    released = model_to_release("map_faster_vit_3", model, model.state_dict())
    assert "levels.0.pos_embed.weight" in released and "head.heads.0.norm.weight" in released
    assert not any("relative_bias" in name or "grid" in name for name in released)
    extra = {"levels.0.pos_embed.relative_bias": torch.zeros(7), "grid": torch.zeros(9)}
    extra |= {"levels.2.blocks.0.attn.pos_emb_funct.relative_position_index": torch.zeros(3, dtype=torch.long)}
    got = model_from_release("map_faster_vit_3", other, released | extra)
    buffers = {"backbone.levels.0.pos_embed.relative_bias", "backbone.grid"}
    own, loaded = other.state_dict(), model.state_dict()
    assert_identical(got, {key: (own if key in buffers else loaded)[key] for key in own})
    broadsight.load_release(other, released | extra)
    assert_identical(other.state_dict(), got)
    # Without counts of a norm, or with other tensors
    del released["patch_embed.1.num_batches_tracked"]
    broadsight.load_release(model, released)
    model.neck = nn.Linear(2, 2)
    words = r"^'neck\.weight' and 1 more has no counterpart in the release; "
    refused(words, model_from_release, "map_faster_vit_3", model, {}, error=RuntimeError)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        *((name, None, "is missing; ") for name in ("patch_embed.1.running_mean", "head.heads.2.head.bias")),
        *((name, torch.zeros(4), "is unexpected; ") for name in ("patch_embed.2.weight", "heads.0.head.bias")),
        ("patch_embed.0.weight", torch.zeros(4, 3, 3), r"has shape \(4, 3, 3\); expected \(4, 3"),
    ],
)
def test_own_faster_vit__refuses(name, value, fault):
    model = OwnModel()
    released = model_to_release("map_faster_vit_3", model, model.state_dict()) | {name: value}
    given = {f"module.{key}": value for key, value in released.items() if value is not None}
    before = deepcopy(model.state_dict())
    refused(f"^'{name}' {fault}.*nothing was loaded$", broadsight.load_release, model, given, error=RuntimeError)
    assert_identical(model.state_dict(), before)
