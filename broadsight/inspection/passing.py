"""Passes images through a model, a few at a time."""

from collections.abc import Callable, Iterable, Iterator
from itertools import tee
from typing import Any

from torch import Tensor, nn

from .meta_pass import in_eval_mode

Images = Tensor | Iterable[Any]  # (B, C, H, W), or as a data loader: such batches, or tuples that begin with one
Seen = Callable[[int], None]  # called with how many images have passed
NO_IMAGES = "images are empty; pass one at least, as (B, C, H, W)"


def pass_images(
    model: nn.Module,
    images: Images,
    *,
    batch_size: int = 8,
    seen: Seen | None = None,
    see: Callable[[Any, Any], None] | None = None,
    run: Callable[[Tensor], Any] | None = None,
) -> int:
    """Run a model in eval mode, without gradients, on all images; returns how many there were.

    After every pass `see` is called with the output and the rest of the tuple that the images came in; `run`
    stands for the model's own forward.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} lets no image pass; choose 1 or more")
    passed = 0
    with in_eval_mode(model):
        for batch, rest in batches(images):
            for start in range(0, len(batch), batch_size):
                part = batch[start : start + batch_size]
                output = (run or model)(moved(part, model))
                if see is not None:
                    see(output, tuple(x[start : start + batch_size] for x in rest))
                passed += len(part)
                if seen is not None:
                    seen(passed)
    if not passed:
        raise ValueError(NO_IMAGES)
    return passed


def moved(images: Tensor, model: nn.Module) -> Tensor:
    """Images on the model's device and in its dtype."""
    like = next((x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()), images)
    return images.to(like.device, like.dtype)


def batches(images: Images) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
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


def peek(images: Images) -> tuple[Tensor, Images]:
    """One image (1, C, H, W) of those that come, and all of them again: a generator gives its own but once."""
    ahead = images
    if isinstance(images, Iterable) and not isinstance(images, Tensor):
        images, ahead = tee(images)
    for batch, _ in batches(ahead):
        return batch[:1], images
    raise ValueError(NO_IMAGES)


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; expected a model, as timm.create_model gives")
