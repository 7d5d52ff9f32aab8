"""Batches: which images, in which order, augmented how; and images that cannot be read."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from broadsight.data import loading
from broadsight.data.decoding import decode
from broadsight.data.loading import BoundedResize, EvalOrder, SourceDataset, TrainOrder, Transforms
from broadsight.data.seeds import seed_transforms
from broadsight.data.sources import resolve
from tests.refusals import refused

from ..training.small_runs import fill, png
from .reading import Shades

AUGMENTED = dict(scale=(0.3, 1.0), hflip=0.5, color_jitter=0.4, auto_augment="rand-m9-mstd0.5-inc1")


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def indices(order: TrainOrder | EvalOrder) -> list[int]:
    return [index for batch in order for _, _, index in batch]


def test_train_order__is_a_permutation_and_another_each_epoch_with_keys_of_epoch_and_place():
    order = TrainOrder(Shades(20), 4, seed=1)
    first = indices(order)
    assert sorted(first) == list(range(20)) and first != list(range(20))
    assert indices(order) == first
    order.start(1)
    assert sorted(indices(order)) == list(range(20)) and indices(order) != first
    assert indices(TrainOrder(Shades(20), 4, seed=2)) != first
    order = TrainOrder(Shades(10), 4)
    order.start(3)
    batches = list(order)
    assert order.updates == len(order) == len(batches) == 2  # two images wait for another epoch
    assert [key[:2] for batch in batches for key in batch] == [(3, place) for place in range(8)]
    source = Shades(6)
    source.shuffled = lambda generator: torch.arange(5, -1, -1)  # a source that knows better
    assert indices(TrainOrder(source, 2)) == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_train_order__an_update_has_the_same_images_for_any_number_of_processes(processes, accumulate):
    source, among = Shades(50), dict(processes=processes, accumulate=accumulate)
    whole = [set(batch) for batch in TrainOrder(source, 8, seed=5)]
    shares = [list(TrainOrder(source, 8, seed=5, rank=rank, **among)) for rank in range(processes)]
    assert {len(share) for share in shares} == {6 * accumulate}
    assert {len(batch) for share in shares for batch in share} == {8 // processes // accumulate}
    for update, expected in enumerate(whole):
        passes = slice(update * accumulate, (update + 1) * accumulate)
        together = [key for share in shares for batch in share[passes] for key in batch]
        assert len(together) == 8 and set(together) == expected


@pytest.mark.parametrize("accumulate", [1, 2])
def test_train_order__starts_anywhere(accumulate):
    order = TrainOrder(Shades(22), 4, accumulate=accumulate)
    order.start(2)
    whole = list(order)
    for first in range(6):
        order.start(2, first)
        assert list(order) == whole[first * accumulate :] and len(order) == len(whole) - first * accumulate


@pytest.mark.parametrize("repeats", [2, 3])
def test_train_order__repeats(repeats):
    order = TrainOrder(Shades(20), 5, repeats=repeats)
    found = indices(order)
    assert len(found) == 20  # the epoch keeps its length
    runs = [found[start : start + repeats] for start in range(0, 20, repeats)]
    assert all(len(set(run)) == 1 for run in runs) and len(set(found)) == len(runs) == -(-20 // repeats)
    # each at a place of its own, hence with another augmentation
    assert [place for batch in order for _, place, _ in batch] == list(range(20))
    shares = [indices(TrainOrder(Shades(12), 4, repeats=2, rank=rank, processes=2)) for rank in range(2)]
    assert shares[0] == shares[1] and len(set(shares[0])) == 6


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (21, {}, "batch_size=21 does not fit: there are 20 training images; take --set batch_size=20"),
        (21, dict(processes=3), "batch_size=21 does not fit: there are 20 training images; take --set batch_size=18"),
        (5, dict(processes=2), "batch_size=5 does not divide among 2 processes; take batch_size=4"),
        (9, dict(processes=2, accumulate=2), "among 2 processes with accumulate=2; take batch_size=8"),
        (1, dict(processes=4), "take batch_size=4"),
    ],
)
def test_train_order__refuses_a_batch(batch, options, message):
    refused(message, TrainOrder, Shades(20), batch, **options)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_eval_order__every_image_once(processes):
    orders = [EvalOrder(Shades(11), 4, rank=rank, processes=processes) for rank in range(processes)]
    assert [len(order) for order in orders] == [len(list(order)) for order in orders]
    assert sorted(index for order in orders for index in indices(order)) == list(range(11))
    assert all(len(batch) <= 4 for order in orders for batch in order)


def test_images__bytes_labels_and_keys():
    batch = SourceDataset(Shades(9), pixels).__getitems__([(0, 5, 7), (0, 6, 2)])
    assert batch.images.dtype == torch.uint8 and batch.images.shape == (2, 3, 3, 4)
    assert batch.images.flatten(1).unique(dim=1).tolist() == [[7], [2]]
    assert batch.labels.tolist() == [1, 0] and batch.keys == ((0, 5, 7), (0, 6, 2))
    assert (batch.skipped, batch.failure) == ((), "")


def test_images__depend_on_the_key_alone():
    def noise(image: Image.Image) -> torch.Tensor:
        return (255 * torch.rand(3, 2, 2)).byte()

    images = SourceDataset(Shades(9), noise, seed=3, training=True)
    first, second = images.__getitems__([(1, 4, 0), (1, 5, 0)]).images
    assert not torch.equal(first, second)
    torch.rand(7)
    assert torch.equal(images.__getitems__([(1, 5, 0), (1, 4, 0)]).images, torch.stack([second, first]))
    assert not torch.equal(images.__getitems__([(2, 4, 0)]).images[0], first)
    other = SourceDataset(Shades(9), noise, seed=4, training=True)
    assert not torch.equal(other.__getitems__([(1, 4, 0)]).images[0], first)


def test_images__the_same_for_any_number_of_workers(tmp_path):
    source = resolve(str(fill(tmp_path, a=5, b=5))).train
    transform = Transforms(16, augmentation=AUGMENTED).build(True)
    found = []
    for workers in (0, 1, 2):
        order = TrainOrder(source, 4, seed=2)
        loader = loading.load(SourceDataset(source, transform, seed=2, training=True), order, workers=workers)
        epochs = []
        for epoch in (0, 1):
            order.start(epoch, epoch)
            before = torch.get_rng_state()
            epochs += list(loader)
            if workers:  # what workers draw is not missing here
                assert torch.equal(before, torch.get_rng_state())
        found.append(epochs)
    assert [len(batches) for batches in found] == [3, 3, 3]
    for batches in found[1:]:
        for batch, other in zip(found[0], batches, strict=True):
            assert batch.keys == other.keys and torch.equal(batch.labels, other.labels)
            assert torch.equal(batch.images, other.images)


def test_transforms__evaluation_crops_the_middle():
    image = np.zeros((40, 40, 3), np.uint8)
    image[4:36, 4:36] = 200
    whole = Transforms(20, interpolation="nearest", crop_pct=1.0).build(False)(Image.fromarray(image))
    middle = Transforms(20, interpolation="nearest", crop_pct=0.8).build(False)(Image.fromarray(image))
    assert whole.shape == middle.shape == (3, 20, 20) and np.asarray(whole).dtype == np.uint8
    assert (np.asarray(whole)[:, 0] == 0).all() and (np.asarray(middle)[:, 1:-1, 1:-1] == 200).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_transforms__training(channels):
    transform = Transforms(16, channels, (0.5,) * channels, (0.5,) * channels, augmentation=AUGMENTED).build(True)
    for _ in range(50):  # so that every operation of the augmentation has its turn
        assert transform(decode(png(10, 200, 30), channels)).shape == (channels, 16, 16)


@pytest.mark.parametrize(
    ("policy", "draws"),
    [("rand-m9-mstd0.5-inc1", 1000), ("rand-m20-mstd0.5-inc1", 100), ("rand-m5", 100), ("original", 100)],
)
def test_transforms__published_augmentation_never_fails(policy, draws):
    """At its strongest timm's posterising keeps no bit, which Pillow refuses from version 13 on."""
    transform = Transforms(8, augmentation=dict(auto_augment=policy)).build(True)
    seed_transforms(0)
    image = decode(png(10, 200, 30))
    for _ in range(draws):
        transform(image)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest", "random"])
