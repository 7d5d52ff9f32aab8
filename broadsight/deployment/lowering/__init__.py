"""What a model says differently for other runtimes: one file a layer, swapped into the copy that `prepare` makes.

A lowered layer is a subclass with another forward: the same function of the same weights, in few, plain operations, and
for sizes that are left open as well. Names, weights and hooks stay. Each registers itself by `lowers`.
"""

from . import (
    abstract_token,
    bilinear_embed,
    context_broadcast,
    ems,
    merge_maps,
    partial_attention,
    plain_pools,
    stvit_block,
    super_token,
)
from .registry import lower

__all__ = [
    "abstract_token",
    "bilinear_embed",
    "context_broadcast",
    "ems",
    "lower",
    "merge_maps",
    "partial_attention",
    "plain_pools",
    "stvit_block",
    "super_token",
]
