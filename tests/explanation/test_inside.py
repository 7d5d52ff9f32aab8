"""Looking inside: the same answer as without, everything put back, and plain words where there is nothing to see."""

import functools

import pytest
import timm
import torch
from torch import Tensor, nn

from broadsight.explanation import Look, inside, kinds_of, look_inside
from broadsight.inspection.watch import hooked
from broadsight.surgery.fusion import fuse
from broadsight.surgery.pooling import swap_pool
from tests.refusals import refused
from tests.zoo import shallow

OWN = {"stvit_small": ("super-tokens",), "mat_1": ("abstract-tokens", "fusion"), "partialformer_b0": ("foreground",)}
OWN |= {"emsnet_xxtiny": ("c-mhsa",), "map": ("map-tokens",), "cap": ("map-tokens",)}


@functools.cache
def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in ("map", "cap"):
        options = dict(dim=24, heads=2) if name == "map" else {}
        return swap_pool(timm.create_model("resnet10t"), pool=name, num_classes=5, **options).eval()
    return shallow(name, num_classes=5).eval()


def captures(model: nn.Module) -> list[str]:
    return [kind for kind in kinds_of(model) if kind != "gradcam"]


def state_of(model: nn.Module) -> list:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs")
    return [(m.training, sorted(m.__dict__), [len(m.__dict__[name]) for name in hooks]) for m in model.modules()]


def answers(model: nn.Module, image: Tensor, **options) -> tuple[Tensor, list[Look]]:
    """What the model gave while it was looked into, and the looks."""
    given: list[Tensor] = []
    with hooked([model], after=lambda module, inputs, output: given.append(output)):
        looks = look_inside(model, image, captures(model), **options)
    (answer,) = given
    return answer, looks


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("form", ["plain", "half channels_last", "folded"])
def test_look_inside__changes_nothing(name, form):
    model = fuse(make_model(name)) if form == "folded" else make_model(name)
    image = torch.randn(1, 3, 68, 52)
    if form.startswith("half"):
        model, image = model.bfloat16(), image.bfloat16().contiguous(memory_format=torch.channels_last)
    try:
        with torch.no_grad():
            expected = model(image)
        before = state_of(model)
        given, looks = answers(model, image)
    finally:
        make_model(name).float()
    assert torch.equal(given, expected)
    assert state_of(model) == before
    assert {look.kind for look in looks} >= set(OWN[name])
    for look in looks:
        assert look.values.ndim == 2 and look.values.device.type == "cpu" and not look.values.requires_grad
        assert look.values.dtype == dict(heat=torch.float32, labels=torch.int64, mask=torch.bool)[look.form]
        assert bool(look.values.isfinite().all()) and bool((look.values >= 0).all()) and look.note
        assert "\n" not in look.note and dict(model.named_modules())[look.layer] is not None
    assert len({(look.kind, look.depth, look.title, look.layer) for look in looks}) == len(looks)
    order = [(inside.KINDS.index(look.kind), look.depth) for look in looks]
    assert order == sorted(order)


def test_look_inside__all_kinds_and_gradcam_also_of_compiled_models():
    image = torch.randn(1, 3, 64, 64)
    looks = look_inside(make_model("mat_1"), image, target=3)
    assert tuple(dict.fromkeys(look.kind for look in looks)) == kinds_of(make_model("mat_1"))
    assert kinds_of(make_model("mat_1")) == ("gradcam", "attention", "abstract-tokens", "fusion")
    assert {look.title for look in looks if look.kind == "gradcam"} == {"class 3"}
    assert kinds_of(nn.Sequential(nn.Conv2d(3, 8, 1))) == ("gradcam",)
    features = shallow("emsnet_xxtiny", num_classes=0, device="meta")
    assert "gradcam" not in kinds_of(features) and "c-mhsa" in kinds_of(features)
    model = make_model("stvit_small")
    compiled = torch.compile(model, backend="eager")
    assert kinds_of(compiled) == kinds_of(model)
    found = zip(*(look_inside(one, image, "super-tokens") for one in (compiled, model)), strict=True)
    assert all(look.layer == other.layer and look.values.equal(other.values) for look, other in found)


