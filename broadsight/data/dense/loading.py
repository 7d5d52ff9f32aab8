"""From data for dense tasks to batches, exact and repeatable as those of `loading`; images may differ in size."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..decoding import UnreadableImage, within_memory
from ..loading import Key, SourceDataset


class DenseBatch(NamedTuple):
    """Images (C, H, W) of bytes and targets, classes of pixels (H, W) or dicts; other fields are those of `Batch`."""

    images: list[Tensor]
    targets: list[Any]
    keys: tuple[Key, ...]
    skipped: tuple[tuple[str, str], ...]
    failure: str = ""

    def __reduce__(self) -> tuple[Callable[..., "DenseBatch"], tuple[Any, ...]]:
        """Travels as one block of memory: each tensor on its own would take an open file, and those run out."""
        leaves, outline = tree_flatten((self.images, self.targets))
        tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        kinds, start = [], 0
        for place, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            kinds.append((place, tensor.dtype, tuple(tensor.shape), slice(start, start + size)))
            start += size + -size % 16  # where numbers of any kind may begin
            leaves[place] = None
        block = torch.empty(start, dtype=torch.uint8)
        for place, _, _, within in kinds:
            block[within] = tensors[place].detach().contiguous().reshape(-1).view(torch.uint8)
        return _received, (block, kinds, leaves, outline, self.keys, self.skipped, self.failure)


def _received(block: Tensor, kinds: list[tuple], leaves: list[Any], outline: TreeSpec, *others: Any) -> DenseBatch:
    for place, dtype, shape, within in kinds:
        leaves[place] = block[within].view(dtype).reshape(shape)
    return DenseBatch(*tree_unflatten(leaves, outline), *others)


class DenseDataset(SourceDataset):
    """Images with targets, transformed and skipped as by `SourceDataset`, as they are without a transform.

    Wrong labels are never skipped: they are why there is no batch.
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
