"""Dense models as exporters get them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from broadsight.deployment import Session, capture
from broadsight.deployment.dense.raw import NotExportable, PoolToCells, RawDetector, SingleChannel, as_good, raw_model
from broadsight.deployment.dense.session import crops, differences, find, predict_images, whole_image
from tests.deployment.dense.models import HEADS, dense_run, description_of, in_torch, make_image, raw_find
from tests.refusals import refused


@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind not in ("rtdetr", "upernet")])
def test_raw_model__is_described_in_json_and_leaves_the_run_alone(kind):
    run = dense_run(kind)
    before = {name: x.clone() for name, x in run.model.state_dict().items()}
    raw = raw_model(run)
    assert json.loads(json.dumps(raw.decoding)) == raw.decoding and raw.decoding["head"] == run.head
    assert json.loads(json.dumps(raw.preprocessing)) == raw.preprocessing
    assert raw.any_size == (run.head in ("retinanet", "fcos", "semantic_fpn"))
    assert not raw.model.training and not any(p.requires_grad for p in raw.model.parameters())
    next(raw.model.parameters()).zero_()
    assert all(torch.equal(x, before[name]) for name, x in run.model.state_dict().items())


def test_raw_model__says_what_to_use_instead_of_regions_and_which_canvas():
    for head, task, instead in (
        ("faster_rcnn", "detect", "train retinanet, fcos, ssdlite or rtdetr"),
        ("mask_rcnn", "instances", "no head for masks does without"),
        ("keypoint_rcnn", "keypoints", "simple_baseline"),
    ):
        words = rf"{head} looks into regions.*{instead}.*heads that export are retinanet"
        refused(words, raw_model, SimpleNamespace(head=head, task=task), error=NotExportable)
    assert raw_model(dense_run("fcos")).size == (128, 128)  # holds 107 pixels in whole cells
    assert raw_model(dense_run("semantic_fpn"), canvas=(64, 160)).size == (64, 160)
    assert raw_model(dense_run("ssdlite"), canvas=(96, 80)).size == (96, 80)
    words = "canvas=70x160; expected multiples of 32, for instance 64x160"
    refused(words, raw_model, dense_run("fcos"), canvas=(70, 160))
    refused("canvas=64x64; ssdlite takes 96x80 alone", raw_model, dense_run("ssdlite"), canvas=(64, 64))


@pytest.mark.parametrize("cells", [1, 2, 3, 6])
def test_pool_to_cells__is_adaptive_average_pooling(cells):
    for x in (torch.randn(2, 3, 9, 17), torch.randn(2, 3, 6, 12), torch.randn(2, 3, 3, 2)):
        torch.testing.assert_close(PoolToCells(cells)(x), nn.AdaptiveAvgPool2d(cells)(x))


@pytest.mark.parametrize(
    ("chosen", "good"),
    [
        *(([[2, 0], [1, 3]], True), ([[2, 3], [1, 3]], True)),  # 0 and 3 of the first are equal up to rounding
        *(([[0, 2], [1, 3]], False), ([[2, 1], [1, 3]], False)),  # the better one comes first
        *(([[2, 2], [1, 3]], False), ([[2, 4], [1, 3]], False), ([[2, -1], [1, 3]], False), ([[2], [1]], False)),
    ],
)
def test_as_good__the_best_in_order_up_to_rounding(chosen, good):
    scores = torch.tensor([[0.5, 0.1, 0.9, 0.5 - 1e-6], [-3.0, 2.0, -4.0, 1.0]])
    assert as_good(scores, torch.tensor(chosen), 2) == good


def test_raw_detector__a_program_for_any_size_takes_single_cells_and_images():
    class Backbone(nn.Module):
        def forward(self, images):
            return {"0": nn.functional.avg_pool2d(images, 64, ceil_mode=True)}

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores, self.boxes = nn.Conv2d(3, 1, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, maps):
            B, _, H, W = maps[0].shape
            boxes = self.boxes(maps[0]).view(B, -1, 4, H, W).permute(0, 3, 4, 1, 2).reshape(B, -1, 4)
            return {"a": self.scores(maps[0]).flatten(2).mT, "b": boxes}

    torch.manual_seed(0)
    model = RawDetector(SimpleNamespace(backbone=Backbone(), head=Head()), ("a", "b")).eval()
    assert isinstance(model.head.scores, SingleChannel)
    module = capture(model, (3, 288, 544), any_size=True, single_cells=True).module()
    for shape in ((1, 3, 64, 64), (1, 3, 65, 64), (3, 3, 200, 130)):
        images = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(module(images), model(images))


# ---- Images


def test_whole_image__any_size_is_what_the_detector_sees_or_a_fixed_canvas_also_a_line_of_pixels_and_grey():
    run = dense_run("fcos")
    raw = raw_model(run)
    image, place = whole_image(description_of(run, raw), make_image(150, 101))
    given = torch.from_numpy(np.array(make_image(150, 101))).permute(2, 0, 1).float() / 255
    expected = run.model.transform([given])[0]
    assert place.image == (101, 150) and place.seen == expected.image_sizes[0] == (64, 95)
    assert place.canvas == image.shape[1:] == (64, 96)
    np.testing.assert_allclose(image, expected.tensors[0], atol=1e-6)
    for run in (dense_run("fcos"), dense_run("semantic_fpn")):
        raw = raw_model(run, canvas=(64, 64))
        image, place = whole_image(description_of(run, raw, any_size=False), make_image(200, 100))
        assert place.seen == (32, 64) and image.shape == (3, 64, 64)
        assert np.abs(image[:, 32:]).max() == 0 < np.abs(image[:, :32]).min(axis=(1, 2)).max()
    image, place = whole_image(description_of(run, raw_model(run)), make_image(300, 1).convert("L"))
    assert place.seen == (1, 256) and image.shape == (3, 64, 256)
    assert raw_find(run, make_image(300, 1))["classes"].shape == (1, 300)


def test_predict_images__boxes_where_they_belong():
    pose, fcos = dense_run("simple_baseline"), dense_run("fcos")
    raw = raw_model(pose)
    said = description_of(pose, raw)
    session = Session(said, lambda images: list(in_torch(raw)(images).values()))
    none, whole = predict_images(session, [make_image(), make_image()], [np.zeros((0, 4)), [[0, 0, 150, 101]]])
    assert none["keypoints"].shape == (0, 5, 3) and none["scores"].shape == (0,)
    np.testing.assert_array_equal(whole["keypoints"], predict_images(session, [make_image()])[0]["keypoints"])
    refused("boxes of 1 images for 2", predict_images, session, [make_image(), make_image()], [[]])
    refused("looks at crops of single objects", whole_image, said, make_image())
    said, box = description_of(fcos, raw_model(fcos)), [[0, 0, 9, 9]]
    refused("finds them by itself", find, session, said, make_image(), box)
    refused("finds boxes by itself", crops, said, make_image(), box)
    refused("says nothing of its decoding", find, session, replace(said, decoding=None), make_image())


def test_apart__counts_what_is_not_the_same():
    boxes = np.array([[0, 0, 9, 9], [5, 5, 20, 30]], np.float32)
    one = {"boxes": boxes, "labels": np.array([1, 2]), "scores": np.array([0.9, 0.8])}
    fewer, nothing = ({name: values[:count] for name, values in one.items()} for count in (1, 0))
    assert differences(one, one) == differences(nothing, nothing) == {"differing": 0.0, "pixels": 0.0}
    assert differences({**one, "boxes": boxes + 0.25}, one) == {"differing": 0.0, "pixels": 0.25}
    assert differences(fewer, one) == {"differing": pytest.approx(1 / 3), "pixels": 0.0}
    assert (
        differences(nothing, one)["differing"]
        == differences({**one, "labels": np.array([2, 1])}, one)["differing"]
        == 1
    )
    pixels = {"classes": np.zeros((4, 5))}
    assert differences({"classes": np.eye(4, 5)}, pixels)["differing"] == pytest.approx(0.2)
