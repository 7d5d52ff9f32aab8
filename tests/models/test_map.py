"""The models of the MAP paper: the published sizes, what their descriptions name, weights as they were released."""

import json
from copy import deepcopy
from functools import cache

import pytest
import timm
import torch
from timm.models import _builder
from torch import Tensor, nn

from broadsight import swap_pool
from broadsight.surgery.pooling import PooledModel
from broadsight.weights.released_map import MODELS, model_to_release
from tests.compare import assert_close, parameters, randomize
from tests.refusals import refused
from tests.zoo import marked

VIT_STYLE = "map_vit_style_small"  # whose pool is its blocks
NAMES = [name for name in timm.list_models(module="map") if name != VIT_STYLE]
RELEASE = "https://github.com/Lab-LVM/imagenet-models/releases/download/v0.0.1/"

# Parameters in training and in the light form; channels and sides of the maps, and the level that they are merged at.
# Two are 768 below the counts of the paper's tables, which hold the model's final norm; nothing pooled here sees it.
UNUSED_NORM = 768
CONVNEXT, SIDES = [96, 96, 192, 384, 768], [112, 56, 28, 14, 7]
ROWS = dict(
    map_mobilenetv1=(4_879_612, None, [1024], [7], -1),
    map_resnet50=(42_708_288, 36_548_000, [64, 256, 512, 1024, 1024], SIDES, 3),
    map_resnet50_paper=(38_036_832, 34_956_688, [64, 256, 512, 1024, 2048], SIDES, 3),
    map_pvt_small=(37_418_272, 34_338_128, [64, 64, 128, 320, 512], [56, *SIDES[1:]], 3),
    map_pit_s=(36_147_424, 33_067_280, [144, 144, 288, 576], [27, 27, 14, 7], 2),
    map_convnext_tiny=(47_833_760, 44_751_616, CONVNEXT, [56, *SIDES[1:]], 3),
    map_convnext_small=(82_837_664, 78_216_448, CONVNEXT, [56, *SIDES[1:]], 3),
    map_maxvit_tiny=(49_958_408, 46_876_264, [64, 64, 128, 256, 512], SIDES, 3),
    map_maxvit_small=(100_939_052, 96_317_836, [64, 96, 192, 384, 768], SIDES, 3),
    map_resmlp_24=(43_255_168 - UNUSED_NORM, 40_175_024 - UNUSED_NORM, [384] * 4, [14] * 4, 3),
    map_deit_small=(35_284_384 - UNUSED_NORM, 32_204_240 - UNUSED_NORM, [384] * 4, [14] * 4, 3),
    map_resnet50d=(52_313_984, 46_153_696, [64, 256, 512, 1024, 2048], SIDES, 3),
    map_resnet75d=(77_364_096, None, [64, 256, 512, 1280, 2560], SIDES, 3),
    map_resnet101d=(99_205_368, None, [84, 336, 672, 1344, 2688], SIDES, 3),
    map_faster_vit_3=(187_338_000, 181_573_000, [128, 256, 512, 1024, 1024], [56, 28, 14, 7, 7], 3),
    cap_resnet50=(59_136_040, None, [2048], [7], -1),
    cap_pit_s=(26_121_880, None, [576], [7], -1),
    cap_deit_small=(23_233_384, None, [384], [14], -1),
    cap_resmlp_24=(31_204_168, None, [384], [14], -1),
)
RELEASED = {name: name for name in ("map_resnet50", "map_pit_s", "map_convnext_tiny", "map_convnext_small")}
RELEASED |= dict(map_mobilenetv1="map_mobilenet_v1", map_maxvit_tiny="map_maxvit_tiny_tf_224")
RELEASED["map_faster_vit_3"] = "map_faster_vit_3_224"


@cache
def blank(name: str) -> PooledModel:
    """Without memory; to be looked at, not changed."""
    with torch.device("meta"):
        return timm.create_model(name).eval()


def test_tables__name_every_model_and_size_that_of_resnet50():
    assert set(NAMES) == set(ROWS)
    assert set(RELEASED) == {name for name in NAMES if timm.get_pretrained_cfg(name).url} <= set(MODELS)
    with torch.device("meta"):
        sizes = {pool: parameters(swap_pool("resnet50", pool)) for pool in ("map", "map-light")}
    assert sizes == {"map": 38_036_832, "map-light": 34_956_688}  # of the paper's tables