@pytest.mark.parametrize("training", [True, False])
def test_transforms__every_interpolation_of_a_recipe(interpolation, training):
    transform = Transforms(16, interpolation=interpolation).build(training)
    assert transform(decode(png(1, 2, 3))).shape == (3, 16, 16)


def noisy(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width + height).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("mode", ["bicubic", "bilinear", "lanczos"])
@pytest.mark.parametrize("size", [(300, 7), (5, 401), (640, 481), (97, 97), (1, 60), (63, 2)])
@pytest.mark.parametrize("side, crop", [(64, 56), (56, 56), (40, 56)])  # the last is padded
def test_bounded_resize__cropped_first_is_as_resized_first(monkeypatch, mode, size, side, crop):
    resize, middle = Resize(side, InterpolationMode(mode)), CenterCrop(crop)
    image = noisy(*size)
    usual = np.asarray(middle(resize(image))).astype(int)
    monkeypatch.setattr(loading, "MOST_PIXELS", 0)
    monkeypatch.setattr(loading, "MOST_CROPS", 0)
    part = BoundedResize(resize, crop)(image)
    assert max(part.size) <= crop
    found = np.asarray(middle(part)).astype(int)
    assert found.shape == usual.shape == (crop, crop, 3)
    assert abs(found - usual).max() <= 1 and (found != usual).mean() < 0.03


