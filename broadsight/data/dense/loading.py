"""From data for dense tasks to batches, exact and repeatable as those of `loading`; images may differ in size."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..decoding import UnreadableImage, within_memory
from ..loading import Key, SourceDataset

ALIGNED = 16  # bytes; what numbers of any kind may begin at


class DenseBatch(NamedTuple):
    """Images and targets as they leave the workers.

    Args:
        images: (C, H, W) of bytes each, which are normalised on the device.
        targets: One for each: classes of pixels (H, W), or a dict.
        keys: Which they are: epoch, place in it, index in the data.
        skipped: Name and reason of each image that could not be read.
        failure: Why there is no batch. An error would leave a worker process with a page of its traceback.
    """

    images: list[Tensor]
    targets: list[Any]
    keys: tuple[Key, ...]
    skipped: tuple[tuple[str, str], ...]
    failure: str = ""

    def __reduce__(self) -> tuple[Callable[..., "DenseBatch"], tuple[Any, ...]]:
        """Travels as one block of memory: each tensor on its own would take an open file, and those run out."""
        tensors: list[Tensor] = []
        outline = _taken_apart([self.images, self.targets], tensors)
        kinds = [(tensor.dtype, tuple(tensor.shape), tensor.numel() * tensor.element_size()) for tensor in tensors]
        block = torch.empty(sum(_padded(size) for _, _, size in kinds), dtype=torch.uint8)
        start = 0
        for tensor, (_, _, size) in zip(tensors, kinds, strict=True):
            block[start : start + size] = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            start += _padded(size)
        return _received, (block, kinds, outline, self.keys, self.skipped, self.failure)


class _Place(NamedTuple):
    """Of a tensor, among all of a batch."""

    number: int


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _taken_apart(item: Any, tensors: list[Tensor]) -> Any:
    """The same lists and dicts with places instead of tensors, which are added to a list."""
    if isinstance(item, Tensor):
        tensors.append(item)
        return _Place(len(tensors) - 1)
    if isinstance(item, dict):
        return {key: _taken_apart(value, tensors) for key, value in item.items()}
    return [_taken_apart(value, tensors) for value in item] if isinstance(item, list) else item


def _put_together(item: Any, tensors: list[Tensor]) -> Any:
    if isinstance(item, _Place):
        return tensors[item.number]
    if isinstance(item, dict):
        return {key: _put_together(value, tensors) for key, value in item.items()}
    return [_put_together(value, tensors) for value in item] if isinstance(item, list) else item


def _received(
    block: Tensor,
    kinds: list[tuple[torch.dtype, tuple[int, ...], int]],
    outline: Any,
    keys: tuple[Key, ...],
    skipped: tuple[tuple[str, str], ...],
    failure: str,
) -> DenseBatch:
    tensors, start = [], 0
    for dtype, shape, size in kinds:
        tensors.append(block[start : start + size].view(dtype).reshape(shape))
        start += _padded(size)
    images, targets = _put_together(outline, tensors)
    return DenseBatch(images, targets, keys, skipped, failure)


class DenseDataset(SourceDataset):
    """Images with targets, transformed. Each is a function of its key alone, whoever asks for it and when.

    An image that cannot be read is skipped: in training the next that can be read takes its place, so that batches
    keep their size; in evaluation the batch is so much smaller. Either way it is reported. Labels that cannot be meant
    are never skipped: they are why there is no batch.

    Args:
        source: By index an image with its target, and `name`.
        transform: (PIL image, target) -> bytes (C, H, W) and target; None if the source gives these.
        seed: Of what source and transform draw in training.
        training: Seed by the key, and replace what cannot be read.
        strict: An unreadable image is an error.
    """

    def __getitems__(self, keys: Sequence[Key]) -> DenseBatch:
        images, targets, kept, skipped = [], [], [], []
        for key in keys:
            try:
                found = self._read(key, skipped)
            except (ValueError, OSError) as error:
                return DenseBatch([], [], (), (), str(error))
            if found is not None:
                pixels, target, index = found
                images.append(pixels)
                targets.append(target)
                kept.append((*key[:2], index))  # which may be that of another
        return DenseBatch(images, targets, tuple(kept), tuple(skipped))

    def _item(self, index: int) -> tuple[Tensor, Any]:
        """Pixels and target."""
        try:
            with within_memory():  # also what the labels need: a mask for each of many objects in a large image
                image, target = self.source[index]
                return (image, target) if self.transform is None else self.transform(image, target)
        except UnreadableImage:
            raise
        except (ValueError, OSError) as error:
            name = self.source.name(index)
            raise ValueError(str(error) if name in str(error) else f"{name}: {error}") from None