@pytest.mark.parametrize("name", marked(NAMES))
def test_size_and_pyramid__agree_with_the_paper(name):
    model, (size, light_size, channels, sides, level) = blank(name), ROWS[name]
    assert parameters(model) == size
    assert all(p.requires_grad and p.device.type == "meta" for p in model.parameters())
    maps = model.pyramid(model.backbone, torch.empty(2, 3, 224, 224, device="meta"))
    assert [m.shape for m in maps] == [(2, c, side, side) for c, side in zip(channels, sides, strict=True)]
    assert (model.head.level, list(model.head.channels)) == (level, channels)
    if light_size:
        light = deepcopy(model).lighten()
        assert parameters(light) == light_size
        assert light(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 1000)


@pytest.mark.parametrize("name", marked(NAMES))
def test_description__names_layers_that_exist_weights_crops_and_sizes(name):
    model = blank(name)
    cfg, state = model.pretrained_cfg, model.state_dict()
    assert cfg["architecture"] == name and cfg["input_size"] == (3, 224, 224)
    assert state[f"{cfg['first_conv']}.weight"].shape[1] == 3
    classifiers = cfg["classifier"] if isinstance(cfg["classifier"], tuple) else (cfg["classifier"],)
    assert len(classifiers) == 1 + model.head.mean_token
    of_classes = {key.rpartition(".")[0] for key, value in state.items() if 1000 in value.shape}
    assert of_classes == set(classifiers) and all(state[f"{c}.weight"].shape[1] == 1000 for c in classifiers)
    merged = model.forward_features(torch.empty(1, 3, 224, 224, device="meta"))
    assert merged.shape == (1, model.num_features, *cfg["pool_size"])
    cfg, url = timm.get_pretrained_cfg(name), f"{RELEASE}{RELEASED.get(name)}.pth.tar"
    assert (cfg.url, cfg.tag) == ((url, "release_in1k") if name in RELEASED else ("", None))
    assert cfg.crop_pct == (0.875 if "convnext" in name else 0.95)
    model, x = blank(name), torch.empty(1, 3, 192, 256, device="meta")
    if cfg.fixed_input_size:
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            model(x)
    else:
        assert model(x).shape == (1, 1000)


MAPS = dict.fromkeys(("map_pit_s", "cap_pit_s"), (144, 288, 576))
MAPS |= dict.fromkeys(("map_deit_small", "map_resmlp_24"), (384,) * 3)
MAPS |= dict(map_pvt_small=(64, 128, 320, 512), map_resnet50_paper=(64, 256, 512, 1024, 2048))
MAPS |= dict(map_convnext_tiny=(96, 192, 384, 768), map_maxvit_tiny=(64, 64, 128, 256, 512))
MAPS |= dict(map_resnet50=(64, 256, 512, 1024, 1024), cap_resnet50=(64, 256, 512, 1024, 2048))


@pytest.mark.parametrize(("name", "channels"), MAPS.items())
def test_features_only__gives_what_it_declares(name, channels):
    model = timm.create_model(name, features_only=True, device="meta").eval()
    maps = model(torch.empty(1, 3, 224, 224, device="meta"))
    assert [m.shape[1] for m in maps] == model.feature_info.channels() == list(channels)


@torch.no_grad()
def test_features_only__are_the_backbones():
    model = timm.create_model("map_mobilenetv1", features_only=True).eval()
    expected = timm.create_model("mobilenetv1_100", features_only=True, act_layer=nn.ReLU).eval()
    expected.load_state_dict(randomize(model.model.backbone).state_dict())
    x = torch.randn(1, 3, 64, 96)
    maps = model(x)
    assert model.feature_info.channels() == expected.feature_info.channels() == [64, 128, 256, 512, 1024]
    assert model.feature_info.reduction() == expected.feature_info.reduction() == [2, 4, 8, 16, 32]
    assert all(torch.equal(one, other) for one, other in zip(maps, expected(x), strict=True))
    assert not any(key.startswith("model.head.") for key in model.state_dict())