def test_bounded_resize__ordinary_images_as_ever():
    resize = Resize(256, InterpolationMode.BICUBIC)
    for image in (noisy(*size) for size in ((500, 375), (3000, 1000), (32, 32), (4000, 30), (1, 200))):
        assert np.array_equal(np.asarray(BoundedResize(resize, 224)(image)), np.asarray(resize(image)))


@pytest.mark.parametrize("size", [(8000, 1), (1, 8000), (200_000, 1), (1, 3_000_000), (170_000, 3)])
@pytest.mark.parametrize("crop_pct", [0.875, 1.0, 1e-4])
def test_transforms__narrow_images_take_no_more_memory_than_others(monkeypatch, size, crop_pct):
    largest, whole = [], Image.Image.resize

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


def test_unreadable__training_takes_the_next_and_evaluation_leaves_it_out():
    images = SourceDataset(Shades(9, broken=(3, 4, 8)), pixels, training=True)
    batch = images.__getitems__([(0, 0, 3), (0, 1, 1), (0, 2, 8)])
    assert batch.images[:, 0, 0, 0].tolist() == [5, 1, 0] and batch.labels.tolist() == [1, 1, 0]
    assert [name for name, _ in batch.skipped] == ["3.png", "4.png", "8.png"]
    assert all("not an image" in reason for _, reason in batch.skipped)
    images = SourceDataset(Shades(9, broken=(3, 4)), pixels)
    batch = images.__getitems__([(0, index, index) for index in (2, 3, 4, 5)])
    assert batch.images[:, 0, 0, 0].tolist() == [2, 5] and batch.labels.tolist() == [0, 1]
    assert [key[2] for key in batch.keys] == [2, 5] and [name for name, _ in batch.skipped] == ["3.png", "4.png"]
    nothing = images.__getitems__([(0, 3, 3)])
    assert [len(nothing.images), len(nothing.labels), len(nothing.skipped), nothing.failure] == [0, 0, 1, ""]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable__strict(training, workers):
    source = Shades(9, broken=(3,))
    images = SourceDataset(source, pixels, training=training, strict=True)
    loader = loading.load(images, EvalOrder(source, 4), workers=workers)
    failures = [batch.failure for batch in loader]  # not an error, which would leave a worker with a page of text
    assert re.match(r"3.png cannot be read \(not an image.*without --strict it would be skipped$", failures[0])
    assert failures[1:] == ["", ""]


