"""What holds for every head: it is registered, trains as a whole, and works with few images, classes and channels."""

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from broadsight.dense import HEADS, build, models_for, register
from tests.refusals import refused

from .small import DETECTORS, KINDS, ONE_STAGE, TWO_STAGE, small, target, two_images

RTDETR = [kind for kind in KINDS if kind == "rtdetr"]  # which needs an extra
VARIANTS = {name: (name, {}) for name in KINDS} | {
    "cascade": ("cascade", dict(box_head="conv")),
    "cascade, one box for all classes": ("cascade", dict(class_agnostic=True, masks_on="last")),
    "semantic_fpn, one grey class": ("semantic_fpn", dict(num_classes=1, in_chans=1, dice=0.5)),
    "upernet, grey": ("upernet", dict(num_classes=2, in_chans=1, dice=0.5)),
    "upernet, one head": ("upernet", dict(aux_weight=0)),
    "simple_baseline, grey": ("simple_baseline", dict(in_chans=1, num_keypoints=1)),
    "simple_baseline, neck": ("simple_baseline", dict(neck="map")),
    **{f"{name}, neck": (name, dict(neck="map")) for name in RTDETR},
}
LOSSES = {"rtdetr": {"class", "box", "giou"}, "semantic_fpn, one grey class": {"loss", "dice"}}
LOSSES |= {"upernet": {"loss", "aux"}, "upernet, grey": {"loss", "aux", "dice"}, "upernet, one head": {"loss"}}
LOSSES |= {name: {"loss"} for name in ("semantic_fpn", "simple_baseline")}


@pytest.mark.parametrize("name", VARIANTS)
def test_train_step__reaches_every_parameter(name):
    kind, options = VARIANTS[name]
    model = small(kind, **options).train()
    assert model.task == HEADS[KINDS[kind].head].task
    if name in (*RTDETR, "semantic_fpn", "upernet", "simple_baseline"):
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(*two_images(model))
        assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses.values())
    losses = model(*two_images(model))
    assert losses.keys() == LOSSES.get(name, losses.keys())
    sure = kind == "cascade" or options.get("num_classes") == 1  # the only class is certain
    assert all(loss.ndim == 0 and loss.isfinite() and (loss > 0 or sure) for loss in losses.values())
    if kind == "cascade":
        assert ("loss_mask_1" in losses) == ("masks_on" not in options) and "loss_mask_3" in losses
    sum(losses.values()).backward()
    assert [key for key, p in model.named_parameters() if p.requires_grad == (p.grad is None)] == []
    if options.get("neck"):  # what only the unused maps need is frozen
        layers = model.stages.neck.to_stages
        assert not layers[0].weight.requires_grad and layers[3].weight.requires_grad


@pytest.mark.parametrize("kind", DETECTORS)
def test_image__alone_small_grey_without_objects(kind):
    """One image of one class and channel: a map of one position, and nothing to find."""
    options = dict(box_score_thresh=0.0) if kind in TWO_STAGE else {}
    model = small(kind, num_classes=1, in_chans=1, **options).train()
    losses = model([torch.rand(1, 40, 64)], [target(40, 64, labels=[])])
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    assert [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=kind == "cascade"):
        (found,) = model.eval()([torch.rand(1, 40, 64)])
    assert {1} >= set(found["labels"].tolist()) >= ({1} if kind in TWO_STAGE else set())
    if kind == "cascade":
        assert found["masks"].shape[1:] == (1, 40, 64)
        assert {found[name].dtype for name in ("boxes", "scores", "masks")} == {torch.float32}


MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text("utf-8"))
EXTRA = dict(mask_rcnn={"masks"}, keypoint_rcnn={"keypoints", "keypoints_scores"})


@pytest.mark.parametrize("kind", [kind for kind in ONE_STAGE | TWO_STAGE if kind != "cascade"])
def test_predictions__in_pixels_of_the_image_that_came(kind):
    size = (64, 64) if kind == "ssdlite" else (48, 64)
    model = small(kind, image_size=size, **{"box_score_thresh" if kind in TWO_STAGE else "score_thresh": 0.0}).eval()
    seen = []
    model.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape[-2:])))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=kind in TWO_STAGE):
        first, second = model([torch.rand(3, 100, 200), torch.rand(3, 60, 60)], [{"boxes": None}] * 2)
    assert seen == [(64, 64)]  # 32 x 64 and 48 x 48, padded
    assert set(first) == {"boxes", "labels", "scores"} | EXTRA.get(kind, set())
    boxes = first["boxes"]
    assert len(boxes) >= 5 and boxes.dtype == first["scores"].dtype == torch.float32
    assert boxes.min() >= 0 and (boxes.amax(0)[2:] <= torch.tensor([200.001, 100.001])).all()
    assert boxes[:, 2].max() > (64 if kind in TWO_STAGE else 150)  # not in pixels of the resized one
    if kind == "mask_rcnn":
        assert first["masks"].shape == (5, 1, 100, 200) and second["masks"].shape == (5, 1, 60, 60)
        assert first["masks"].min() >= 0 and first["masks"].max() <= 1
    if kind == "keypoint_rcnn":
        points = first["keypoints"]
        assert points.shape == (5, 4, 3) and first["keypoints_scores"].shape == (5, 4)
        low, high = boxes[:, None, :2] - 4, boxes[:, None, 2:] + 4  # a pixel of the resized image is three here
        assert ((points[..., :2] >= low) & (points[..., :2] <= high)).all()
    model.train()
    model([torch.rand(3, 96, 128)], [target(96, 128, [5, 5, 60, 60], labels=[1])])
    assert seen[1:] == [(96, 128)]  # nothing is resized


@pytest.mark.parametrize(("kind", "mistake", "said"), MISTAKES)
def test_options__mistakes_are_said(kind, mistake, said):
    if kind in KINDS:
        refused(said, small, kind, **mistake)


@pytest.mark.parametrize("kind", ["retinanet", "semantic_fpn", "simple_baseline", *RTDETR])
def test_training__without_targets_or_with_labels_beyond_the_classes_is_refused(kind):
    model = small(kind).train()
    what = "masks" if kind == "semantic_fpn" else "targets"
    refused(rf"was given no {what}; pass .* or call model.eval\(\)", model, two_images(model)[0])
    for label in (0, 4) if kind in DETECTORS else ():
        words = f"labels from {label} to {label}; expected 1 to 3, the number of classes"
        refused(words, model, [torch.rand(3, 9, 9)], [target(9, 9, [1, 1, 9, 9], labels=[label])])


def test_register__a_head_of_the_users_own(monkeypatch):
    def constant(stages, num_classes, *, value=0.0):
        return nn.Linear(num_classes, int(value))

    monkeypatch.setitem(HEADS, "constant", None)  # so that it is taken out again
    monkeypatch.delitem(HEADS, "constant")
    assert {kind.head for kind in KINDS.values()} == set(HEADS) - ({"rtdetr"} - set(RTDETR))  # all are tested here
    for _ in range(2):  # a cell of a notebook runs again
        register("constant", "segment")(constant)
    assert models_for("segment") == ["semantic_fpn", "upernet", "constant"]
    assert build("constant", "test_resnet", 2, value=3.0).weight.shape == (3, 2)
    refused("constant cannot be built: .*'worth'", build, "constant", "test_resnet", 2, worth=3.0)
    add = register("retinanet", "detect")
    refused("head 'retinanet' is registered by broadsight.dense.heads.one_stage", add, constant)
    refused("unknown task 'pose'; .*expected one of detect, instances", register, "constant", "pose")
