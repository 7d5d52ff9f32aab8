"""What collectors of looks see of one pass."""

import torch
from torch import Tensor, nn

from broadsight.explanation.maps.map import Collector, Look


def looks_of(
    kind: type[Collector],
    model: nn.Module,
    *inputs: Tensor | list[Tensor],
    size: tuple[int, int] = (8, 8),
    place: tuple[int, int] | None = None,
) -> list[Look]:
    """The looks of one kind, asked for a (row, column) of a map as large as the image or none, and no hooks left."""
    collector = kind(model, size)
    collector.marks = [((place[1] + 0.5) / size[1], (place[0] + 0.5) / size[0])] if place else []
    with torch.no_grad(), collector:
        model(*inputs)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return collector.looks()
