"""From sources of images to batches: augmentation, order, and who gets which image, all exact and repeatable."""

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import posterize
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import pil_modes_mapping

from .decoding import UnreadableImage, within_memory
from .seeds import mixed, seed_transforms

IN_A_ROW = 50  # unreadable images one after the other, after which something else must be wrong
MOST_PIXELS = 1 << 24  # of a resized image: 64 MB. At 256 pixels that is a longer side of 256 times the shorter one.
MOST_CROPS = 16  # times the pixels that are kept of it, for models of large images

Key = tuple[int, int, int]  # epoch, place in the epoch, index in the source


class Batch(NamedTuple):
    """Images as they leave the workers: bytes (B, C, H, W), which are normalised on the device."""

    images: Tensor
    labels: Tensor
    keys: tuple[Key, ...]  # of each image
    skipped: tuple[tuple[str, str], ...]  # name and reason of each image that could not be read
    failure: str = ""  # why there is no batch; an error would leave a worker process with a page of its traceback


@dataclass(frozen=True)
class Transforms:
    """How images become what a model takes, in timm's terms."""

    size: int
    channels: int = 3
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bicubic"
    crop_pct: float = 0.875  # part of an image that evaluation sees
    augmentation: dict[str, Any] = field(default_factory=dict)  # of timm's `create_transform`, in training

    def build(self, training: bool) -> Callable[[Image.Image], Any]:
        """PIL image -> (C, size, size) of bytes."""
        extra = self.augmentation if training else {"crop_pct": self.crop_pct}
        try:
            transform: Any = create_transform(
                (self.channels, self.size, self.size),
                is_training=training,
                interpolation=self.interpolation if training or self.interpolation != "random" else "bicubic",
                mean=self.mean,
                std=self.std,
                use_prefetcher=True,  # bytes go to the device, numbers of four times the size would travel otherwise
                **extra,
            )
        except AssertionError:  # how timm refuses a policy
            hint = "expected a policy of timm's, such as rand-m9-mstd0.5-inc1"
            raise ValueError(f"auto_augment={extra.get('auto_augment')}; {hint}") from None
        if not training:
            transform.transforms[0] = BoundedResize(transform.transforms[0], self.size)
        for step in transform.transforms:
            for op in _flat([getattr(step, "ops", []), getattr(step, "policy", [])]):
                if getattr(op, "aug_fn", None) is posterize:
                    op.aug_fn = _posterize
        return transform

    def view(self, image_size: tuple[int, int]) -> tuple[float, float, float, float]:
        """What evaluation sees of an image (width, height): left, top, right and bottom in its pixels."""
        return _middle(image_size, math.floor(self.size / self.crop_pct), self.size)[1]


class BoundedResize:
    """torchvision's `resize` of the shorter side before a centre crop, without large intermediate images.

    Of an image of 1 x 8,000 pixels, which would have two million on the longer side, the crop alone is computed, from
    the same pixels and by the same filter: a few values differ by one of 255 levels.
    """

    def __init__(self, resize: Any, crop: int):
        self.resize, self.crop = resize, crop
        self.side = resize.size if isinstance(resize.size, int) else resize.size[0]
        self.filter = pil_modes_mapping[resize.interpolation]

    def __call__(self, image: Image.Image) -> Image.Image:
        short, long = sorted(image.size)
        if self.side * int(self.side * long / short) <= max(MOST_PIXELS, MOST_CROPS * self.crop**2):
            return self.resize(image)
        kept, box = _middle(image.size, self.side, self.crop)
        return image.resize(kept, Image.Resampling(self.filter), box)


