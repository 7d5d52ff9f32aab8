"""RetinaNet, FCOS and SSDLite: labels, raw outputs, anchors and the pyramid."""

import pytest
import torch
from torch import nn
from torchvision.models.detection.image_list import ImageList

from broadsight.dense.detector import FeaturePyramid, SteadyBatchNorm2d, StridedAnchors
from broadsight.dense.stages import open_stages
from tests.refusals import refused

from .small import ONE_STAGE, small, target


@pytest.mark.parametrize("kind", ONE_STAGE)
def test_predictions__hold_under_bfloat16(kind):
    model = small(kind, score_thresh=0.0).eval()
    images = [torch.rand(3, 64, 96)]
    with torch.no_grad():
        exact = model.raw(torch.stack(images))
        with torch.autocast("cpu", torch.bfloat16):
            rough = model.raw(torch.stack(images))
            (found,) = model(images)
    assert {x.dtype for x in rough.values()} == {torch.float32}
    for name, x in exact.items():
        torch.testing.assert_close(rough[name], x, atol=0.05, rtol=0.05)
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["retinanet", "atss", "fcos"])
def test_labels__count_from_one_outside_and_zero_inside(kind):
    model = small(kind, score_thresh=0.2)
    bias = model.head.classification_head.cls_logits.bias
    assert bias.shape == (3 * (9 if kind == "retinanet" else 1),)
    bias.data = torch.tensor([-9.0, 9.0, -9.0]).repeat(len(bias) // 3)  # sure of the second
    with torch.no_grad():
        (found,) = model.eval()([torch.rand(3, 64, 64)])
    assert set(found["labels"].tolist()) == {2}
    model.train()
    given = [target(64, 64, [10, 10, 50, 50], labels=[label]) for label in (1, 2, 3)]
    with torch.no_grad():
        losses = [model([torch.ones(3, 64, 64) / 2], [one])["classification"] for one in given]
    assert losses[1] < losses[0] and losses[1] < losses[2]
    assert [int(one["labels"]) for one in given] == [1, 2, 3]  # what was given is not changed


def test_ssdlite__background_is_class_zero():
    model = small("ssdlite", score_thresh=0.5)
    assert model.raw(torch.rand(1, 3, 64, 96))["cls_logits"].shape[-1] == 4
    for block in model.head.classification_head.module_list:
        nn.init.zeros_(block[1].weight)
        block[1].bias.data = torch.tensor([0.0, -9, -9, 9]).repeat(6)
    with torch.no_grad():
        (found,) = model.eval()([torch.rand(3, 64, 96)])
    assert set(found["labels"].tolist()) == {3}


def test_raw__anchors_are_counted():
    raw = small("retinanet").eval().raw(torch.rand(2, 3, 64, 96))
    positions = 8 * 12 + 4 * 6 + 2 * 3 + 1 * 2 + 1
    assert raw["cls_logits"].shape == (2, 9 * positions, 3) and raw["bbox_regression"].shape == (2, 9 * positions, 4)


def test_raw__normalises_by_the_backbones_mean_and_std():
    model = small("retinanet").eval()
    seen = []
    model.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    mean, std = (torch.tensor(x)[:, None, None] for x in (model.stages.mean, model.stages.std))
    model.raw((mean + 2 * std).expand(1, 3, 64, 64))
    torch.testing.assert_close(seen[0], torch.full((1, 3, 64, 64), 2.0))


class Raw(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model.raw(images)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_STAGE)
def test_raw__exports(kind):
    model, images = small(kind).eval(), torch.rand(1, 3, 64, 96)
    program = torch.export.export(Raw(model), (images,))
    others = torch.rand(1, 3, 64, 96)
    torch.testing.assert_close(program.module()(others), model.raw(others))


def test_anchors__lie_at_true_strides():
    strides = (8, 128)
    grid = StridedAnchors(strides, 4, (0.5, 1.0, 2.0), per_octave=3)
    maps = [torch.zeros(1, 1, 100, 100), torch.zeros(1, 1, 7, 7)]  # 800 / 7 is 114
    (anchors,) = grid(ImageList(torch.zeros(1, 3, 800, 800), [(800, 800)]), maps)
    assert anchors.shape == (9 * (100**2 + 7**2), 4)
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    assert centres[9].tolist() == [8, 0] and centres[-1].tolist() == [768, 768]
    sides = (anchors[:9, 2:] - anchors[:9, :2]).prod(1).sqrt()
    wanted = torch.tensor([32, 40, 50]).repeat(3)
    torch.testing.assert_close(sides, wanted.float(), atol=1.0, rtol=0)


@pytest.mark.parametrize("extra, seen", [("c5", True), ("p5", False)])
def test_pyramid__sixth_map_is_made_of_what_was_asked_for(extra, seen):
    """Also if the last map has just as many channels as the pyramid."""
    stages = open_stages("test_resnet")
    pyramid = FeaturePyramid(stages, 8, extra, width=stages.channels[-1]).eval()
    for layer in (pyramid.fpn.inner_blocks[-1], pyramid.fpn.layer_blocks[-1]):
        nn.init.zeros_(layer[0].weight)  # the fifth map of the pyramid is zero
    with torch.no_grad():
        maps = pyramid(torch.randn(1, 3, 64, 64))
    assert list(maps) == ["0", "1", "2", "p6", "p7"] and pyramid.strides == (8, 16, 32, 64, 128)
    assert not maps["2"].any() and bool(maps["p6"].any()) == seen


def test_pyramid__freezes_what_only_lower_maps_need():
    pyramid = FeaturePyramid(open_stages("test_resnet", neck="map"), 8, "p5", width=32)
    frozen = {name for name, p in pyramid.named_parameters() if not p.requires_grad}
    assert frozen and all(".0." in name and name.startswith("stages.neck.") for name in frozen)


def test_fcos__begins_a_stride_from_each_side():
    deltas = small("fcos").eval().raw(torch.rand(1, 3, 64, 64))["bbox_regression"]
    assert deltas.min() > 0 and deltas.mean().item() == pytest.approx(1, abs=0.3)


def test_batch_norm__single_value_by_running_statistics():
    norm = SteadyBatchNorm2d(2)
    norm.running_mean.fill_(1), norm.running_var.fill_(4)
    out = norm(torch.full((1, 2, 1, 1), 5.0))
    torch.testing.assert_close(out, torch.full((1, 2, 1, 1), 2.0), atol=1e-4, rtol=0)
    assert norm.running_mean.tolist() == [1, 1]
    x = torch.randn(3, 2, 2, 2)
    torch.testing.assert_close(norm(x), nn.BatchNorm2d(2)(x))


def test_channels__other_than_the_models_are_refused():
    refused("an image has 1 channels; the model takes 3", small("retinanet").eval(), [torch.rand(1, 64, 64)])
