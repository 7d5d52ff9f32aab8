"""Every staged backbone of ours, shrunk to one block a stage; timm's own, and what is built like those, are not."""

from importlib.util import find_spec

import pytest
import timm
from torch import nn

from broadsight.models import FAMILIES
from broadsight.models._backbone import StagedBackbone

OWN = tuple(family for family in FAMILIES if family not in ("map", "context_broadcast", "localvit"))
DEPTHS = (1, 1, 1, 1)


FASTER_VIT = "map_faster_vit_3"  # of a package under a non-commercial licence, which few have
HAS_FASTER_VIT = find_spec("fastervit") is not None
needs_faster_vit = pytest.mark.skipif(not HAS_FASTER_VIT, reason='needs fastervit: pip install "broadsight[fastervit]"')


def marked(names, slow=()) -> list:
    """Registered names as parameters of a test, of which some are slow."""
    return [
        pytest.param(n, marks=[needs_faster_vit] * (n == FASTER_VIT) + [pytest.mark.slow] * (n in slow)) for n in names
    ]


def shallow(name: str, **kwargs) -> nn.Module:
    return timm.create_model(name, depths=DEPTHS, **kwargs)


_built = {name: shallow(name, device="meta") for name in timm.list_models(module=list(OWN))}
_blank = {name: model for name, model in _built.items() if isinstance(model, StagedBackbone)}
NAMES = list(_blank)
_sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in _blank.items()}
_parts = {name: frozenset(type(module) for module in model.modules()) for name, model in _blank.items()}

# The smallest model of each family, and the smallest of each kind: those that are built from the same types of module.
SMALLEST = [min((n for n in timm.list_models(module=family) if n in _sizes), key=_sizes.__getitem__) for family in OWN]
KINDS = [
    min((n for n in NAMES if _parts[n] == parts), key=_sizes.__getitem__) for parts in dict.fromkeys(_parts.values())
]
