"""Batches of dense data: repeatable, whole when they leave a worker, and plain about what cannot be read."""

import pickle

import pytest
import torch
from PIL import Image

from broadsight.data import loading
from broadsight.data.decoding import UnreadableImage
from broadsight.data.dense.loading import DenseBatch, DenseDataset
from broadsight.data.dense.transforms import DenseTransforms
from broadsight.data.loading import EvalOrder, TrainOrder, close, load
from broadsight.data.scenes import Scenes
from broadsight.data.scenes.targets import SceneMasks, SceneObjects


class Numbered:
    """Images of one colour and of their own size; some cannot be read, the labels of some are wrong."""

    classes = ("thing",)

    def __init__(self, count: int, broken: tuple[int, ...] = (), wrong: dict[int, str] | None = None):
        self.count, self.broken, self.wrong = count, broken, wrong or {}

    def __len__(self) -> int:
        return self.count

    def name(self, i: int) -> str:
        return f"{i}.png"

    def __getitem__(self, i: int):
        if i in self.broken:
            raise UnreadableImage(f"{i}.png: not an image")
        if i in self.wrong:
            raise ValueError(self.wrong[i])
        return Image.new("L", (4 + i, 4), i), torch.full((4, 4 + i), i)


@pytest.mark.parametrize("where", ["source", "transform"])
def test_too_large__is_skipped_and_named(where, monkeypatch):
    """A mask for each of many objects in a large image, or what becomes of it."""

    def fail(*_):
        raise MemoryError

    source = Numbered(4)
    if where == "source":
        monkeypatch.setattr(Numbered, "__getitem__", lambda self, i: fail() if i == 1 else (Image.new("L", (4, 4)), i))
    images = DenseDataset(source, lambda image, target: fail() if image.width == 5 else (image, target))
    batch = images.__getitems__([(0, i, i) for i in range(4)])
    assert batch.failure == "" and [key[2] for key in batch.keys] == [0, 2, 3]
    assert batch.skipped == (("1.png", "out of memory while it is prepared; make the image smaller"),)


def numbers(pixels, target):
    return torch.full((1, 1, 1), pixels.getpixel((0, 0)), dtype=torch.uint8), target


def test_batch__images_keep_their_sizes_and_unreadable_ones_are_replaced_or_left_out():
    images = DenseDataset(Numbered(5), DenseTransforms("segment", 8).build(False))
    batch = images.__getitems__([(0, 0, 3), (0, 1, 1)])
    assert [tuple(image.shape) for image in batch.images] == [(1, 4, 7), (1, 4, 5)]
    assert [target.unique().tolist() for target in batch.targets] == [[3], [1]]
    assert batch.keys == ((0, 0, 3), (0, 1, 1)) and batch.skipped == () and batch.failure == ""
    assert len(images) == 5
    source = Numbered(5, broken=(1, 2))
    keys = [(0, 0, 1), (0, 1, 4)]
    learned = DenseDataset(source, numbers, training=True).__getitems__(keys)
    assert [int(image) for image in learned.images] == [3, 4] and learned.keys == ((0, 0, 3), (0, 1, 4))
    assert learned.skipped == (("1.png", "not an image"), ("2.png", "not an image"))
    judged = DenseDataset(source, numbers).__getitems__(keys)
    assert [int(image) for image in judged.images] == [4] and judged.keys == ((0, 1, 4),)
    assert judged.skipped == (("1.png", "not an image"),)
    nothing = DenseDataset(source, numbers).__getitems__([(0, 0, 2)])
    assert (nothing.images, nothing.targets, nothing.keys, nothing.failure) == ([], [], (), "")


