"""Masked images: exactly that share of patches, where they lie, what they hold, and who sees them."""

import pytest
import torch
from torch import Tensor

from broadsight.training.augmentation import BatchAugmentation, PatchMasking
from broadsight.training.recipes import Recipe

CPU = torch.device("cpu")


def hidden(images: Tensor) -> Tensor:
    """(B, H, W), where all channels of images that hold no 0 are 0."""
    assert torch.equal((images == 0).all(1), (images == 0).any(1))
    return (images == 0).all(1)


@pytest.mark.parametrize(("size", "patch", "share", "count"), [(32, 8, 0.25, 4), (28, 14, 0.5, 2), (224, 14, 0.3, 77)])
def test_mask__exactly_that_share_of_whole_patches(size, patch, share, count):
    torch.manual_seed(0)
    images = torch.rand(6, 3, size, size) + 1
    masked = PatchMasking((share, share), patch)(images)
    cells = hidden(masked).unflatten(2, (-1, patch)).unflatten(1, (-1, patch))  # B rows patch columns patch
    shares = cells.float().mean((2, 4))
    assert ((shares == 0) | (shares == 1)).all()  # whole patches
    assert shares.flatten(1).sum(1).tolist() == [count] * 6
    assert len({tuple(one.flatten().tolist()) for one in shares}) > 1  # each image others
    kept = ~hidden(masked)[:, None].expand_as(images)
    assert torch.equal(masked[kept], images[kept])


def test_mask__shares_between_two_and_patches_cut_at_the_rim():
    torch.manual_seed(0)
    images = torch.ones(400, 1, 20, 30)
    counts = hidden(PatchMasking((0.0, 1.0), 10)(images)).flatten(1).sum(1) // 100
    assert set(counts.tolist()) == set(range(7))  # of six patches: from none to all
    assert counts.float().mean() == pytest.approx(3, abs=0.3)
    some = hidden(PatchMasking((0.2, 0.6), 10)(images)).flatten(1).sum(1) // 100
    assert set(some.tolist()) == {1, 2, 3, 4}  # 1.2 to 3.6 of them, rounded
    areas = hidden(PatchMasking((1 / 4, 1 / 4), 16)(images)).flatten(1).sum(1)  # 16 and 4 rows, 16 and 14 columns
    assert set(areas.tolist()) == {16 * 16, 16 * 14, 4 * 16, 4 * 14}
    for share, all_or_none in ((0.0, False), (1.0, True)):
        assert (hidden(PatchMasking((share, share), 7)(images)) == all_or_none).all()


def test_mask__follows_the_seed_and_keeps_type_and_layout():
    images = (torch.rand(4, 3, 32, 32) + 1).to(torch.bfloat16, memory_format=torch.channels_last)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(PatchMasking((0.1, 0.9), 8)(images))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert found[0].dtype == torch.bfloat16 and found[0].is_contiguous(memory_format=torch.channels_last)


def test_mask__comes_after_mixing_and_draws_nothing_where_it_is_off():
    images, labels = torch.rand(4, 3, 32, 32) + 1, torch.tensor([0, 1, 1, 0])
    augment = BatchAugmentation(Recipe(mixup=0.8, mask_ratio=(0.5, 0.5), mask_patch=8), 2, 4, CPU)
    masked, target = augment(images, labels)
    assert hidden(masked).flatten(1).sum(1).tolist() == [8 * 64] * 4 and target.shape == (4, 2)
    state = torch.get_rng_state()
    same, labels_too = BatchAugmentation(Recipe(), 2, 4, CPU)(images, labels)
    assert same is images and labels_too is labels and torch.equal(torch.get_rng_state(), state)