@torch.no_grad()
def test_create__another_task_other_images_and_arguments_of_pool_and_backbone():
    model = timm.create_model("map_resnet50", num_classes=5, in_chans=1).eval()
    assert (model.num_classes, model.in_chans) == (5, 1)
    x = torch.randn(2, 1, 64, 96)
    assert model(x).shape == (2, 5) and model(x).isfinite().all()
    groups = model.forward_groups(x)
    assert groups.tokens.shape == groups.average.shape == (2, 4, 5)
    refused(r"expected \(batch, 1, height, width\)", model, torch.randn(2, 3, 64, 64))
    settings = dict(groups=2, tokens=2, dim=96, heads=4, mlp_dim=192, attn_dim=48, drop_rate=0.3, drop_path_rate=0.2)
    model = timm.create_model("map_convnext_tiny", pool_options=dict(gram_groups=8), device="meta", **settings)
    pool = model.head
    assert (pool.groups, pool.tokens, pool.dim, pool.blocks[0].heads) == (2, 2, 96, 4)
    assert pool.classifier.drop.p == pool.average_classifier.drop.p == 0.3
    assert model.backbone.stages[-1].blocks[-1].drop_path.drop_prob == pytest.approx(0.2)
    unpooled = timm.create_model("map_mobilenetv1", num_classes=0, global_pool="", device="meta")
    assert unpooled(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 192, 7, 7) and unpooled.num_classes == 0
    assert parameters(timm.create_model("map_pit_s", light=True, device="meta")) == ROWS["map_pit_s"][1]


@pytest.mark.parametrize("name", ["map_resnet50", "map_mobilenetv1", "map_pit_s", "map_deit_small", "cap_resmlp_24"])
def test_create__unknown_argument_is_refused(name):
    refused("bananas", timm.create_model, name, error=(TypeError, ValueError), bananas=3, device="meta")


@torch.no_grad()
def test_create__mobilenet_at_its_size():
    model = randomize(timm.create_model("map_mobilenetv1")).eval()
    x = torch.randn(1, 3, 224, 224)
    merged = model.forward_features(x)
    assert merged.shape == (1, 192, 7, 7) and model(x).shape == (1, 1000) and model(x).isfinite().all()
    groups = model.forward_groups(x, per_token=True)
    assert groups.average is None and groups.per_token.shape == (1, 1, 4, 1000)
    assert_close(groups.tokens[:, 0], model(x), tolerance=1e-5)
    assert_close(groups.per_token.sum(2)[:, 0] + model.head.classifier.fc.bias, model(x), tolerance=1e-4)


@torch.no_grad()
def test_vit_style__classifies_all_class_tokens_side_by_side():
    assert parameters(timm.create_model(VIT_STYLE, device="meta")) == 27_822_184
    model = randomize(timm.create_model(VIT_STYLE, depth=2, num_classes=5)).eval()
    x = torch.randn(2, 3, 40, 70)
    features = model.forward_features(x)
    assert features.shape == (2, 16 + 3 * 5, 384)
    parts = zip(features[:, :16].unbind(1), model.head.weight.split(384, 1), strict=True)
    assert_close(model(x), sum(token @ weight.T for token, weight in parts) + model.head.bias, tolerance=1e-5)
    assert model.forward_head(features, pre_logits=True).shape == (2, model.head_hidden_size) == (2, 6144)
    for pool, width in (("avg", 384), ("token", 6144), (None, 6144)):
        model.reset_classifier(3, pool)
        assert model(x).shape == (2, 3) and model.head.weight.shape == (3, width)
    model.reset_classifier(0)
    assert torch.equal(model(x), features[:, :16].flatten(1))
    maps = timm.create_model(VIT_STYLE, depth=3, tokens=4, features_only=True)(x)
    assert [one.shape for one in maps] == 3 * [(2, 384, 3, 5)]


@torch.no_grad()
def test_paper_s_resnet50__is_timms_under_the_pool():
    model, settings = timm.create_model("map_resnet50_paper", num_classes=3).eval(), dict(groups=2, tokens=4)
    other = swap_pool("resnet50", "map", num_classes=3, **settings).eval()
    other.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 64, 96)
    assert torch.equal(model(x), other(x))


def released_state(name: str) -> tuple[PooledModel, dict[str, Tensor]]:
    """A model with weights of its own, and what the authors' file would hold of them."""
    torch.manual_seed(5)
    model = randomize(timm.create_model(name)).eval()
    return model, model_to_release(name, model, model.state_dict())


