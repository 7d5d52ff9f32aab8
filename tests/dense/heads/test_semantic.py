"""Segmenters: losses by hand, images of any size, what trains and exports."""

import copy
import math
from functools import cache
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from broadsight.dense.heads.semantic import SemanticFPN, enlarged, group_norm

from .small import small as small_head

NAMES = ["semantic_fpn", "upernet"]
make_backbone = cache(lambda: timm.create_model("test_convnext"))


def small(name: str, num_classes: int = 3, **options) -> Any:
    return small_head(name, num_classes, copy.deepcopy(make_backbone()), **options)


@pytest.mark.parametrize("name", NAMES)
def test_training__learns_two_halves(name):
    model = small(name, 2, dropout=0.0, norm="group").train()  # no statistics that lag behind
    images, masks = torch.rand(2, 3, 64, 64), torch.zeros(2, 64, 64, dtype=torch.long)
    images[..., 32:] *= 0.1
    masks[..., 32:], masks[:, :4] = 1, 255
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(12):
        optimizer.zero_grad()
        sum(model(images, masks).values()).backward()
        optimizer.step()
    found = model.eval()(images).argmax(1)
    assert (found == masks)[masks != 255].float().mean() > 0.95


def test_losses__by_hand_and_of_the_logits_that_eval_gives():
    model = small("semantic_fpn", 2)
    logits = torch.zeros(1, 2, 1, 4)
    logits[0, 1, 0] = torch.tensor([0.0, math.log(3), math.log(3), 7.0])  # of class 1: 1/2, 3/4, 3/4, what ever
    masks = torch.tensor([[[0, 1, 0, 255]]])
    assert model.cross_entropy(logits, masks).item() == pytest.approx((math.log(2) + math.log(4 / 3) + math.log(4)) / 3)
    model.class_weights = torch.tensor([1.0, 3.0])
    weighted = (math.log(2) + 3 * math.log(4 / 3) + math.log(4)) / 5
    assert model.cross_entropy(logits, masks).item() == pytest.approx(weighted)
    model = small("semantic_fpn", 2, dropout=0.0, dice=2.0, norm="group")
    nn.init.zeros_(model.classifier[1].weight)  # every pixel: half of each class
    masks = torch.zeros(1, 32, 32, dtype=torch.long)
    masks[:, :8], masks[:, 24:] = 1, 255
    # n pixels of 3n are of class 1: 2 * (n / 2) / (n + 3n / 2); of class 0: 2 * n / (2n + 3n / 2)
    losses = model.train()(torch.rand(1, 3, 32, 32), masks)
    assert losses["dice"].item() == pytest.approx(2 * ((1 - 2 / 5) + (1 - 4 / 7)) / 2, rel=1e-5)
    assert losses["loss"].item() == pytest.approx(math.log(2))
    model = small("upernet", 3, dropout=0.0, aux_weight=0.4, norm="group").train()
    images, masks = torch.rand(2, 3, 40, 56), torch.randint(3, (2, 40, 56))
    losses = model(images, masks)
    logits = model.eval()(images)
    torch.testing.assert_close(losses["loss"], F.cross_entropy(logits, masks))
    auxiliary = model.auxiliary(model.stages(model.normalise(images))[2])
    auxiliary = F.interpolate(auxiliary, scale_factor=16, mode="bilinear", align_corners=False)[..., :40, :56]
    torch.testing.assert_close(losses["aux"], 0.4 * F.cross_entropy(auxiliary, masks))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", [None, (1.0, 2.0, 0.0)])
def test_masks_without_a_class__loss_is_zero_and_gradients_are_there(name, weights):
    model = small(name, dice=1.0, class_weights=weights).train()
    masks = torch.full((2, 32, 32), 255)
    if weights:
        masks[:, :4] = 2  # of no weight
    losses = model(torch.rand(2, 3, 32, 32), masks)
    assert losses["loss"].item() == 0 and all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_upernet__trains_on_one_image(norm):
    assert [group_norm(n).num_groups for n in (512, 48, 8, 7)] == [32, 8, 4, 1]  # two channels at least in a group
    model = small("upernet", norm=norm).train()
    pooled = model.decoder.decoder.psp.blocks[0][1][1]  # the norm of what is pooled to a single position
    losses = model(torch.rand(1, 3, 64, 64), torch.randint(3, (1, 64, 64)))
    assert all(loss.isfinite() for loss in losses.values())
    if norm == "batch":
        assert pooled.num_batches_tracked == 0  # left alone
        model(torch.rand(2, 3, 64, 64), torch.randint(3, (2, 64, 64)))
        assert pooled.num_batches_tracked == 1


def test_branches__are_summed_and_enlarged_cells_stay_where_they_are():
    decoder = SemanticFPN((4, 6, 8, 10), 16, 8, group_norm)
    maps = [torch.rand(1, width, size, size + 1) for width, size in zip((4, 6, 8, 10), (9, 5, 3, 2), strict=True)]
    maps[2], maps[3] = maps[2][..., :3], maps[3][..., :2]
    levels = list(decoder.pyramid({str(i): x for i, x in enumerate(maps)}).values())
    total = decoder.branches[0][0](levels[0])
    for level in (1, 2, 3):
        x = levels[level]
        for step, convolution in enumerate(decoder.branches[level]):
            x = F.interpolate(convolution(x), scale_factor=2, mode="bilinear", align_corners=False)
            x = x[..., : maps[level - step - 1].shape[-2], : maps[level - step - 1].shape[-1]]
        total = total + x
    torch.testing.assert_close(decoder(maps), total)
    assert [len(branch) for branch in decoder.branches] == [1, 1, 2, 3]
    ramp = torch.arange(5.0).expand(1, 1, 5, 5) * 4 + 1.5  # of each cell of four pixels the middle, counted from 0
    columns = enlarged(ramp, 4, torch.zeros(1, 1, 17, 18))[0, 0, 8]
    torch.testing.assert_close(columns[2:], torch.arange(2.0, 18.0))  # before the first middle it is flat


@pytest.mark.parametrize("name", NAMES)
def test_logits__of_the_images_size_and_about_the_same_in_bfloat16_and_channels_last(name):
    model, images = small(name, norm="group").eval(), torch.rand(2, 3, 64, 64)
    for size in ((65, 47), (33, 130), (20, 17)):
        assert model(torch.rand(2, 3, *size)).shape == (2, 3, *size)
    logits = model(images)
    last = dict(memory_format=torch.channels_last)
    found = copy.deepcopy(model).to(**last)(images.contiguous(**last))
    torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        low = model(images)
    assert (low.float() - logits).abs().max() < 0.05 * logits.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_export_and_compile__whole_graph_gives_the_same(name):
    model, images, masks = small(name).eval(), torch.rand(2, 3, 40, 56), torch.randint(3, (2, 40, 56))
    program = torch.export.export(model, (images,))
    torch.testing.assert_close(program.module()(images), model(images))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), model(images), atol=1e-4, rtol=1e-4)
    model.train()
    assert sum(compiled(images, masks).values()).isfinite()
