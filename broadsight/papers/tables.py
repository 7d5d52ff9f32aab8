"""The published figures, every number as printed: facts of the papers, and in more_rows.yaml what they leave out."""

from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from torch import nn

# A row: its name, the figures as printed, and what builds its model, or why nothing does.
Row = tuple[str, dict[str, str], Callable[[], nn.Module] | str]


@cache
def published(file: str = "paper_tables.yaml") -> dict[str, Any]:
    """The figures of a file, by family. Not to be changed."""
    return yaml.load(files("broadsight.papers").joinpath(file).read_text("utf-8"), Loader=yaml.BaseLoader)


def more_rows(topic: str) -> dict[str, Any]:
    """What paper_tables.yaml leaves out of the tables of a family."""
    return published("more_rows.yaml")[topic]


def tables_of(family: str) -> dict[str, Any]:
    """The tables of a family, by their names in paper_tables.yaml; `models` also has those that it leaves out."""
    tables = published().get(family, {})
    return {**tables, "models": [*tables.get("models", []), *more_rows("models").get(family, [])]}


@cache
def contradictions() -> dict[tuple[str, str, str], str]:
    """Why no reading reproduces a figure, by family, row and figure. Anything else that disagrees is a miss."""
    entries = [(family, entry) for family, some in more_rows("contradictions").items() for entry in some]
    return {(family, *place): entry["why"] for family, entry in entries for place in entry["figures"]}


@cache
def recorded() -> dict[tuple[str, str, str], str]:
    """Ours of every figure, by family, row and figure, as `benchmarks/record_figures.py` last wrote them."""
    rows = ((family, row, found) for family, some in published("ours.yaml").items() for row, found in some.items())
    return {(family, row, figure): ours for family, row, found in rows for figure, ours in found.items()}


def roundings(place: str, figure: str) -> Sequence[str]:
    """How a family, or a table of dense rows such as "Table 3.3: retinanet", may have come to the printed digits."""
    return more_rows("roundings").get(place, {}).get(figure.partition(" ")[0], (ROUND_HALF_UP,))


def static_figures(entry: dict[str, str]) -> dict[str, str]:
    """The figures of an entry that do not depend on training."""
    return {figure: entry[figure] for figure in ("params", "macs") if figure in entry}
