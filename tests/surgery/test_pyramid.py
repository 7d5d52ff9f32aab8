"""Feature maps of every level: those that timm gives by itself, and the stem's where it keeps that back."""

import copy
import pickle
from itertools import product

import pytest
import timm
import torch
from torch import Tensor, nn

from broadsight.surgery.pyramid import Pyramid, as_backbone, find_pyramid, takes
from tests.compare import randomize
from tests.inspection.timm_models import SHRUNK, created, images, without_intermediates
from tests.refusals import refused


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    assert [x.shape for x in got] == [x.shape for x in expected]
    assert all(x.std() > 0 for x in expected)
    assert [i for i, (one, other) in enumerate(zip(got, expected, strict=True)) if not torch.equal(one, other)] == []


def backbone_of(model: nn.Module, **options) -> tuple[nn.Module, Pyramid]:
    pyramid = find_pyramid(model, **options)
    return as_backbone(model, pyramid), pyramid


TAKEN = dict.fromkeys(("test_resnet", "tinynet_e"), (0, 1, 2, 3, 4))
TAKEN |= dict.fromkeys(("test_convnext", "swin_tiny_patch4_window7_224", "pvt_v2_b0"), (0, 1, 2, 3))
TAKEN |= {"vit_tiny_patch16_224": (2, 5, 8, 11), "test_vit": (0, 2, 3, 5), "pit_ti_224": (0, 1, 2)}


@pytest.mark.parametrize("name", TAKEN)
def test_maps__are_the_models_intermediates(name):
    whole, x, taken = created(name), images(name), TAKEN[name]
    expected = whole.forward_intermediates(x, indices=list(taken), intermediates_only=True)
    model, pyramid = backbone_of(created(name))
    assert_equal(pyramid(model, x)[-len(taken) :], expected)
    assert pyramid.indices == taken
    if name not in STEMS:  # it is listed, or of the same size
        assert pyramid.taps == () and len(pyramid.channels) == len(pyramid.indices) > 3


STEMS = dict.fromkeys(
    ("test_convnext", "efficientvit_b0", "starnet_s050", "fastvit_t8", "mobilevit_xxs"), lambda model, x: model.stem(x)
)
STEMS |= dict.fromkeys(("hiera_tiny_224", "mvitv2_tiny"), lambda model, x: model.patch_embed.proj(x))
STEMS |= {"pit_ti_224": lambda model, x: model.patch_embed(x)}
for swin_like in ("swin_tiny_patch4_window7_224", "pvt_v2_b0"):
    STEMS[swin_like] = lambda model, x: model.patch_embed(x).permute(0, 3, 1, 2)


@pytest.mark.parametrize("name", STEMS)
def test_maps__the_lowest_is_the_stem(name):
    x = images(name)
    expected = STEMS[name](created(name), x)
    model, pyramid = backbone_of(created(name))
    maps = pyramid(model, x)
    assert_equal(maps[:1], [expected])
    assert len(maps) == len(pyramid.indices) + 1 == len(pyramid.channels) and len(pyramid.taps) == 1
    assert [m.shape[1] for m in maps] == list(pyramid.channels)


