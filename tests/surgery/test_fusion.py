"""Folding changes no output: compared in float64, with statistics, norms and scales far from their initial values."""

import io
import pickle
from copy import deepcopy

import pytest
import timm
import torch
from timm.layers import LayerScale
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import broadsight
from broadsight.models import EMSNet, STViT
from tests import zoo
from tests.compare import assert_close, randomize
from tests.zoo import shallow

NAMES, KINDS = ([n for n in names if not n.startswith("pvt")] for names in (zoo.NAMES, zoo.KINDS))  # LayerNorms alone
each_kind = pytest.mark.parametrize("name", KINDS, scope="module")
MIXERS = ("baseline", "whiten", "patch2", "gated", "c_mhsa", "no_split", "no_fusion")
PLAIN_STVIT = dict(stem="patch", position="relative", ffn="plain")
VARIANTS = {
    "partialformer_b0": [dict(pool_first=True), dict(stem="conv2"), dict(stem="patch7", mlp_conv=True)],
    "mat_1": [dict(embed="conv"), dict(embed="merge"), dict(mixer="none"), dict(mlp_conv=False)],
    "stvit_small": [dict(projection=0), PLAIN_STVIT, dict(layer_scale=[0.5] * 4)],
    "emsnet_xxtiny": [dict(mixer=mixer) for mixer in MIXERS],
}


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name) -> nn.Module:
    torch.manual_seed(0)
    return randomize(shallow(name, num_classes=7)).double().eval()


@pytest.fixture(scope="module")
def fused(model) -> nn.Module:
    return broadsight.fuse(model)


def norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def layers(model: nn.Module) -> list[nn.Module]:
    """The modules that do something and contain no others."""
    return [m for m in model.modules() if not isinstance(m, nn.Identity) and not any(True for _ in m.children())]


@pytest.mark.parametrize("size", [(64, 64), (41, 75)])
def test_fuse__keeps_the_outputs(model, fused, size):
    images = torch.randn(1, 3, *size, dtype=torch.float64)
    features, maps = model.forward_intermediates(images)
    fused_features, fused_maps = fused.forward_intermediates(images)
    for got, expected in zip([fused_features, *fused_maps], [features, *maps], strict=True):
        assert_close(got, expected, tolerance=1e-9)
    assert_close(fused.forward_head(fused_features), model.forward_head(features), tolerance=1e-9)


@each_kind
def test_fuse__of_a_batch_stored_and_again(model, fused):
    images = torch.randn(3, 3, 56, 40, dtype=torch.float64)
    got = fused(images)
    assert_close(got, model(images), tolerance=1e-9)
    assert_close(fused.forward_features(images), model.forward_features(images), tolerance=1e-9)
    assert torch.equal(pickle.loads(pickle.dumps(fused))(images), got)
    once, twice = fused.state_dict(), broadsight.fuse(fused).state_dict()
    assert once.keys() == twice.keys() and all(torch.equal(once[key], twice[key]) for key in once)


@each_kind
def test_fuse__leaves_the_model_alone(name):
    model = randomize(shallow(name)).train()
    state, modules = deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    broadsight.fuse(model)
    assert [type(module) for module in model.modules()] == modules
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_fuse__leaves_no_norm_that_could_be_folded(model, fused):
    # In STViT's stem the norm follows the activation, and the next convolution pads after it.
    kept = [f"stem.norm{i}" for i in (1, 2, 3, 4)] if isinstance(model, STViT) else []
    # EMSNet's last norm is what forward_features returns; only a pool follows it.
    kept += ["norm"] if isinstance(model, EMSNet) else []
    assert norms(fused) == kept
    assert len(norms(model)) >= len(kept) + 3
    assert not any(isinstance(module, LayerScale) for module in fused.modules())
    assert len(layers(fused)) < len(layers(model))
    assert not any(module.training for module in fused.modules())
    assert not any(p.requires_grad for p in fused.parameters())


@each_kind
def test_fuse__features(name):
    model = randomize(shallow(name, features_only=True, out_indices=(1, 3))).double().eval()
    fused = broadsight.fuse(model)
    assert len(norms(fused)) < len(norms(model))
    images = torch.randn(2, 3, 64, 75, dtype=torch.float64)
    for got, expected in zip(fused(images), model(images), strict=True):
        assert_close(got, expected, tolerance=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_fuse__variants(name):
    images = torch.randn(1, 3, 72, 40, dtype=torch.float64)
    for arguments in VARIANTS[name]:
        model = randomize(shallow(name, **arguments)).double().eval()
        assert_close(broadsight.fuse(model)(images), model(images), str(arguments), 1e-9)


@pytest.mark.parametrize(("name", "folds"), [("test_resnet", False), ("repvit_m0_9", True), ("fastvit_t8", True)])
def test_fuse__works_on_any_timm_model(name, folds):
    model = randomize(timm.create_model(name, num_classes=3)).eval()
    fused = broadsight.fuse(model)
    assert (len(layers(fused)) < len(layers(model))) == folds
    images = torch.randn(1, 3, 64, 64)
    assert_close(fused(images), model(images), tolerance=1e-4)


@pytest.mark.slow
@each_kind
def test_fuse__result_can_be_exported(fused):
    images = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    file = io.BytesIO()
    torch.export.save(torch.export.export(fused, (images,)), file)
    file.seek(0)
    assert_close(torch.export.load(file).module()(images), fused(images), tolerance=1e-9)
