"""What is left of an answer when pixels go, the most salient ones first; and two orders to compare with."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..data.seeds import mixed

GRID = 14  # squares along the shorter side, as many as DINO's patches
ORDERS = ("salient first", "random", "least salient first")


def removal_ranks(saliency: Tensor, indices: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """When each pixel goes, by order: (B, H, W) of numbers from 0, which goes first, to H * W - 1.

    Equally salient pixels go in an order drawn for the image, which depends on its index and the seed alone. The
    random order takes square after square, a GRID-th of the shorter side wide, since scattered pixels would be worse
    than any region: nothing like them is in an image.
    """
    pixels = saliency[0].numel()
    generators = [torch.Generator().manual_seed(mixed(seed, index)) for index in indices]
    ties = torch.stack([torch.randperm(pixels, generator=one) for one in generators]).to(saliency.device)  # B N
    height, width = saliency.shape[1:]
    side = max(1, min(height, width) // GRID)
    rows, columns = torch.arange(height) // side, torch.arange(width) // side
    squares = (rows[:, None] * (int(columns[-1]) + 1) + columns).flatten()  # which square each pixel is in
    drawn = [torch.randperm(int(squares.max()) + 1, generator=one)[squares] for one in generators]
    random = _inverse(torch.stack(drawn).argsort(dim=1, stable=True)).to(saliency.device)  # B N
    among = saliency.flatten(1).gather(1, ties).argsort(dim=1, descending=True, stable=True)
    order = ties.gather(1, among)  # pixels, the most salient first
    salient = _inverse(order)
    ranks = dict(zip(ORDERS, (salient, random, pixels - 1 - salient), strict=True))
    return {name: rank.view_as(saliency) for name, rank in ranks.items()}


def _inverse(order: Tensor) -> Tensor:
    """(B, N): where each number is in an order of them."""
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def without(images: Tensor, ranks: Tensor, fraction: float) -> Tensor:
    """Images (B, C, H, W) without the first round(fraction * H * W) pixels: these are 0, the mean colour."""
    return images.masked_fill((ranks < round(fraction * ranks[0].numel()))[:, None], 0)


def checked_saliency(found: Tensor, images: Tensor) -> Tensor:
    """(B, H, W), finite, on the images' device."""
    wanted = (images.shape[0], *images.shape[-2:])
    if not isinstance(found, Tensor) or tuple(found.shape) != wanted:
        came = tuple(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(f"the saliency of images {tuple(images.shape)} is {came}; expected (B, H, W) = {wanted}")
    found = found.detach().to(images.device)
    if not bool(torch.isfinite(found).all()):
        raise ValueError("the saliency holds numbers that are not finite; pixels cannot be ordered by it")
    return found


def area(at: Sequence[float], values: Sequence[float]) -> float:
    """The mean height of a curve, by trapezoids; of a single point its own."""
    steps = [high - low for low, high in pairwise(at)]
    means = [(left + right) / 2 for left, right in pairwise(values)]
    return sum(step * mean for step, mean in zip(steps, means, strict=True)) / sum(steps) if steps else values[0]
