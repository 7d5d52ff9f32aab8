"""The poolings: multi-token attention, and those that it is compared with. Every file here registers its own."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from torch import nn

Layer = TypeVar("Layer", bound=type[nn.Module])


@dataclass(frozen=True)
class Pooling:
    """A pool under the name by which `swap_pool` knows it; see `register_pool`."""

    layer: type[nn.Module]
    settings: Callable[..., dict[str, Any]] | None

    @property
    def takes(self) -> Mapping[str, Any]:
        """What the pool is asked to be made from, by name."""
        return inspect.signature(self.settings or self.layer).parameters

    def make(
        self, channels: Sequence[int], num_classes: int, offered: Mapping[str, Any], options: Mapping[str, Any]
    ) -> nn.Module:
        """The layer, made from what it takes of what is offered; options of its constructor go first."""
        taken = {name: value for name, value in offered.items() if name in self.takes}
        settings = taken if self.settings is None else self.settings(**taken)
        return self.layer(channels, num_classes, **{**settings, **options})


POOLS: dict[str, Pooling] = {}


def register_pool(name: str, settings: Callable[..., dict[str, Any]] | None = None) -> Callable[[Layer], Layer]:
    """Let `swap_pool` and the command line find the decorated pool by a name; `PlainPool` shows what it has to offer.

    The pool is made from the channels of each feature map, lowest level first, and the number of classes, and from
    those of these arguments that it, or the given `settings` that make its own of them, has: `groups, tokens, dim,
    heads, mlp_dim, attn_dim` and `light` of `swap_pool`; `level`, the map whose grid all are brought to (a pool without
    it is given the last map alone); `grid`, `width`: (H, W) and channels of the last map; `norm`, whether it is normed.
    """

    def register(layer: Layer) -> Layer:
        POOLS[name] = Pooling(layer, settings)
        return layer

    return register


for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
