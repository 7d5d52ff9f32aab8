"""Published ImageNet-1K top-1, of our models and of what a user would pick instead, and where each is printed."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import timm
import yaml

from ..models import FAMILIES
from ..papers.verify import SOURCES, printed_of_models


@dataclass(frozen=True)
class Published:
    """One figure."""

    family: str  # of `models.FAMILIES`, or what its authors call it if it is not ours
    top1: float  # percent of the validation images of ImageNet-1K
    size: int  # side of the images in pixels
    source: str  # where it is printed
    ours: bool
    weights: str | None = None  # timm's tag of the weights that reach it; None if none were published


@cache
def published() -> dict[str, Published]:
    """Read all figures of our sources, by the timm name of the model."""
    found: dict[str, Published] = {}
    for family in FAMILIES:
        for name, row in printed_of_models(family).items():
            if "top1" in row and timm.is_model(name):  # the papers of our models publish for 224 pixels
                found[name] = Published(family, float(row["top1"]), 224, SOURCES[family], ours=True)
    data: dict[str, Any] = yaml.safe_load(files("broadsight.papers").joinpath("published_top1.yaml").read_text("utf-8"))
    for group in ("ours", "others"):
        for name, row in data[group].items():
            found[name] = Published(**row | {"source": data["sources"][row["source"]], "ours": group == "ours"})
    return found
