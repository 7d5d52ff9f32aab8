"""What happens to training images: how a recipe has each of them transformed, and what is done to a batch."""

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
SMALL = 96  # pixels of images that are whole objects already; to cut their rim off would lose some


def transforms_of(recipe: Recipe, config: Mapping[str, Any], channels: int) -> Transforms:
    """How images reach a model, by its own description (`pretrained_cfg`) where the recipe is silent."""
    mean, std = (per_channel(config[key], channels) for key in ("mean", "std"))
    interpolation = recipe.interpolation or config.get("interpolation") or "bicubic"
    augmentation = dict(
        scale=recipe.scale,
        ratio=recipe.ratio,
        hflip=recipe.hflip,
        color_jitter=recipe.color_jitter,
        auto_augment=recipe.auto_augment,
    )
    crop = recipe.crop_pct or config.get("crop_pct") or 0.875
    crop = crop if recipe.crop_pct or (recipe.image_size or LARGEST) > SMALL else 1.0
    return Transforms(recipe.image_size or LARGEST, channels, mean, std, interpolation, crop, augmentation)


class BatchAugmentation:
    """Erasing and mixing, on the device, of images that are normalised already.

    Args:
        classes: How many.
        images: Of a pass; mixing pairs them.
    """

    def __init__(self, recipe: Recipe, classes: int, images: int, device: torch.device):
        self.erase = RandomErasing(recipe.erasing, mode="pixel", device=device) if recipe.erasing else None
        self.mix = self._mixing(recipe, classes, images) if recipe.mixup or recipe.cutmix else None
        self.off_epoch = recipe.mixup_off_epoch

    @staticmethod
    def _mixing(recipe: Recipe, classes: int, images: int) -> Mixup:
        if images % 2:
            raise ValueError(
                f"mixup and cutmix pair the images of a pass, of which there are {images}; take an even number"
            )
        return Mixup(
            mixup_alpha=recipe.mixup,
            cutmix_alpha=recipe.cutmix,
            prob=recipe.mixup_prob,
            switch_prob=recipe.mixup_switch,
            label_smoothing=recipe.smoothing,
            num_classes=classes,
        )

    @property
    def mixes(self) -> bool:
        return self.mix is not None

    def begin_epoch(self, epoch: int) -> None:
        if self.mix is not None and self.off_epoch:
            self.mix.mixup_enabled = epoch < self.off_epoch

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) and labels (B,) -> images, and labels or, where they are mixed, targets (B, classes)."""
        if self.erase is not None:
            images = self.erase(images)
        return (images, labels) if self.mix is None else self.mix(images, labels)