def _middle(size: tuple[int, int], side: int, crop: int) -> tuple[tuple[int, int], tuple[float, float, float, float]]:
    """The crop from the middle of an image whose shorter side is resized: its pixels, and its box in the image."""
    short, long = sorted(size)
    longer = int(side * long / short)  # as torchvision rounds
    kept, starts, ends = [], [], []
    for whole, after in zip(size, (side, longer) if size[0] <= size[1] else (longer, side), strict=True):
        kept.append(min(after, crop))
        start = round((after - kept[-1]) / 2.0)  # as torchvision's CenterCrop
        starts.append(start * whole / after)
        ends.append(min((start + kept[-1]) * whole / after, float(whole)))
    return (kept[0], kept[1]), (starts[0], starts[1], ends[0], ends[1])


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """timm's, which may keep no bit at all: black, as ever; Pillow 13 refuses that."""
    return posterize(image, bits) if bits > 0 else image.point(lambda _: 0)


def _flat(items: Any) -> Iterator[Any]:
    for item in items:
        yield from _flat(item) if isinstance(item, (list, tuple)) else (item,)


class SourceDataset(Dataset):
    """A source's images, transformed to bytes (C, H, W). Each depends on its key alone, not on worker or moment.

    An unreadable one is skipped and reported, or an error if `strict`; in training the next readable takes its place.
    """

    def __init__(
        self, source: Any, transform: Any = None, *, seed: int = 0, training: bool = False, strict: bool = False
    ):
        self.source, self.transform = source, transform
        self.seed, self.training, self.strict = seed, training, strict

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        images = torch.empty((0, 0, 0, 0), dtype=torch.uint8)
        labels, kept, skipped = [], [], []
        for key in keys:
            try:
                found = self._read(key, skipped)
            except UnreadableImage as error:
                return Batch(torch.empty(0), torch.empty(0), (), (), str(error))
            if found is None:
                continue
            pixels, label, index = found
            if not kept:
                images = torch.empty((len(keys), *pixels.shape), dtype=torch.uint8)
            images[len(kept)] = pixels
            labels.append(label)
            kept.append((*key[:2], index))  # which may be that of another
        return Batch(images[: len(kept)], torch.tensor(labels, dtype=torch.int64), tuple(kept), tuple(skipped))

    def _read(self, key: Key, skipped: list[tuple[str, str]]) -> tuple[Tensor, Any, int] | None:
        """The `_item` of the image, or of the next readable one, and its index."""
        epoch, place, index = key
        attempts = min(IN_A_ROW, len(self.source)) if self.training else 1
        for at in (number % len(self.source) for number in range(index, index + attempts)):
            if self.training:
                seed_transforms(self.seed, epoch, place)
            try:
                return *self._item(at), at
            except UnreadableImage as error:
                name = self.source.name(at)
                reason = str(error).removeprefix(f"{name}: ")
                if self.strict:
                    hint = "without --strict it would be skipped"
                    raise UnreadableImage(f"{name} cannot be read ({reason}); {hint}") from None
                skipped.append((name, reason))
        if self.training:
            raise UnreadableImage(f"{attempts} images in a row cannot be read, last {skipped[-1][0]}: {skipped[-1][1]}")
        return None

    def _item(self, index: int) -> tuple[Tensor, Any]:
        """Pixels and label."""
        image = self.source.open(index)
        try:
            with within_memory():
                return torch.as_tensor(self.transform(image)), self.source.label(index)
        except UnreadableImage:
            raise
        except Exception as error:  # whatever it is: one image of a million should not end a run
            reason = (str(error).splitlines() or [""])[0]
            raise UnreadableImage(f"cannot be prepared ({type(error).__name__}: {reason})") from error