@pytest.fixture(scope="module")
def mobilenet() -> tuple[PooledModel, dict[str, Tensor]]:
    return released_state("map_mobilenetv1")


@pytest.fixture
def serve(monkeypatch):
    """Lets timm download a checkpoint that never leaves memory; returns the addresses that it asked for."""
    asked = []

    def serve(checkpoint: dict) -> list[str]:
        monkeypatch.setattr(_builder, "load_state_dict_from_url", lambda url, *_, **__: asked.append(url) or checkpoint)
        return asked

    return serve


WRAPPED = {
    "weights": lambda model, state: dict(state),
    "file of a training": lambda model, state: dict(state_dict=dict(state), epoch=3, arch="mobilenet_v1"),
    "distributed": lambda model, state: dict(state_dict={f"module.{key}": value for key, value in state.items()}),
    "our own": lambda model, state: dict(model.state_dict()),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_pretrained__released_weights_and_our_own_arrive(mobilenet, serve, wrap):
    source, released = mobilenet
    asked = serve(wrap(source, released))
    model = timm.create_model("map_mobilenetv1", pretrained=True)
    assert asked == [f"{RELEASE}map_mobilenet_v1.pth.tar"]
    state = model.state_dict()
    assert state.keys() == source.state_dict().keys()
    assert [key for key, value in source.state_dict().items() if not torch.equal(state[key], value)] == []


@torch.no_grad()
def test_pretrained__another_task_keeps_all_but_the_classifier_and_the_cfg_can_be_stored(mobilenet, serve):
    source, released = mobilenet
    serve(dict(state_dict=dict(released)))
    x = torch.randn(2, 3, 64, 64)
    pooled = source.forward_head(source.forward_features(x), pre_logits=True)
    five = timm.create_model("map_mobilenetv1", pretrained=True, num_classes=5).eval()
    assert five(x).shape == (2, 5)
    assert torch.equal(five.forward_head(five.forward_features(x), pre_logits=True), pooled)
    none = timm.create_model("map_mobilenetv1", pretrained=True, num_classes=0).eval()
    assert torch.equal(none(x), pooled)
    grey = timm.create_model("map_mobilenetv1", pretrained=True, in_chans=1).eval()
    assert_close(grey(x[:, :1]), source(x[:, :1].expand(-1, 3, -1, -1)), tolerance=1e-4)
    maps = timm.create_model("map_mobilenetv1", pretrained=True, features_only=True).eval()(x)
    expected = source.forward_intermediates(x, intermediates_only=True)
    assert all(torch.equal(one, other) for one, other in zip(maps, expected, strict=True))
    cfg = mobilenet[0].pretrained_cfg
    assert json.loads(json.dumps(cfg))["url"] == cfg["url"]


@torch.no_grad()
def test_pretrained__light_takes_the_full_weights(serve):
    source, released = released_state("map_pit_s")
    serve(dict(state_dict=released))
    light = timm.create_model("map_pit_s", pretrained=True, light=True).eval()
    state = source.state_dict()
    assert light.state_dict().keys() == {key for key in state if not key.startswith("head.classifier.")}
    assert all(torch.equal(value, state[key]) for key, value in light.state_dict().items())
    x = torch.randn(1, 3, 224, 224)
    assert_close(light(x), source.forward_groups(x).average.mean(1), tolerance=1e-5)


@pytest.mark.parametrize("wrong", ["missing", "unexpected", "misshapen"])
def test_pretrained__other_weights_are_refused(mobilenet, serve, wrong):
    state, key = dict(mobilenet[1]), "fc.heads.0.weight"
    if wrong == "unexpected":
        key = "fc.heads.1.weight"
        state[key] = torch.zeros(2, 2)
    else:
        cut = state.pop(key)[:, :-1]
        state |= {key: cut} if wrong == "misshapen" else {}
    serve(state)
    refused(key, timm.create_model, "map_mobilenetv1", error=RuntimeError, pretrained=True)


@pytest.mark.parametrize("name", ["map_resnet50d", "map_deit_small", "cap_resnet50"])
def test_pretrained__without_a_release_is_refused(name):
    refused(name, timm.create_model, name, error=RuntimeError, pretrained=True, device="meta")
