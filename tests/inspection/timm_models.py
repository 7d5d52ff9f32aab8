"""timm's models with few and narrow blocks: every code path of a family, in a fraction of a second."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from torch import Tensor, nn

from tests.compare import randomize


def read_table(name: str) -> Any:
    """A table of this folder, with tuples for its lists."""

    def tuples(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: tuples(item) for key, item in value.items()}
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return tuples(yaml.safe_load(Path(__file__).with_name(name).read_text("utf-8")))


TABLE = read_table("timm_models.yaml")
SHRUNK, FIXED, ANY_SIZE = TABLE["shrunk"], TABLE["fixed"], TABLE["any_size"]


@cache
def _template(name: str, in_chans: int) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, in_chans=in_chans, **SHRUNK[name], **ANY_SIZE.get(name, {}))
    return randomize(model).eval()


def created(name: str, in_chans: int = 3) -> nn.Module:
    """Always the same weights, none of them at its initial value."""
    return deepcopy(_template(name, in_chans))


def images(name: str, batch: int = 2, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, *FIXED.get(name, (64, 96)))


def without_intermediates(model: nn.Module) -> nn.Module:
    """The same model as if it offered no intermediate features, as some of timm's did not before 1.0.31."""

    def missing(self: nn.Module) -> None:
        raise AttributeError("forward_intermediates")

    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"forward_intermediates": property(missing)})
    return model
