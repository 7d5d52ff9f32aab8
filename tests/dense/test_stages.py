"""Any timm model gives four maps at strides 4 to 32, for any image size."""

import copy

import pytest
import timm
import torch
from torch import nn

import broadsight
from broadsight.dense.stages import Normalise, open_stages, rescaling, sources_of
from broadsight.layers import MultiTokenNeck
from tests.compare import randomize
from tests.refusals import refused

# One of each kind: ours, a CNN with a stem stage, rows of tokens, NHWC, fixed size, pooling swapped, broadcast.
NAMES = ("emsnet_xxtiny", "partialformer_b0", "test_resnet", "test_vit", "test_convnext", "levit_128s", "pvt_v2_b0_cb")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith(("levit", "pvt")) else []) for name in NAMES]
)
def test_stages__four_maps_of_any_image_and_gradients_everywhere(name):
    torch.manual_seed(0)
    stages = open_stages(name)
    maps = stages(torch.randn(2, 3, 70, 101))
    pairs = zip(stages.channels, (4, 8, 16, 32), strict=True)
    assert [tuple(x.shape[1:]) for x in maps] == [(width, -(-70 // side), -(-101 // side)) for width, side in pairs]
    torch.stack([x.square().mean() for x in maps]).sum().backward()
    assert [n for n, p in stages.named_parameters() if p.requires_grad and p.grad is None] == []


def test_stages__are_timms_features_with_norms_where_maps_are_bare_sums_and_images_in_a_fixed_size():
    torch.manual_seed(0)
    stages = open_stages("emsnet_xxtiny").eval()
    plain = timm.create_model("emsnet_xxtiny", features_only=True).eval()
    plain.model.load_state_dict(stages.network.state_dict(), strict=False)
    images = torch.randn(1, 3, 50, 70)
    padded = nn.functional.pad(images, (0, 26, 0, 14))  # with zeros up to whole cells
    for ours, large, theirs in zip(stages(images), stages(padded), plain(padded), strict=True):
        torch.testing.assert_close(large, theirs)
        torch.testing.assert_close(ours, large[..., : ours.shape[-2], : ours.shape[-1]])
    # PartialFormer's specification: a LayerNorm for each stage's output, in all 3,765,968 parameters for B0.
    stages = open_stages("partialformer_b0").eval()
    assert sum(p.numel() for p in stages.parameters()) == 3_765_968
    for x in stages(torch.randn(1, 3, 64, 64)):
        torch.testing.assert_close(x.mean(1), torch.zeros_like(x.mean(1)), atol=1e-4, rtol=0)
    assert isinstance(open_stages("emsnet_xxtiny").norms[0], nn.Identity)
    stages = open_stages("levit_128s").eval()
    assert stages.fixed_size == (224, 224)
    images = torch.rand(1, 3, 64, 96)
    seen = nn.functional.interpolate(images, (224, 224), mode="bilinear", align_corners=False, antialias=True)
    last = stages.pyramid(stages.network, seen)[-1]
    expected = nn.functional.interpolate(last, (2, 3), mode="bilinear", align_corners=False)
    torch.testing.assert_close(stages(images)[-1], expected)
    assert open_stages("emsnet_xxtiny").fixed_size is None


def test_open_stages__takes_a_model_object_and_a_neck_that_changes_nothing_at_first():
    torch.manual_seed(0)
    pooled = broadsight.swap_pool("test_resnet", "map", groups=2, tokens=2, dim=24, heads=2, mlp_dim=24, num_classes=3)
    backbone = copy.deepcopy(pooled.backbone)
    stages = open_stages(pooled).eval()
    own, kept = stages.network.state_dict(), backbone.state_dict()
    assert all(torch.equal(own[name], kept[name]) for name in own)
    broadcast = broadsight.add_context_broadcast(timm.create_model("test_vit", dynamic_img_size=True), "scaled")
    names = [name for name, _ in open_stages(broadcast).named_parameters()]
    assert any("broadcast" in name or "scale" in name for name in names)
    torch.manual_seed(0)
    plain = open_stages("emsnet_xxtiny").eval()
    stages = open_stages("emsnet_xxtiny", neck="tokens", neck_args=dict(dim=32, tokens=4)).eval()
    stages.network.load_state_dict(plain.network.state_dict())
    assert isinstance(stages.neck, MultiTokenNeck)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert all(map(torch.equal, plain(images), stages(images)))
        for layer in stages.neck.to_stages:
            layer.bias += 1
        torch.testing.assert_close([x + 1 for x in plain(images)], stages(images))


@pytest.mark.parametrize("name, pool", [("test_resnet", "map"), ("test_convnext", "map"), ("test_resnet", "cap")])
def test_open_stages__feeds_back_the_very_tokens_that_the_classifier_makes(name, pool):
    """Of an image without padding, with the weights and statistics of training, some of maps that no decoder sees."""
    torch.manual_seed(0)
    sizes = dict(groups=2, tokens=4, dim=24, heads=2, mlp_dim=24) if pool == "map" else {}
    classifier = randomize(broadsight.swap_pool(name, pool, num_classes=3, **sizes)).eval()
    kept, images = copy.deepcopy(classifier), torch.randn(2, 3, 64, 96)
    plain, stages = open_stages(copy.deepcopy(classifier)).eval(), open_stages(classifier, neck="map").eval()
    for place, value in stages.neck.pool.state_dict().items():
        assert torch.equal(value, kept.head.state_dict()[place])
    with torch.no_grad():
        before = plain(images)
        assert all(map(torch.equal, stages(images), before))
        tokens = kept.head.attended_tokens(kept.forward_features(images))[:, :, : kept.head.tokens].flatten(1, 2)
        parts = tokens.unflatten(1, (4, 2)).mean(2) if pool == "map" else tokens.expand(-1, 4, -1)
        layers = randomize(stages.neck.to_stages)
        for to, part, x, told in zip(layers, parts.unbind(1), before, stages(images), strict=True):
            torch.testing.assert_close(told, x + to(part)[:, :, None, None])
    assert stages(torch.randn(1, 3, 70, 101))[0].shape[-2:] == (18, 26)
    stages.train()(images)
    for place, value in stages.neck.pool.named_buffers():
        assert torch.equal(value, kept.head.get_buffer(place))


def test_open_stages__statistics_frozen_or_not_and_mean_and_deviation():
    stages = open_stages("test_resnet")
    norms = [module for module in stages.network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and all(norm.training for norm in norms)
    stages.frozen_stats = True
    stages.train()
    assert stages.training and not any(norm.training for norm in norms)
    stages = open_stages("test_convnext")
    stages.mean, stages.std = (0.5, 0.25, 0.0), (0.5, 0.25, 1.0)
    normalise = Normalise(stages)
    image = torch.tensor([1.0, 0.0, 0.5]).view(3, 1, 1).expand(3, 2, 2)
    assert normalise(image)[:, 0, 0].tolist() == [1, -1, 0.5]
    assert torch.equal(normalise(image[None])[0], normalise(image))
    assert normalise.state_dict() == {}
    grey = open_stages("test_resnet", in_chans=1)
    assert (grey.in_chans, len(grey.mean), len(grey.std)) == (1, 1, 1)
    assert grey.mean[0] == pytest.approx(sum(timm.create_model("test_resnet").pretrained_cfg["mean"]) / 3)
    assert grey(torch.rand(1, 1, 64, 64))[0].shape[-2:] == (16, 16)


def test_sources_of_and_rescaling():
    expected = {(4, 8, 16, 32): [0, 1, 2, 3], (2, 4, 8, 16, 32): [1, 2, 3, 4], (16, 16, 16, 16): [0, 1, 2, 3]}
    expected |= {(16,): [0, 0, 0, 0], (8, 16, 32): [0, 0, 1, 2], (4, 8, 16, 16, 32, 64): [0, 1, 3, 4]}
    assert {offered: sources_of(list(offered)) for offered in expected} == expected
    for factor, side in ((4, 32), (2, 16), (1, 8), (0.5, 4), (0.25, 2), (8 / 7, 8)):
        assert rescaling(3, factor)(torch.rand(1, 3, 8, 8)).shape == (1, 3, side, side)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("resnet1", {}), "unknown model 'resnet1'; nearest: resnet"),
        (("test_resnet", dict(neck="pan")), "unknown neck 'pan'; .*expected one of fpn, map, tokens"),
        (("test_resnet", dict(neck_args=dict(dim=3))), "neck_args dim given with neck='fpn'"),
        (("test_resnet", dict(neck="map", neck_args=dict(dim=3))), "neck_args dim .* they are for neck='tokens'"),
        ((nn.Linear(2, 2), {}), "Linear offers no feature maps"),
        ((nn.Linear(2, 2), dict(neck="map")), "Linear offers no feature maps"),
        ((nn.Linear(2, 2), dict(pretrained=True)), "pretrained given with a model object"),
    ],
)
def test_open_stages__refuses(arguments, message):
    refused(f"^{message}", open_stages, arguments[0], **arguments[1])
