"""Dense models side by side: what is built, what is counted, and what a call runs."""

import dataclasses
import json
import math

import pytest
import torch

import broadsight
from broadsight.benchmark.candidates import Variant
from broadsight.benchmark.dense import build
from broadsight.benchmark.report import render
from broadsight.benchmark.run import Report, Settings
from broadsight.dense import build as build_dense
from tests.dense.heads.small import FEW, KINDS

from .conftest import shown

ONCE = Settings(batch=2, size=(64, 96), rounds=1, warmup=0)


def candidate(kind: str, **options):
    head, given = KINDS[kind]
    (made,) = build(Variant("test_resnet", head=head, args={"head": given}), dataclasses.replace(ONCE, **options))
    return made


def test_bench__necks_of_two_backbones_in_one_run():
    heads, necks = dict(width=32), dict(dim=32, tokens=4)
    options = dict(head="retinanet", neck=["fpn", "tokens"], head_args=heads, neck_args=necks, size="64x96", batch=2)
    names = ["test_resnet", "test_resnet:stem_width=16"]
    report = broadsight.bench(names, rounds=1, warmup=0, **options)
    titles = [f"retinanet on {name}{neck}" for name in names for neck in ("", " + tokens:dim=32,tokens=4 neck")]
    assert [row.model for row in report.rows] == titles
    models = [
        build_dense("retinanet", "test_resnet", 80, neck=neck, neck_args=given, backbone_args=stem, **heads)
        for stem in ({}, dict(stem_width=16))
        for neck, given in (("fpn", None), ("tokens", necks))
    ]
    assert [row.params for row in report.rows] == [sum(p.numel() for p in one.parameters()) for one in models]
    first, mapped, *_ = report.rows
    assert first.macs < mapped.macs and first.size == [64, 96]
    assert first.throughput == pytest.approx(2e3 / first.wall_ms.median)
    assert first.objects == 0  # none of random weights passes the threshold
    assert Report.from_dict(json.loads(json.dumps(dataclasses.asdict(report)))) == report
    table = shown(render(report))
    assert "objects" in table and "peak" not in table.partition("GFLOP")[0].rpartition("peak")[0]
    assert "with width=32, inference, batch 2 at 64x96" in table and "so many objects an image" in table


def test_objects__are_those_that_the_options_let_through():
    assert candidate("mask_rcnn").objects == 0
    few = {**FEW, "box_score_thresh": 0.0}
    (made,) = build(Variant("test_resnet", head="mask_rcnn", args={"head": few}), ONCE)
    assert made.objects == FEW["box_detections_per_img"] == 5
    seen = []
    made.model.register_forward_pre_hook(lambda model, inputs: seen.append([one.shape for one in inputs[0]]))
    made.call()
    assert seen == [[(3, 64, 96)] * 2]


def test_settings__reach_the_model():
    plain, fused = candidate("semantic_fpn"), candidate("semantic_fpn", fuse=True, channels_last=True)
    assert plain.objects is None and plain.forward().shape == (2, 150, 64, 96) and plain.macs == fused.macs
    assert fused.forward().shape == (2, 150, 64, 96)
    settings = dataclasses.replace(ONCE, size=(64, 64))
    sized = build(Variant("test_resnet", head="ssdlite", size=(96, 64), broadcast="none"), settings)[0]
    assert sized.model.transform.image_size == sized.size == (96, 64)
    (scaled,) = build(
        Variant("test_vit", head="semantic_fpn", broadcast="scaled", args={"head": KINDS["semantic_fpn"][1]}), ONCE
    )
    assert sum("context_broadcast.scale" in name for name, _ in scaled.model.named_parameters()) == 6


@pytest.mark.parametrize("kind", ["atss", "ssdlite", "mask_rcnn", "keypoint_rcnn", "semantic_fpn", "simple_baseline"])
def test_train__a_step_on_random_objects(kind):
    made = candidate(kind, train=True)
    loss = made.forward()
    assert loss.shape == () and 0 < loss.item() < math.inf
    made.call()
    learned = [p for p in made.model.parameters() if p.requires_grad]
    assert made.model.training and all(p.grad is not None for p in learned)
    assert torch.equal(candidate(kind, train=True).forward(), loss)  # seeded, whatever was drawn before