@pytest.mark.parametrize("name", ["densenet121", "dla46_c", "test_nfnet"])
def test_maps__models_without_intermediates_are_listened_to(name):
    model, x = without_intermediates(created(name)), images(name)
    assert not hasattr(model, "forward_intermediates")
    every = tuple(range(len(model.feature_info)))
    features = timm.create_model(name, features_only=True, out_indices=every, **SHRUNK[name]).eval()
    state = dict(zip(model.state_dict(), features.state_dict(), strict=False))
    features.load_state_dict({state[key]: value for key, value in model.state_dict().items() if key in state})
    model, pyramid = backbone_of(model)
    assert_equal(pyramid(model, x), features(x))
    assert len(pyramid.taps) == len(every) and pyramid.channels == tuple(features.feature_info.channels())


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "dla46_c", "pvt_v2_b0"])
def test_maps__the_last_alone(name):
    x, (model, pyramid) = images(name), backbone_of(created(name))
    every = pyramid(model, x)
    model, single = backbone_of(created(name), last_only=True)
    assert_equal(single(model, x), every[-1:])
    assert single.taps == () and single.level == -1 and single.channels == pyramid.channels[-1:]


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "densenet121", "hiera_tiny_224"])
@torch.enable_grad()
def test_maps__gradients_reach_what_they_are_made_of(name):
    model, pyramid = backbone_of(created(name))
    x = images(name).requires_grad_()
    sum(m.square().mean() for m in pyramid(model.train(), x)).backward()
    assert x.grad.abs().max() > 0
    assert all(p.requires_grad for p in model.parameters())
    assert [key for key, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("indices", [(1, 3), (0, 2, 4), (3,)])
def test_indices__chosen_maps_and_nothing_after_them(indices):
    x = images("test_resnet")
    expected = created("test_resnet").forward_intermediates(x, indices=list(indices), intermediates_only=True)
    model, pyramid = backbone_of(created("test_resnet"), indices=indices)
    assert_equal(pyramid(model, x), expected)
    whole = sum(p.numel() for p in created("test_resnet").parameters())
    assert sum(p.numel() for p in model.parameters()) < whole
    assert any(True for _ in model.layer4.parameters()) == (max(indices) == 4)


def test_stem__another_module_or_none():
    x, whole = images("test_convnext"), created("test_convnext")
    model, pyramid = backbone_of(created("test_convnext"), stem="stem.0")
    assert_equal(pyramid(model, x)[:1], [whole.stem[0](x)])
    model, pyramid = backbone_of(created("test_convnext"), stem="")
    assert_equal(pyramid(model, x), whole.forward_intermediates(x, intermediates_only=True))
    assert pyramid.taps == ()


def test_level__is_the_last_map_of_the_second_smallest_size():
    levels = {(112, 56, 28, 14, 7): 3, (56, 56, 28, 14, 7): 3, (27, 27, 14, 7): 2, (14, 14, 14, 14): 3, (7,): -1}
    levels |= {(224, 112, 56, 28, 14, 7): 4, (128, 56, 28, 14, 7, 7): 3, (56, 28, 14, 14): 1, (14, 7, 7): 1, (14, 7): 1}
    found = {sides: Pyramid((224, 224), 3, sizes=tuple((one, 2 * one) for one in sides)).level for sides in levels}
    assert found == levels


@pytest.mark.parametrize(
    ("name", "channels", "sides"),
    [
        ("resnet50", (64, 256, 512, 1024, 2048), (112, 56, 28, 14, 7)),
        ("convnext_tiny", (96, 96, 192, 384, 768), (56, 56, 28, 14, 7)),
        ("maxvit_tiny_tf_224", (64, 64, 128, 256, 512), (112, 56, 28, 14, 7)),
        ("deit_small_patch16_224", (384,) * 4, (14,) * 4),
        ("resmlp_24_224", (384,) * 4, (14,) * 4),
        ("mobilenetv1_100", (64, 128, 256, 512, 1024), (112, 56, 28, 14, 7)),
    ],
)
def test_shapes__are_the_papers(name, channels, sides):
    """Without memory: the models are on the meta device."""
    with torch.device("meta"):
        model, pyramid = backbone_of(timm.create_model(name))
    assert pyramid.channels == channels and pyramid.sizes == tuple((side, side) for side in sides)
    assert pyramid.in_chans == 3 and pyramid.image_size == (224, 224)
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("name", "size"), [("vit_tiny_patch16_224", 96), ("swin_tiny_patch4_window7_224", 112), ("mixer_s32_224", 96)]
)
def test_image_size__is_what_the_model_was_built_for(name, size):
    model, pyramid = backbone_of(timm.create_model(name, img_size=size).eval())
    assert pyramid.image_size == (size, size)
    assert [m.shape[-2:] for m in pyramid(model, torch.randn(1, 3, size, size))] == list(pyramid.sizes)


class Folded(nn.Module):
    """Folds pixels into channels first, so that no convolution sees the image."""

    def __init__(self):
        super().__init__()
        self.pretrained_cfg = dict(input_size=(3, 32, 32))
        self.conv = nn.Conv2d(48, 8, 1)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.conv(nn.functional.pixel_unshuffle(x, 4))


def test_in_chans__are_seen_at_the_first_convolution_if_one_sees_the_image():
    for name, in_chans in product(("test_resnet", "test_vit", "pvt_v2_b0"), (1, 4)):
        assert backbone_of(created(name, in_chans=in_chans))[1].in_chans == in_chans
    for given in (None, 3):
        model, pyramid = backbone_of(Folded(), in_chans=given)
        assert (pyramid.in_chans, pyramid.channels, pyramid.sizes) == (3, (8,), ((8, 8),))
        x = torch.randn(2, 3, 16, 24)
        assert_equal(pyramid(model, x), [model.forward_features(x)])


def state(model: nn.Module) -> list:
    """Everything that a model is made of, by identity, and what its tensors hold."""
    found: list = []
    for name, module in model.named_modules():
        own = {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()}
        found.append((name, module, own))
    tensors = [*model.parameters(), *model.buffers()]
    return [found, [(x, x.requires_grad, x._version, x.grad, x.detach().clone()) for x in tensors]]


class NeedsValues(nn.Sequential):
    """A model that no pass without values gets through, and that keeps something of every pass."""

    def forward_features(self, x: Tensor) -> Tensor:
        self.seen = float(x.sum())
        return self[0](x)


