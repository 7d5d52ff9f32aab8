"""Published ImageNet-1K top-1, of our models and of what a user would pick instead, and where each is printed."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import timm
import yaml

from ..models import FAMILIES
from ..papers.verify import SOURCES, TABLES
from ..papers.verify import published as printed_tables

SIZE = 224  # that the papers of our models publish for


@dataclass(frozen=True)
class Published:
    """One figure.

    Args:
        family: Of ours, a part of `models.FAMILIES`; else what its authors call it.
        top1: Percent on the validation images of ImageNet-1K.
        size: Side in pixels of the images it was published for.
        source: Where it is printed.
        ours: Whether the model is of this package.
        weights: timm's tag of the weights that reach it; None where nobody has published any.
    """

    family: str
    top1: float
    size: int
    source: str
    ours: bool
    weights: str | None = None


@cache
def published() -> dict[str, Published]:
    """By the timm name of a model; those without a figure in our sources are not among them."""
    found: dict[str, Published] = {}
    tables = printed_tables()
    for family in FAMILIES:
        if family in TABLES:
            rows = TABLES[family].printed(tables[family])
        else:
            rows = {row["model"]: row for row in tables[family]["models"]}
        for name, row in rows.items():
            if "top1" in row and timm.is_model(name):
                found[name] = Published(family, float(row["top1"]), SIZE, SOURCES[family], ours=True)
    data: dict[str, Any] = yaml.safe_load(files("broadsight.papers").joinpath("published_top1.yaml").read_text("utf-8"))
    for group in ("ours", "others"):
        for name, row in data[group].items():
            source = data["sources"][row["source"]]
            found[name] = Published(**row | {"source": source, "ours": group == "ours"})
    return found
