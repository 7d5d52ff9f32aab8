"""Leafing through what is seen inside a model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from broadsight.app import inside as looking
from broadsight.app.candidates import Candidate
from broadsight.app.inside import Looked, described, look
from broadsight.explanation.inside import KINDS
from broadsight.explanation.maps.map import Look
from broadsight.explanation.overlay import overlay
from broadsight.runs.classifier import open_classifier
from tests.training.small_runs import leave_run, refusal

PHOTO = Image.new("RGB", (96, 96), (90, 120, 30))


@pytest.fixture
def looked():
    found = [(depth, title, f"layer{depth}") for depth, title in ((0, "a"), (0, "b"), (2, "b"), (2, "c"))]
    looks = (Look("gradcam", title, layer, at, "heat", torch.rand(4, 4), "bright: here") for at, title, layer in found)
    return Looked(Image.new("RGB", (8, 8)), tuple(looks))


def test_looked__by_depth_and_title(looked):
    assert looked.depths == 3
    assert [one.title for one in looked.at(0)] == ["a", "b"] and [one.depth for one in looked.at(99)] == [2, 2]
    assert looked.one(0, "b") is looked.looks[1]
    assert looked.one(2, "a") is looked.looks[2]  # no such title there: the first
    for depth in (None, "x", float("nan"), -3):
        assert looked.one(depth) is looked.looks[0]


def test_described__layer_depth_scale_and_note(looked):
    text = described(replace(looked.looks[2], layer="<b>"), 3)
    assert "<strong>b</strong>, depth 3 of 3: <code>&lt;b&gt;</code>" in text
    assert "<p>bright: here</p>" in text and "from dark blue to yellow" in text and "flat" not in text
    flat = replace(looked.looks[0], values=torch.ones(4, 4), note="")
    assert "its only depth" in described(flat, 1) and "no place stands out" in described(flat, 1)
    assert "dark blue" not in described(replace(flat, form="mask", values=torch.ones(4, 4, dtype=torch.bool)), 1)


@pytest.mark.parametrize("crop", [0.5, 0.875])
def test_view__is_what_the_model_sees(tmp_path, crop):
    classifier = open_classifier(leave_run(tmp_path / "run", crop_pct=crop)[0])
    gradient = np.linspace(0, 255, 96).astype(np.uint8)
    image = Image.fromarray(np.stack([np.tile(gradient, (96, 1))] * 3, -1))
    seen = np.asarray(classifier.transforms.build(training=False)(image)).astype(float)  # 3 32 32
    shown = np.asarray(looking.view_of(classifier, image, 32)).astype(float)
    assert np.abs(seen[0] - shown[..., 0]).max() < 6
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[10:30, 30:50] = 255  # the middle half of the shorter side
    half = np.asarray(looking.view_of(classifier, Image.fromarray(pixels), 64))
    assert half[32, 32].min() > 250 and (half.min() > 100) == (crop == 0.5)  # its edge is mixed with what lies beyond


def test_look__maps_of_one_kind_with_the_names_of_classes_and_the_model_stays_as_it_was(model):
    found = look(model, PHOTO, "map-tokens")
    assert {one.kind for one in found.looks} == {"map-tokens"}
    assert found.view.size == (looking.SIDE, looking.SIDE) and overlay(found.view, found.looks[0]).mode == "RGB"
    assert {one.title for one in look(model, PHOTO, "gradcam", 3).looks} == {"class 3, butterfly"}
    assert "has no Super tokens maps; it has Grad-CAM" in refusal(lambda: look(model, PHOTO, "super-tokens"))
    dense = Candidate("seg", "seg", True, object())  # ty: ignore[invalid-argument-type]
    assert "does not classify" in refusal(lambda: look(dense, PHOTO, "gradcam"))
    image = torch.rand(1, 3, 96, 96)
    before = model.run.model(image)
    for kind in looking.kinds(model).values():
        look(model, PHOTO, kind, 3)
    assert torch.equal(model.run.model(image), before)
    assert not any(parameter.requires_grad for parameter in model.run.model.parameters())


def test_choices__of_kinds_and_classes(model):
    assert set(KINDS) == set(looking.KINDS)
    assert looking.kind_called("MAP tokens") == "map-tokens"
    assert looking.classes_of(model)[:2] == [looking.LIKELY, "0: crab"]
    assert [looking.class_called(model, words) for words in (None, looking.LIKELY, "3: butterfly")] == [None, None, 3]
    assert looking.place_clicked([0, 639]) == (0.5 / 640, 639.5 / 640)
    for index in (None, [3], [640, 0], [0, -1], [True, "3"], [float("nan"), 0]):
        assert "click on the image" in refusal(lambda index=index: looking.place_clicked(index))
    for words in ("map-tokens", 3, "crab", "99: crab", ["Grad-CAM"], ["0: crab"]):
        assert "no such kind" in refusal(lambda words=words: looking.kind_called(words))
        assert "no such class" in refusal(lambda words=words: looking.class_called(model, words))