FOUND = "test_resnet test_convnext test_vit tinynet_e levit_128s densenet121 hiera_tiny_224 values"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", FOUND.split())
def test_model__is_not_changed_by_finding_its_pyramid(name, training):
    model = NeedsValues(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)) if name == "values" else created(name)
    if name == "densenet121":
        model = without_intermediates(model)
    model.train(training)
    first = next(model.children())
    first.train(not training)
    first.register_forward_hook(lambda module, args, output: None)
    names, before = set(dir(model)), state(model)
    assert find_pyramid(model).channels
    modules, tensors = state(model)
    assert set(dir(model)) == names and modules == before[0]
    assert len(tensors) == len(before[1])
    for one, other in zip(tensors, before[1], strict=True):
        assert one[0] is other[0] and one[1:4] == other[1:4] and torch.equal(one[4], other[4])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "densenet121", "pvt_v2_b0"])
@torch.enable_grad()
def test_model__a_backbone_keeps_weights_and_mode(name, training):
    model = created(name).train(training)
    model.get_parameter(next(key for key, _ in model.named_parameters())).requires_grad_(False)
    frozen = {key for key, p in model.named_parameters() if not p.requires_grad}
    before = copy.deepcopy(model.state_dict())
    inner, _ = backbone_of(model)
    after = inner.state_dict()
    assert inner is model and set(after) <= set(before) and len(after) > 0.8 * len(before)
    assert all(torch.equal(value, before[key]) for key, value in after.items())
    layers = [m for m in inner.modules() if not isinstance(m, nn.Identity) and not any(True for _ in m.children())]
    assert {layer.training for layer in layers} == {training}
    assert {key for key, p in inner.named_parameters() if not p.requires_grad} == frozen & set(after)
    assert all(p.grad is None for p in inner.parameters())


def test_model__parts_that_no_map_needs_are_cut_off():
    cut = dict(test_resnet=["fc"], test_convnext=["head"], test_vit=["norm", "head"], tinynet_e=["conv_head"])
    cut |= dict(mobilenetv3_small_050=["conv_head"], cait_xxs24_224=["blocks_token_only"])
    for name, part in ((name, part) for name, parts in cut.items() for part in parts):
        whole, (model, _) = created(name), backbone_of(created(name))
        assert [any(True for _ in one.get_submodule(part).parameters()) for one in (whole, model)] == [True, False]


@pytest.mark.parametrize(
    "name", ["levit_128s", "tiny_vit_5m_224", "efficientformerv2_s0", "cait_xxs24_224", "test_resnet"]
)
@torch.enable_grad()
def test_model__nothing_that_the_maps_depend_on_is_frozen(name):
    model, pyramid = backbone_of(created(name))
    frozen = {key for key, p in model.named_parameters() if not p.requires_grad}
    x = images(name)
    sum(m.square().mean() for m in pyramid(model.requires_grad_().train(), x)).backward()
    assert {key for key, p in model.named_parameters() if p.grad is None} == frozen


@pytest.mark.parametrize("name", ["test_convnext", "densenet121"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "file"])
def test_copies__listen_to_their_own_model(name, copied):
    model, pyramid = backbone_of(created(name))
    other, its_pyramid = copied((model, pyramid))
    x = images(name)
    assert_equal(its_pyramid(other, x), pyramid(model, x))
    randomize(other)
    expected, changed = pyramid(model, x), its_pyramid(other, x)
    assert not any(torch.equal(one, two) for one, two in zip(changed, expected, strict=True))
    assert_equal(pyramid(model, x), expected)
    assert all(tap.kept.get() is None for tap in pyramid.taps)  # passes leave nothing behind


class Plain(nn.Module):
    """A model of which nothing but logits can be had."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3))


class Tokens(Plain):
    def forward_features(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).mT


class Broken(Plain):
    def forward_features(self, x: Tensor) -> Tensor:
        raise RuntimeError("out of order\nand more")


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (Plain, {}, "^Plain offers no feature maps to pool: it has neither forward_intermediates nor forward_f"),
        (Tokens, {}, r"^Tokens offers no feature maps to pool: its features are shape \(1, 49284, 4\), not maps"),
        (Broken, {}, "^Broken offers no feature maps to pool: out of order$"),
        (lambda: created("test_convnext"), dict(stem="bananas"), "bananas"),
        (lambda: created("test_resnet"), dict(indices=(1, 7)), "out of range"),
    ],
    ids=["plain", "tokens", "broken", "stem", "index"],
)
def test_refused__what_is_not_there(make, options, words):
    error = (ValueError, AttributeError, AssertionError) if options else ValueError
    refused(words, backbone_of, make(), error=error, **options)


def test_takes__another_image_size_or_not():
    for name, other in dict(test_resnet=True, levit_128s=False, emsnet_xxtiny=True).items():
        model, pyramid = backbone_of(timm.create_model(name))
        height, width = pyramid.image_size
        assert takes(model, pyramid, (height, width)) and takes(model, pyramid, (height + 32, width + 64)) == other
