"""What collectors of looks see of one pass."""

import torch
from torch import Tensor, nn

from broadsight.explanation.maps.map import Collector, Look


def looks_of(
    kind: type[Collector], model: nn.Module, *inputs: Tensor | list[Tensor], size: tuple[int, int] = (8, 8)
) -> list[Look]:
    """The looks of one kind, and no hooks left."""
    collector = kind(model, size)
    with torch.no_grad(), collector:
        model(*inputs)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return collector.looks()
