"""Raw outputs become what torch's own decoding makes of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import batched_nms

from broadsight.dense.pose import decode as decode_heat_maps
from broadsight.dense.scoring import PixelScorer
from broadsight.deployment.dense.decoding import Place, decode, resizing, suppress
from broadsight.deployment.dense.raw import raw_model
from broadsight.prediction.dense import finder
from broadsight.runs.dense_model import pixels_of
from tests.deployment.dense.models import HEADS, dense_run, in_torch, make_image, raw_find
from tests.refusals import refused

BOXED = [kind for kind in HEADS if kind.split()[0] in ("retinanet", "fcos", "ssdlite", "rtdetr")]


@pytest.mark.parametrize("size", [(150, 101), (64, 97)])
@pytest.mark.parametrize("kind", BOXED)
def test_decode__boxes_are_those_of_the_detector(kind, size):
    pytest.importorskip("transformers" if kind == "rtdetr" else "torch")
    run = dense_run(kind)
    with torch.no_grad():
        expected = finder(run)(make_image(*size), None)
    found = raw_find(run, make_image(*size))
    assert len(expected["scores"]) >= 20, "the detector finds too little to compare"
    assert len(found["scores"]) == len(expected["scores"])
    np.testing.assert_allclose(found["scores"], expected["scores"], atol=1e-5)
    np.testing.assert_array_equal(found["labels"], expected["labels"])
    np.testing.assert_allclose(found["boxes"], expected["boxes"], atol=1e-3)


@pytest.mark.parametrize("size", [(150, 101), (64, 90)])
@pytest.mark.parametrize("kind", ["semantic_fpn", "upernet"])
def test_decode__classes_of_pixels_are_those_of_the_segmenter(kind, size):
    pytest.importorskip("segmentation_models_pytorch" if kind == "upernet" else "torch")
    run = dense_run(kind)
    with torch.no_grad():
        expected = PixelScorer(run.classes, views=run.views()).find(run.model, pixels_of(make_image(*size))).numpy()
    found = raw_find(run, make_image(*size))
    assert expected.std((1, 2)).min() > 1e-3, "the segmenter sees the same everywhere"
    np.testing.assert_allclose(found["probabilities"], expected, atol=1e-5)
    np.testing.assert_array_equal(found["classes"], found["probabilities"].argmax(0))


def test_decode__keypoints_are_those_of_the_pose_model():
    run = dense_run("simple_baseline")
    boxes = torch.tensor([[10.0, 5.0, 90.0, 95.0], [30.5, 20.0, 31.0, 20.2], [-20.0, 40.0, 400.0, 60.0]])
    with torch.no_grad():
        expected = finder(run)(make_image(), boxes)
    found = raw_find(run, make_image(), boxes.numpy())
    np.testing.assert_allclose(found["keypoints"], expected["keypoints"], atol=1e-3)
    np.testing.assert_allclose(found["scores"], expected["scores"], atol=1e-5)


def test_decode__heat_maps_peak_between_cells_and_at_borders():
    maps = np.random.default_rng(0).random((40, 5, 7, 6), dtype=np.float32)
    maps[0, 0] = 0  # a plateau: the first cell
    maps[1, 0, 6, 5] = 2
    places = [Place((28, 24), (28, 24), (28, 24))] * len(maps)
    found = decode({"kind": "heatmaps", "stride": 4}, {"heatmaps": maps}, places)
    expected = decode_heat_maps(torch.from_numpy(maps), stride=4)
    np.testing.assert_allclose(np.stack([one["keypoints"] for one in found]), expected, atol=1e-6)


@pytest.mark.parametrize("overlap", [0.3, 0.55])
def test_suppress__keeps_what_torchvision_keeps(overlap):
    random = np.random.default_rng(1)
    corners = random.random((500, 2)) * 100
    boxes = np.concatenate([corners, corners + random.random((500, 2)) * 40], 1).astype(np.float32)
    boxes[:3, 2:] = boxes[:3, :2]  # without an area
    scores, labels = random.random(500).astype(np.float32), random.integers(0, 4, 500)
    scores[10:20] = scores[10]  # equals stay in their order
    expected = batched_nms(*(torch.from_numpy(x) for x in (boxes, scores, labels)), overlap).numpy()
    np.testing.assert_array_equal(suppress(boxes, scores, labels, overlap, 500), expected)
    np.testing.assert_array_equal(suppress(boxes, scores, labels, overlap, 7), expected[:7])
    assert suppress(boxes[:0], scores[:0], labels[:0], overlap, 7).shape == (0,)


@pytest.mark.parametrize(("before", "after"), [(5, 20), (20, 7), (7, 7), (1, 4), (9, 1)])
def test_resizing__is_bilinear_interpolation(before, after):
    x = torch.rand(1, 1, before, 1)
    expected = F.interpolate(x, (after, 1), mode="bilinear", align_corners=False)[0, 0, :, 0]
    np.testing.assert_allclose(resizing(before, after) @ x[0, 0, :, 0].numpy(), expected, atol=1e-6)


def test_decode__refuses_outputs_of_another_image_and_may_find_nothing():
    raw = raw_model(dense_run("fcos"))
    outputs, place = in_torch(raw)(np.zeros((1, 3, 64, 96), np.float32)), Place((64, 96), (64, 96), (64, 96))
    other = "rows of cls_logits for an image of 96x96; expected"
    refused(other, decode, raw.decoding, outputs, [replace(place, canvas=(96, 96))])
    refused("has 1 rows for 2 images", decode, raw.decoding, outputs, [place] * 2)
    (found,) = decode({**raw.decoding, "score_threshold": 1.0}, outputs, [place])
    assert {name: values.shape for name, values in found.items()} == {"boxes": (0, 4), "labels": (0,), "scores": (0,)}
