"""Augmentation by a recipe: transforms of an image; erasing, mixing and masking of a batch."""

from collections.abc import Mapping
from typing import Any

import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from ..data.loading import Transforms
from ..data.normalising import per_channel
from .recipes import Recipe

LARGEST = 224  # pixels that are chosen for images of unknown size


def transforms_of(recipe: Recipe, config: Mapping[str, Any], channels: int) -> Transforms:
    """How images reach a model; its own description (`pretrained_cfg`) decides what the recipe does not."""
    mean, std = (per_channel(config[key], channels) for key in ("mean", "std"))
    interpolation = recipe.interpolation or config.get("interpolation") or "bicubic"
    augmentation = {name: getattr(recipe, name) for name in ("scale", "ratio", "hflip", "color_jitter", "auto_augment")}
    size = recipe.image_size or LARGEST
    # Small images are seen whole: they show one object and no rim
    crop = recipe.crop_pct or (config.get("crop_pct") or 0.875 if size > 96 else 1.0)
    return Transforms(size, channels, mean, std, interpolation, crop, augmentation)


class PatchMasking:
    """Masking of normalised images (B, C, H, W): a share of the patches of each, chosen by chance, gets the value 0.

    Args:
        shares: Least and greatest share; every image has one of its own, drawn between them.
        patch: Pixels of a patch's side; the patches at the right and lower rim are cut where it does not divide.
    """

    def __init__(self, shares: tuple[float, float], patch: int):
        self.shares, self.patch = shares, patch

    def __call__(self, images: Tensor) -> Tensor:
        B, _, H, W = images.shape
        rows, columns = -(-H // self.patch), -(-W // self.patch)
        # drawn on the CPU, so that a seed masks the same patches on any device
        counts = (torch.empty(B, 1).uniform_(*self.shares) * (rows * columns)).round()
        hidden = torch.rand(B, rows * columns).argsort(1).argsort(1) < counts
        hidden = hidden.view(B, 1, rows, columns).to(images.device)
        for axis in (2, 3):
            hidden = hidden.repeat_interleave(self.patch, axis)
        return images.clone().masked_fill_(hidden[..., :H, :W], 0.0)  # a clone keeps its memory format


class BatchAugmentation:
    """Erasing, mixing and masking, on the device, of the normalised `images` of a pass, which mixing pairs."""

    def __init__(self, recipe: Recipe, classes: int, images: int, device: torch.device):
        self.erase = RandomErasing(recipe.erasing, mode="pixel", device=device) if recipe.erasing else None
        self.mixes, self.off_epoch = bool(recipe.mixup or recipe.cutmix), recipe.mixup_off_epoch
        if self.mixes and images % 2:
            what = f"mixup and cutmix pair the images of a pass, of which there are {images}"
            raise ValueError(f"{what}; take an even number")
        rates: dict[str, Any] = dict(prob=recipe.mixup_prob, switch_prob=recipe.mixup_switch)
        rates |= dict(label_smoothing=recipe.smoothing, num_classes=classes)
        self.mix = Mixup(recipe.mixup, recipe.cutmix, **rates) if self.mixes else None
        self.mask = PatchMasking(recipe.mask_ratio, recipe.mask_patch) if any(recipe.mask_ratio) else None

    def begin_epoch(self, epoch: int) -> None:
        if self.mix is not None and self.off_epoch:
            self.mix.mixup_enabled = epoch < self.off_epoch

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) and labels (B,) -> images, and labels or, where they are mixed, targets (B, classes)."""
        if self.erase is not None:
            images = self.erase(images)
        images, target = (images, labels) if self.mix is None else self.mix(images, labels)
        return images if self.mask is None else self.mask(images), target  # last, or mixing would show what is hidden
