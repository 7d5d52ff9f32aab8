"""What holds for every detector: it trains as a whole, and needs neither objects nor colours."""

import pytest
import torch

from .detectors import KINDS, TWO_STAGE, small, target

VARIANTS = {name: (name, {}) for name in KINDS} | {
    "cascade": ("cascade", dict(box_head="conv")),
    "cascade, one box for all classes": ("cascade", dict(class_agnostic=True, masks_on="last")),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_train_step__reaches_every_parameter(name):
    kind, options = VARIANTS[name]
    model = small(kind, **options).train()
    assert model.task == KINDS[kind].task
    images = [torch.rand(3, 64, 80), torch.rand(3, 70, 50)]
    targets = [target(64, 80, [4, 6, 30, 40], [20, 20, 50, 60], labels=[1, 3]), target(70, 50, labels=[])]
    losses = model(images, targets)
    assert all(loss.ndim == 0 and loss.isfinite() and (loss > 0 or kind == "cascade") for loss in losses.values())
    if kind == "cascade":
        assert ("loss_mask_1" in losses) == ("masks_on" not in options) and "loss_mask_3" in losses
    sum(losses.values()).backward()
    assert [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("kind", KINDS)
def test_image__alone_small_gray_without_objects(kind):
    """One image of one class and channel: a map of one position, and nothing to find."""
    options = dict(box_score_thresh=0.0) if kind in TWO_STAGE else {}
    model = small(kind, num_classes=1, in_chans=1, **options).train()
    losses = model([torch.rand(1, 40, 64)], [target(40, 64, labels=[])])
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=kind == "cascade"):
        (found,) = model.eval()([torch.rand(1, 40, 64)])
    assert {1} >= set(found["labels"].tolist()) >= ({1} if kind in TWO_STAGE else set())
    if kind == "cascade":
        assert found["masks"].shape[1:] == (1, 40, 64)
        assert {found[name].dtype for name in ("boxes", "scores", "masks")} == {torch.float32}
