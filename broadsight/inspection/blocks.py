"""The blocks of any vision model, in order of execution, and the map that each of them gives."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .block import Block as Block
from .block_search import watched
from .passing import batches, check_model, uncompiled

# Called with the number of a block, from 0, and its map (B, C, h, w).
See = Callable[[int, Tensor], None]


def find_blocks(model: nn.Module, images: Tensor | Iterable[Any]) -> list[Block]:
    """The residual blocks of a model, in the order in which they run.

    A block is the nearest numbered element of a list or sequence around the addition of a branch that gives a map of
    the whole image, or what adds itself where nothing is numbered: `layer1.0` of a ResNet, `blocks.0` of a ViT,
    `stages.0.blocks.0` of most others. All elements of such a list count, also those that happen to have no shortcut.
    Where nothing is added, the modules count that join branches (Inception, DenseNet); in a plain sequence (VGG) every
    convolution or linear layer with the norm and activation behind it, by the name of the last of these. Stems,
    down-sampling, pooling, class attention and heads are no blocks, nor is what gives a single place for so small an
    image.

    Args:
        model: Any vision model that takes a batch of images.
        images: (B, C, H, W); one is enough, and no more than one is used. It runs twice, side by side.

    Raises:
        ValueError: Nothing of that kind is found, or the model does not take the images.
    """
    check_model(model)
    inner, compiled = uncompiled(model)
    image, _ = peek(images)
    watch = watched(inner, image, compiled)
    found = watch.blocks()
    if not found:
        raise ValueError(
            f"{type(inner).__name__} has no blocks that give a map of several places; looked for modules that add or "
            "join branches, and for two convolutions or linear layers in a row; pass an image classifier, such as "
            "resnet50, deit_small_patch16_224 or mat_2"
        )
    return found


def find_layers(model: nn.Module, images: Tensor | Iterable[Any], layers: str | Sequence[str]) -> list[Block]:
    """Any modules that give a map of the whole image, by patterns of their paths, in the order in which they run.

    Args:
        model, images: As for `find_blocks`.
        layers: Paths in which * stands for anything, as "*.mixer.static"; several as a sequence, or separated by
            commas.

    Raises:
        ValueError: No such module gives a map.
    """
    check_model(model)
    inner, compiled = uncompiled(model)
    patterns = [one.strip() for one in (layers.split(",") if isinstance(layers, str) else layers)]
    names = {name for name, _ in inner.named_modules() if any(fnmatchcase(name, one) for one in patterns)}
    if not names:
        raise ValueError(
            f"no module of {type(inner).__name__} is called {', '.join(patterns)}; * stands for anything, as in "
            "'*.mlp', and modules are listed by model.named_modules()"
        )
    watch = watched(inner, peek(images)[0], compiled)
    found = [block for name in names & set(watch.calls) if (block := watch.place(name)) is not None]
    if not found:
        raise ValueError(f"{', '.join(sorted(names)[:3])} gives no map of several places; name modules that do")
    return sorted(found, key=lambda block: watch.calls[block.name].order)


@contextmanager
def watch_blocks(model: nn.Module, blocks: Iterable[Block], see: See) -> Generator[None, None, None]:
    """While it lasts, `see` is told of every map that a block gives, which it must neither keep nor change.

    The model runs as it does without, which with ours may mean a few images of the batch at a time: a block is then
    seen several times in a pass, its images in their order.
    """
    inner, compiled = uncompiled(model)
    size: list[tuple[int, int]] = []

    def begin(module: nn.Module, args: tuple, kwargs: dict) -> None:
        images = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        size[:] = [(images.shape[-2], images.shape[-1])]

    def listener(number: int, block: Block) -> Callable[[nn.Module, tuple, Any], None]:
        def look(module: nn.Module, inputs: tuple, output: Any) -> None:
            with torch.no_grad():
                see(number, block.map_of(output, size[0] if size else block.image_size))

        look.__dict__["image_by_image"] = True  # so that our models run in slices as ever, and give the same bits
        return look

    begin.__dict__["image_by_image"] = True
    handles = [inner.register_forward_pre_hook(begin, with_kwargs=True)]
    try:
        handles += [block.module.register_forward_hook(listener(number, block)) for number, block in enumerate(blocks)]
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


def peek(images: Tensor | Iterable[Any]) -> tuple[Tensor, Tensor | Iterable[Any]]:
    """One image (1, C, H, W) of those that come, and all of them again: a generator gives its own but once."""
    if isinstance(images, Tensor) or not isinstance(images, Iterable):
        first = next(batches(images), None)
    else:
        rest, items, first = iter(images), [], None
        for item in rest:
            items.append(item)
            first = next(batches([item]), None)
            if first is not None:
                break
        images = chain(items, rest)
    if first is None:
        raise ValueError("images are empty; pass one at least, as (B, C, H, W)")
    return first[0][:1], images