@dataclass(eq=False)
class TrainOrder:
    """The batches of an epoch for one of several processes: iterating gives lists of keys.

    All processes draw the same order, or take the source's own (`shuffled`). Each takes its share of every batch, in as
    many passes as are accumulated, so the images of an update do not depend on the number of processes.
    """

    source: Any
    batch: int  # images of an update, over all processes and passes
    _: KW_ONLY
    seed: int = 0
    rank: int = 0
    processes: int = 1
    accumulate: int = 1
    repeats: int = 1  # how often an image comes in an epoch, which ends after as many as there are images
    updates: int = 0  # of an epoch, if that is not one pass over the images, but may end anywhere in one

    def __post_init__(self) -> None:
        batch, count, shares = self.batch, len(self.source), self.processes * self.accumulate
        if batch % shares:
            among = f"{self.processes} processes" + f" with accumulate={self.accumulate}" * (self.accumulate > 1)
            near = max(1, round(batch / shares)) * shares
            raise ValueError(f"batch_size={batch} does not divide among {among}; take batch_size={near}")
        self.epoch, self.first, self.one_pass = 0, 0, not self.updates
        if batch > count and self.one_pass:
            what = f"batch_size={batch} does not fit: there are {count} training images"
            raise ValueError(f"{what}; take --set batch_size={shares * max(1, count // shares)}")
        self.updates = self.updates or count // batch  # images that fill no batch are left for another epoch's order

    def start(self, epoch: int, first: int = 0) -> None:
        """Continue with this epoch from its update `first` on."""
        self.epoch, self.first = epoch, first

    def order(self) -> Tensor:
        """Indices of the epoch, one for each place in it."""
        if self.one_pass:
            return self._pass(self.epoch)
        start, count = self.epoch * self.updates * self.batch, self.updates * self.batch
        passes = range(start // len(self.source), (start + count - 1) // len(self.source) + 1)
        order = torch.cat([self._pass(number) for number in passes])
        return order[start - passes.start * len(self.source) :][:count]

    def _pass(self, number: int) -> Tensor:
        """Indices of one pass over the images."""
        generator = torch.Generator().manual_seed(mixed(self.seed, number))
        shuffled = getattr(self.source, "shuffled", None)
        order = shuffled(generator) if shuffled else torch.randperm(len(self.source), generator=generator)
        return order.repeat_interleave(self.repeats)[: len(self.source)] if self.repeats > 1 else order

    def __len__(self) -> int:
        return (self.updates - self.first) * self.accumulate

    def __iter__(self) -> Iterator[list[Key]]:
        order = self.order()
        for update in range(self.first, self.updates):
            places = range(update * self.batch + self.rank, (update + 1) * self.batch, self.processes)
            indices = order[places.start : places.stop : places.step].tolist()
            mine = [(self.epoch, place, index) for place, index in zip(places, indices, strict=True)]
            size = len(mine) // self.accumulate
            for start in range(0, len(mine), size):
                yield mine[start : start + size]


class EvalOrder:
    """Every image once: of n processes each takes every n-th image, and nothing is padded."""

    def __init__(self, source: Any, batch: int, *, rank: int = 0, processes: int = 1):
        self.mine, self.batch = range(rank, len(source), processes), batch

    def __len__(self) -> int:
        return -(-len(self.mine) // self.batch)

    def __iter__(self) -> Iterator[list[Key]]:
        for start in range(0, len(self.mine), self.batch):
            yield [(0, index, index) for index in self.mine[start : start + self.batch]]


def load(images: Dataset, order: TrainOrder | EvalOrder, *, workers: int = 0, pin_memory: bool = False) -> DataLoader:
    """Batches in that order, prepared by `workers` processes that live as long as the loader."""
    return DataLoader(
        images,
        batch_sampler=order,
        num_workers=workers,
        collate_fn=_unchanged,
        pin_memory=pin_memory,
        worker_init_fn=_quiet_worker,
        persistent_workers=workers > 0,
        generator=torch.Generator().manual_seed(0),  # or what workers' seeds take of torch's own is missing elsewhere
    )


def close(loader: DataLoader) -> None:
    """End a loader's worker processes; at the end of the program nobody would, since they ignore SIGTERM."""
    iterator: Any = getattr(loader, "_iterator", None)
    if iterator is not None:
        iterator._shutdown_workers()
        loader._iterator = None


def _unchanged(batch: Any) -> Any:
    return batch


def _quiet_worker(_: int) -> None:
    """Workers leave when the main process does; Ctrl-C and SIGTERM reach all of a group, and that one has to save."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)


def default_workers(processes: int = 1) -> int:
    """A process for each core that is not training, up to eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // processes - 1))
