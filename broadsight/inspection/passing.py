"""Passes images through a model, a few at a time."""

from collections.abc import Callable, Iterable, Iterator
from itertools import tee
from typing import Any

from torch import Tensor, nn

from .meta_pass import in_eval_mode

# Called with how many images have passed.
Seen = Callable[[int], None]


def pass_images(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    batch_size: int = 8,
    seen: Seen | None = None,
    see: Callable[[Any, Any], None] | None = None,
) -> int:
    """Run a model in eval mode, without gradients, on all images; returns how many there were.

    Args:
        images: (B, C, H, W), or an iterable of such batches, or of tuples that begin with one, as a data loader is.
            They are moved to the model's device and dtype.
        batch_size: The most images that pass the model at a time.
        seen: Called after every pass with how many images have passed; for a progress bar.
        see: Called after every pass with the output, and the rest of the tuple that the images came in.

    Raises:
        ValueError: There are no images, or they have another form.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} lets no image pass; choose 1 or more")
    passed = 0
    with in_eval_mode(model):
        for batch, rest in batches(images):
            for start in range(0, len(batch), batch_size):
                part = batch[start : start + batch_size]
                result = model(moved(part, model))
                if see is not None:
                    see(result, tuple(x[start : start + batch_size] for x in rest))
                passed += len(part)
                if seen is not None:
                    seen(passed)
    if not passed:
        raise ValueError("images are empty; pass one at least, as (B, C, H, W)")
    return passed


def moved(images: Tensor, model: nn.Module) -> Tensor:
    """Images on the model's device and in its dtype."""
    like = next((x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()), images)
    return images.to(like.device, like.dtype)


def batches(images: Tensor | Iterable[Any]) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
    """Batches (B, C, H, W) that are not empty, each with the rest of its tuple."""
    if not isinstance(images, Tensor | Iterable):
        raise ValueError(f"images are a {type(images).__name__}; expected (B, C, H, W) or an iterable of such batches")
    for item in [images] if isinstance(images, Tensor) else images:
        batch, *rest = item if isinstance(item, tuple | list) and item else (item,)
        if not isinstance(batch, Tensor):
            raise ValueError(f"a batch of images is a {type(batch).__name__}; expected a tensor (B, C, H, W)")
        if batch.ndim != 4:
            hint = "; pass images[None] for a single one" if batch.ndim == 3 else ""
            raise ValueError(f"a batch of images has shape {tuple(batch.shape)}; expected (B, C, H, W){hint}")
        if len(batch):
            yield batch, tuple(rest)


def peek(images: Tensor | Iterable[Any]) -> tuple[Tensor, Tensor | Iterable[Any]]:
    """One image (1, C, H, W) of those that come, and all of them again: a generator gives its own but once."""
    if isinstance(images, Tensor) or not isinstance(images, Iterable):
        first = next(batches(images), None)
    else:
        again, ahead = tee(images)
        first, images = next(batches(ahead), None), again
    if first is None:
        raise ValueError("images are empty; pass one at least, as (B, C, H, W)")
    return first[0][:1], images


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; expected a model, as timm.create_model gives")
