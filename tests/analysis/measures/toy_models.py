"""Models whose features are known by hand."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Made(nn.Module):
    """A model of some parts, whose forward is a function of itself and its inputs."""

    def __init__(self, call: Callable[..., Any], **parts: Any):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.call(self, *inputs, **options)


class Does(Made):
    """A function as a model."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__(lambda self, x: self.function(x), function=function)


class Blocks(Made):
    """Blocks, each of which adds to its input what a function makes of it; then the mean over places."""

    def __init__(self, function: Callable[[Tensor], Tensor], count: int):
        def block() -> nn.Module:  # whose convolutions are never called
            return Made(lambda self, x: x + function(x), one=nn.Conv2d(2, 2, 1), two=nn.Conv2d(2, 2, 1))

        blocks = nn.Sequential(*(block() for _ in range(count)))
        super().__init__(lambda self, x: self.blocks(x).mean((2, 3)), blocks=blocks)


class Attends(Made):
    """Nothing but an attention `attn`, a function that takes images (B, heads, N, d) for queries, keys or logits."""

    def __init__(self, attend: Callable[[Tensor], Any], heads: int | None = None):
        attn = Made(lambda self, x: attend(x), qkv=nn.Identity(), num_heads=heads)
        super().__init__(lambda self, x: self.attn(x), attn=attn)
