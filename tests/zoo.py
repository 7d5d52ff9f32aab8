"""Every backbone of ours, shrunk to one block a stage; MAP's and context broadcasting's, which are timm's, are not."""

import timm
from torch import nn

from broadsight.models import FAMILIES

OWN = tuple(family for family in FAMILIES if family not in ("map", "context_broadcast"))
DEPTHS = (1, 1, 1, 1)


def shallow(name: str, **kwargs) -> nn.Module:
    return timm.create_model(name, depths=DEPTHS, **kwargs)


NAMES = timm.list_models(module=list(OWN))

_blank = {name: shallow(name, device="meta") for name in NAMES}
_sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in _blank.items()}
_parts = {name: frozenset(type(module) for module in model.modules()) for name, model in _blank.items()}

# The smallest model of each family, and the smallest of each kind: those that are built from the same types of module.
SMALLEST = [min(timm.list_models(module=family), key=_sizes.__getitem__) for family in OWN]
KINDS = [
    min((n for n in NAMES if _parts[n] == parts), key=_sizes.__getitem__) for parts in dict.fromkeys(_parts.values())
]