@pytest.mark.parametrize(
    "error, reason",
    [
        (MemoryError(), "out of memory while it is prepared; make the image smaller"),
        (OverflowError("x"), "numbers overflow while it is prepared; make the image smaller"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory while it is prepared"),
        (RuntimeError("shapes differ"), "cannot be prepared (RuntimeError: shapes differ)"),
        (ZeroDivisionError("division by zero"), "cannot be prepared (ZeroDivisionError: division by zero)"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_unreadable__a_transform_that_fails(training, error, reason):
    """One image is skipped, counted and named, and nothing else happens."""

    def fail(image: Image.Image) -> torch.Tensor:
        if image.getpixel((0, 0)) == (3, 3, 3):
            raise error
        return pixels(image)

    batch = SourceDataset(Shades(9), fail, training=training).__getitems__([(0, index, index) for index in (2, 3, 5)])
    assert batch.failure == "" and batch.images[:, 0, 0, 0].tolist() == ([2, 4, 5] if training else [2, 5])
    assert [name for name, _ in batch.skipped] == ["3.png"] and batch.skipped[0][1].startswith(reason)


def test_unreadable__fifty_in_a_row():
    images = SourceDataset(Shades(60, broken=tuple(range(2, 52))), pixels, training=True)
    failure = images.__getitems__([(0, 0, 2)]).failure
    assert failure.startswith("50 images in a row cannot be read, last 51.png: not an image")
    assert images.__getitems__([(0, 0, 3)]).images[0, 0, 0, 0] == 52
    # with fewer than fifty there is no use in asking again
    batch = SourceDataset(Shades(3, broken=(0, 1, 2)), pixels, training=True).__getitems__([(0, 0, 1)])
    assert re.match(r"[1-3] images", batch.failure), f"there are three images: {batch.failure}"


def test_unreadable__files(tmp_path):
    folder, whole = fill(tmp_path, a=2, b=2) / "a", png(1, 2, 3, size=64)
    broken = {"empty.png": b"", "text.jpg": b"not an image", "cut.png": whole[: len(whole) // 2]}
    broken["damaged.png"] = whole[:40] + b"\xff" * 20 + whole[60:]
    for name, content in broken.items():
        (folder / name).write_bytes(content)
    (folder / "gone.png").symlink_to(folder / "nowhere.png")
    splits = resolve(str(tmp_path), val=str(tmp_path))
    images = SourceDataset(splits.val, Transforms(16).build(False))
    batches = list(loading.load(images, EvalOrder(splits.val, 4)))
    assert sum(len(batch.labels) for batch in batches) == 4
    skipped = dict(pair for batch in batches for pair in batch.skipped)
    assert skipped.keys() == {f"a/{name}" for name in broken}
    assert all(reason and "\n" not in reason for reason in skipped.values())
    assert skipped["a/empty.png"] == "empty file"  # its name stands beside it already


def test_workers__leave_a_core_to_training(monkeypatch):
    monkeypatch.setattr(loading.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert (loading.default_workers(), loading.default_workers(2), loading.default_workers(6)) == (5, 2, 1)
    monkeypatch.setattr(loading.os, "sched_getaffinity", lambda _: set(range(64)))
    assert loading.default_workers() == 8


def test_train_order__epochs_of_so_many_updates_go_through_pass_after_pass():
    """Three updates of four out of seven images: epochs begin where the last one ended, in orders of their own."""
    order, one = TrainOrder(Shades(7), 4, seed=3, updates=3), TrainOrder(Shades(7), 7, seed=3)
    whole, seen = [], []
    for number in range(4):
        one.start(number)
        whole += one.order().tolist()
    for epoch in range(2):
        order.start(epoch)
        assert len(order) == order.updates == 3
        seen += indices(order)
    assert seen == whole[:24]
    order.start(1, first=2)
    assert indices(order) == whole[20:24]
    few = TrainOrder(Shades(2), 4, updates=1)  # more than there are: they come again
    assert sorted(indices(few)) == [0, 0, 1, 1]