def test_look_inside__modes_are_put_back_and_gradients_are_not_needed():
    model = make_model("emsnet_xxtiny")
    image = torch.randn(1, 3, 64, 64)
    expected = look_inside(model, image, "c-mhsa")
    model.train()
    model.stages[1].eval()
    before, statistics = state_of(model), model.norm.running_mean.clone()
    try:
        looks = look_inside(model, image.double().requires_grad_(), ["c-mhsa"])
        assert state_of(model) == before and model.norm.running_mean.equal(statistics)
    finally:
        model.eval()
    assert all(look.values.equal(other.values) for look, other in zip(looks, expected, strict=True))


@pytest.mark.parametrize("name", OWN)
def test_look_inside__takes_everything_back_after_an_exception(name, monkeypatch):
    model = make_model(name)
    before = state_of(model)

    def fail(*_, **__):
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patch:
        if name in ("map", "cap"):
            patch.setattr("broadsight.layers.pooling.class_attention.group_product", fail)
        else:
            attn = "mixer.dynamic.local.attn" if name == "emsnet_xxtiny" else "attn"
            stage = 1 if name == "stvit_small" else 3  # where there is a layer that is watched
            patch.setattr(model.stages[stage].blocks[0].get_submodule(f"{attn}.proj"), "forward", fail)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            look_inside(model, torch.randn(1, 3, 64, 64), captures(model))
    assert state_of(model) == before
    assert not torch.overrides._get_current_function_mode_stack()


def test_look_inside__refused():
    image = torch.randn(1, 3, 64, 64)
    lacking = r"^EMSNet has no super-tokens to look at; it has .*, c-mhsa; super-tokens: stvit_small.*$"
    for kinds, words in (
        (["c-mhsa", "super-tokens"], lacking),
        ("tokens", "unknown kind 'tokens'; did you mean 'map-tokens'. expected one of gradcam, attention"),
        ([], "no kind was asked for; EMSNet has gradcam"),
    ):
        refused(words, look_inside, make_model("emsnet_xxtiny"), image, kinds)
    assert inside.KNOWN.keys() == set(inside.KINDS)
    for name, kinds in OWN.items():
        assert set(kinds) <= set(kinds_of(make_model(name)))
    for image, words in (
        (torch.randn(2, 3, 64, 64), "one at a time"),
        (torch.randn(3, 64, 64), r"pass image\[None\]"),
        (torch.randn(0, 3, 64, 64), "expected one"),
        (torch.zeros(1, 3, 64, 64, dtype=torch.uint8), "normalised floats"),
        ([1, 2], "image is a list"),
    ):
        refused(words, look_inside, make_model("emsnet_xxtiny"), image)
    refused("model is a str", look_inside, "mat_1", torch.randn(1, 3, 64, 64))


def test_look_inside__kinds_that_show_nothing_after_all(monkeypatch):
    model, image = make_model("emsnet_xxtiny"), torch.randn(1, 3, 64, 64)
    monkeypatch.setattr(inside.LocalAttentionLooks, "looks", lambda self: [])
    refused("EMSNet ran without c-mhsa to show; choose another kind", look_inside, model, image, "c-mhsa")

    def finds_no_map(*_):
        raise ValueError("gradcam finds no feature map")

    monkeypatch.setattr(inside, "gradcam_looks", finds_no_map)
    assert {look.kind for look in look_inside(make_model("mat_1"), image)} == {"attention", "abstract-tokens", "fusion"}
    for options in (dict(kinds=["gradcam", "fusion"]), dict(target=1)):
        refused("gradcam finds no feature map", look_inside, make_model("mat_1"), image, **options)
