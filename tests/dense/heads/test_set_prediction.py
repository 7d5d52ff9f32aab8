"""RT-DETR: boxes in pixels of the given images, losses that are those of transformers, gradients everywhere."""

import copy
import sys
from functools import cache, partial

import pytest
import torch
from torchvision.ops import box_iou

pytest.importorskip("transformers")
pytest.importorskip("scipy")

from broadsight.dense.heads.set_prediction import RTDETR
from tests.refusals import refused

from .small import small as small_head

NOTHING = dict(boxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
OBJECTS = dict(boxes=torch.tensor([[4.0, 6.0, 24.0, 46.0], [0.0, 0.0, 10.0, 10.0]]), labels=torch.tensor([1, 2]))
built = cache(partial(small_head, "rtdetr", backbone="test_convnext", in_chans=1))


def small(num_classes: int = 2) -> RTDETR:
    return copy.deepcopy(built(num_classes))


def make_images() -> list[torch.Tensor]:
    return [torch.rand(1, 50, 40), torch.rand(1, 33, 97)]


@pytest.mark.slow
def test_losses__sum_up_to_that_of_transformers_and_boxes_stay_in_float32():
    model = small().train()
    kept = {}
    model.detector.register_forward_hook(lambda module, inputs, output: kept.update(output))
    losses = model(make_images(), [OBJECTS, NOTHING])
    torch.testing.assert_close(sum(losses.values()), kept["loss"])
    # two decoder layers and the encoder's proposals, and two layers of denoising queries
    assert len(kept["loss_dict"]) == 3 * (3 + 2)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.eval()(make_images())
    assert kept["pred_boxes"].dtype == found[0]["boxes"].dtype == found[0]["scores"].dtype == torch.float32


def test_targets_and_predictions__by_hand():
    model = small()
    learned = model.as_shares(OBJECTS, torch.zeros(1, 50, 40))
    torch.testing.assert_close(learned["boxes"], torch.tensor([[0.35, 0.52, 0.5, 0.8], [0.125, 0.1, 0.25, 0.2]]))
    assert learned["class_labels"].tolist() == [0, 1]
    model.detections_per_img, model.score_thresh = 3, 0.1
    logits = torch.tensor([[[0.0, -1.0], [2.0, 1.0]], [[-3.0, -9.0], [-8.0, 0.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.9, 0.1, 0.4, 0.1]]]).repeat(2, 1, 1)
    first, second = model.predictions(logits, boxes, [(50, 40), (100, 200)])
    # a query may answer for both classes; the second box reaches over the right edge
    corners = [[28.0, 2.5, 40, 7.5], [28, 2.5, 40, 7.5], [16, 15, 24, 35]]
    torch.testing.assert_close(first["boxes"], torch.tensor(corners))
    assert first["labels"].tolist() == [1, 2, 1]
    torch.testing.assert_close(first["scores"], torch.tensor([2.0, 1.0, 0.0]).sigmoid())
    torch.testing.assert_close(second["boxes"], torch.tensor([[140.0, 5, 200, 15]]))  # others score below 0.1
    assert second["labels"].tolist() == [2]


def test_eval__every_image_by_itself_and_in_its_own_pixels():
    model = small().eval()
    images = make_images()
    found = model(images)
    alone = model(images[1:])
    for result, image in zip(found, images, strict=True):
        shapes = {key: tuple(x.shape) for key, x in result.items()}
        assert shapes == {"boxes": (20, 4), "labels": (20,), "scores": (20,)}  # ten queries, two classes
        low, high = result["boxes"].reshape(-1, 2, 2).unbind(1)
        assert (low >= 0).all() and (low <= high).all() and (high <= torch.tensor(image.shape[:0:-1])).all()
        assert result["labels"].unique().tolist() == [1, 2]
        assert result["scores"].diff().max() <= 0
    torch.testing.assert_close(alone[0]["scores"], found[1]["scores"])
    torch.testing.assert_close(alone[0]["boxes"], found[1]["boxes"], atol=1e-3, rtol=1e-4)
    seen = []
    model.stages.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model.normalise = torch.nn.Identity()
    model([torch.arange(192.0).expand(1, 64, 192)])  # halved, not every other pixel, but a mean about the middle of two
    assert seen[0].shape == (1, 1, 64, 96)
    torch.testing.assert_close(seen[0][0, 0, 0, 5:90], torch.arange(5.0, 90.0) * 2 + 0.5)


@pytest.mark.slow
def test_initial_weights__norms_of_one_rare_objects_and_boxes_at_their_anchors():
    model = small()
    norms = [layer for layer in model.detector.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    assert norms and all((layer.weight == 1).all() for layer in norms)
    inner = model.detector.model
    heads = [inner.enc_score_head, *inner.decoder.class_embed]
    torch.testing.assert_close(torch.stack([head.bias.sigmoid() for head in heads]), torch.full((3, 2), 0.01))
    found = model.eval()([torch.rand(1, 64, 96)])[0]["boxes"]
    low, high = found.reshape(-1, 2, 2).unbind(1)
    share = (high - low) / torch.tensor([96, 64])
    sides = torch.tensor([0.05, 0.1, 0.2])  # of anchors on the three maps
    away = (share[:, :1] - sides).abs().amin(1)
    inside = (low > 0).all(1) & (high < torch.tensor([96, 64])).all(1)
    assert inside.any() and away[inside].max() < 1e-4


def test_state_dict__backbone_once_under_its_name_and_a_missing_package_is_said(monkeypatch):
    model = small()
    names = list(model.state_dict())
    assert any(name.startswith("stages.network.") for name in names) and "backbone" not in " ".join(names)
    assert len({p.data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    few = small_head("rtdetr", image_size=(64, 64), decoder_layers=1, queries=None)
    assert few.detector.config.num_queries == 84  # by default all positions of a small image
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(r"^rtdetr needs transformers; pip install broadsight\[hf\]$", small_head, "rtdetr", error=ImportError)


@pytest.mark.slow
def test_training__finds_a_bright_square():
    model = small(1).train()
    boxes = torch.tensor([[8.0, 8, 40, 40], [50, 20, 90, 60], [30, 10, 60, 50], [60, 5, 90, 30]])
    images = [torch.zeros(1, 64, 96) for _ in boxes]
    for image, (x1, y1, x2, y2) in zip(images, boxes.long().tolist(), strict=True):
        image[:, y1:y2, x1:x2] = 1
    targets = [dict(boxes=box[None], labels=torch.ones(1, dtype=torch.long)) for box in boxes]
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(150):
        optimizer.zero_grad()
        sum(model(images, targets).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = model.eval()(images)
    overlaps = [float(box_iou(result["boxes"][:1], box[None])) for result, box in zip(found, boxes, strict=True)]
    assert min(overlaps) > 0.6