@pytest.mark.parametrize("training", [False, True])
def test_failure__wrong_labels_and_strict_are_never_skipped_nor_too_many_in_a_row(training, monkeypatch):
    source = Numbered(3, wrong={0: "masks/0.png holds 9, which is none of the classes", 1: "too large"})
    images = DenseDataset(source, numbers, training=training)
    assert images.__getitems__([(0, 0, 0)]).failure == "masks/0.png holds 9, which is none of the classes"
    assert images.__getitems__([(0, 1, 2), (0, 0, 1)]).failure == "1.png: too large"
    batch = DenseDataset(Numbered(3, (1,)), numbers, training=training, strict=True).__getitems__([(0, 0, 1)])
    assert batch.failure == "1.png cannot be read (not an image); without --strict it would be skipped"
    monkeypatch.setattr(loading, "IN_A_ROW", 3)
    batch = DenseDataset(Numbered(9, tuple(range(9))), numbers, training=True).__getitems__([(0, 0, 7)])
    assert batch.failure == "3 images in a row cannot be read, last 0.png: not an image"


def loaded(images: DenseDataset, order, workers: int = 1) -> list[DenseBatch]:
    loader = load(images, order, workers=workers)
    try:
        return list(loader)
    finally:
        close(loader)


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return all(map(same, one, other)) if isinstance(one, list) else one == other


def test_batch__travels_as_one_block():
    images = [torch.arange(30, dtype=torch.uint8).reshape(3, 2, 5)[:, :, ::2], torch.zeros(1, 0, 3, dtype=torch.uint8)]
    targets = [
        dict(boxes=torch.rand(1, 4), labels=torch.tensor([7]), image_id=3, meta=dict(box=torch.ones(4).double())),
        dict(boxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.int64), image_id="x", flag=torch.tensor(True)),
    ]
    batch = DenseBatch(images, targets, ((0, 1, 2), (0, 2, 5)), (("a", "b"),), "why")
    back = pickle.loads(pickle.dumps(batch))
    assert type(back) is DenseBatch
    assert same(back.images, images) and same(back.targets, targets)
    assert (back.keys, back.skipped, back.failure) == (batch.keys, batch.skipped, "why")
    storages = {tensor.untyped_storage().data_ptr() for tensor in (back.images[0], back.targets[0]["labels"])}
    assert len(storages) == 1


@pytest.mark.parametrize("kind", [SceneObjects, SceneMasks])
def test_load__is_the_same_with_workers_and_after_a_break(kind):
    scenes = kind(Scenes(8, size=32))
    task = "instances" if kind is SceneObjects else "segment"
    transform = DenseTransforms(task, 32, resize=(0.5, 1.5), crop="random", color_jitter=0.3).build(True)

    def batches(workers: int, epoch: int, first: int = 0, seed: int = 5) -> list[DenseBatch]:
        order = TrainOrder(scenes, 4, seed=seed)
        order.start(epoch, first)
        return loaded(DenseDataset(scenes, transform, seed=seed, training=True), order, workers)

    plain, workers, resumed, other = batches(0, 1), batches(1, 1), batches(0, 1, first=1), batches(0, 2)
    assert len(plain) == 2
    for one, two in zip(plain, workers, strict=True):
        assert one.keys == two.keys and same(one.images, two.images) and same(one.targets, two.targets)
    assert same(resumed[0].images, plain[1].images) and same(resumed[0].targets, plain[1].targets)
    assert not any(a.shape == b.shape and torch.equal(a, b) for a in plain[0].images for b in other[0].images)


def test_load__evaluation_sees_every_image_once():
    source = Numbered(5, broken=(3,))
    batches = loaded(DenseDataset(source, numbers), EvalOrder(source, 2))
    assert [int(image) for batch in batches for image in batch.images] == [0, 1, 2, 4]
    assert [batch.skipped for batch in batches] == [(), (("3.png", "not an image"),), ()]
    failing = Numbered(2, wrong={1: "masks/1.png holds 9"})
    (batch,) = loaded(DenseDataset(failing, numbers), EvalOrder(failing, 2))
    assert batch.failure == "masks/1.png holds 9"
