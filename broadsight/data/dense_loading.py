"""From data for dense tasks to batches, exact and repeatable as those of `loading`; pictures may differ in size."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from ..seeds import seed_transforms
from .decoding import UnreadableImage
from .loading import IN_A_ROW, Key

ALIGNED = 16  # bytes; what numbers of any kind may begin at


class DenseBatch(NamedTuple):
    """Pictures and targets as they leave the workers.

    Args:
        images: (C, H, W) of bytes each, which are normalised on the device.
        targets: One for each: classes of pixels (H, W), or a dict.
        keys: Which they are: epoch, place in it, index in the data.
        skipped: Name and reason of each picture that could not be read.
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


class DensePictures(Dataset):
    """Pictures with targets, transformed. Each is a function of its key alone, whoever asks for it and when.

    A picture that cannot be read is skipped: in training the next that can be read takes its place, so that batches
    keep their size; in evaluation the batch is so much smaller. Either way it is reported. Labels that cannot be meant
    are never skipped: they are why there is no batch.

    Args:
        source: By index a picture with its target, and `name`.
        transform: (PIL image, target) -> bytes (C, H, W) and target; None if the source gives these.
        seed: Of what source and transform draw in training.
        training: Seed by the key, and replace what cannot be read.
        strict: An unreadable picture is an error.
    """

    def __init__(
        self,
        source: Any,
        transform: Callable[[Image.Image, Any], tuple[Tensor, Any]] | None = None,
        *,
        seed: int = 0,
        training: bool = False,
        strict: bool = False,
    ):
        self.source, self.transform = source, transform
        self.seed, self.training, self.strict = seed, training, strict

    def __len__(self) -> int:
        return len(self.source)

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

    def _read(self, key: Key, skipped: list[tuple[str, str]]) -> tuple[Tensor, Any, int] | None:
        """Pixels, target and index of the picture."""
        epoch, place, index = key
        attempts = min(IN_A_ROW, len(self.source)) if self.training else 1
        for attempt in range(attempts):
            at = (index + attempt) % len(self.source)
            name = self.source.name(at)
            if self.training:
                seed_transforms(self.seed, epoch, place)
            try:
                image, target = self.source[at]
            except UnreadableImage as error:
                reason = str(error).removeprefix(f"{name}: ")
                if self.strict:
                    raise UnreadableImage(
                        f"{name} cannot be read ({reason}); without --strict it would be skipped"
                    ) from None
                skipped.append((name, reason))
                continue
            except (ValueError, OSError) as error:
                raise ValueError(str(error) if name in str(error) else f"{name}: {error}") from None
            if self.transform is not None:
                image, target = self.transform(image, target)
            return image, target, at
        if self.training:
            raise UnreadableImage(
                f"{attempts} pictures in a row cannot be read, last {skipped[-1][0]}: {skipped[-1][1]}"
            )
        return None
