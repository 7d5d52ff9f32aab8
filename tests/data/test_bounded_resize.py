"""Resizing of extreme shapes: the same pixels as ever, of which no more are made than are wanted."""

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from broadsight.data import loading
from broadsight.data.loading import BoundedResize, Transforms


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    values = np.random.default_rng(width + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear", "lanczos"])
@pytest.mark.parametrize("size", [(300, 7), (5, 401), (640, 481), (97, 97), (1, 60), (63, 2)])
@pytest.mark.parametrize("side, crop", [(64, 56), (56, 56), (40, 56)])  # the last is padded
def test_cropped_first_is_as_resized_first(monkeypatch, mode, size, side, crop):
    resize, middle = Resize(side, InterpolationMode(mode)), CenterCrop(crop)
    image = noise(*size)
    usual = np.asarray(middle(resize(image))).astype(int)
    monkeypatch.setattr(loading, "MOST_PIXELS", 0)
    monkeypatch.setattr(loading, "MOST_CROPS", 0)
    part = BoundedResize(resize, crop)(image)
    assert max(part.size) <= crop
    found = np.asarray(middle(part)).astype(int)
    assert found.shape == usual.shape == (crop, crop, 3)
    assert abs(found - usual).max() <= 1 and (found != usual).mean() < 0.03


@pytest.mark.parametrize("size", [(500, 375), (3000, 1000), (32, 32), (4000, 30), (1, 200)])
def test_ordinary_images_are_resized_as_ever(size):
    image, resize = noise(*size), Resize(256, InterpolationMode.BICUBIC)
    assert np.array_equal(np.asarray(BoundedResize(resize, 224)(image)), np.asarray(resize(image)))


@pytest.mark.parametrize("size", [(8000, 1), (1, 8000), (200_000, 1), (1, 3_000_000), (170_000, 3)])
@pytest.mark.parametrize("crop_pct", [0.875, 1.0, 1e-4])
def test_transforms__narrow_images_take_no_more_memory_than_others(monkeypatch, size, crop_pct):
    largest = []
    whole = Image.Image.resize

    def counted(self, size, *arguments, **options):
        largest.append(size[0] * size[1])
        return whole(self, size, *arguments, **options)

    monkeypatch.setattr(Image.Image, "resize", counted)
    for training in (False, True):
        image = Transforms(224, crop_pct=crop_pct).build(training)(Image.new("RGB", size, (10, 200, 30)))
        assert tuple(image.shape) == (3, 224, 224)
        if not training and crop_pct <= 1:
            assert [int(channel.float().mean().round()) for channel in image] == [10, 200, 30]
    assert largest and max(largest) <= loading.MOST_PIXELS
