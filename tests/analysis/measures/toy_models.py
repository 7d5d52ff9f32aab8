"""Models whose features are known by hand."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Does(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Blocks(nn.Module):
    """Blocks, each of which adds to its input what a function makes of it; then the mean over places."""

    class Block(Does):
        def __init__(self, function: Callable[[Tensor], Tensor]):
            super().__init__(function)
            self.one, self.two = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)  # never called

        def forward(self, x: Tensor) -> Tensor:
            return x + self.function(x)

    def __init__(self, function: Callable[[Tensor], Tensor], count: int):
        super().__init__()
        self.blocks = nn.Sequential(*(self.Block(function) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).mean((2, 3))


class Attends(nn.Module):
    """Nothing but an attention `attn`, a function that takes images (B, heads, N, d) for queries, keys or logits."""

    def __init__(self, attend: Callable[[Tensor], Any], heads: int | None = None):
        super().__init__()
        self.attn = nn.Module()
        self.attn.qkv, self.attn.forward, self.attn.num_heads = nn.Identity(), attend, heads

    def forward(self, x: Tensor) -> Any:
        return self.attn(x)
