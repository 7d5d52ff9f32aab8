"""The pool of a fixed grid, for maps of open size."""

from torch import Tensor

from ...layers import FlattenPool
from .operations import average_to
from .registry import lowers


@lowers(FlattenPool)
class LoweredFlattenPool(FlattenPool):
    """[(B, C_i, H_i, W_i)] -> (B, num_classes)."""

    def to_grid(self, x: Tensor) -> Tensor:
        return average_to(x, *self.grid)
