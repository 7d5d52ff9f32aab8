"""The tables of the context broadcasting supplement: what they print, and how each row is built."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from ..inspection.macs import blank_model, count_calls
from ..layers import ContextBroadcast
from ..layers.context_broadcast import OPERATIONS
from .tables import Row, more_rows, static_figures

ADDED = "added operations"


def rows(tables: dict[str, Any]) -> Iterator[Row]:
    """Every figure once, though several tables print it."""
    more = more_rows("context_broadcast")
    for where, name, figures in more["baselines"]:
        yield f"{where}: {name}", figures, partial(blank_model, name)
    for name, entry in _registered(tables).items():
        yield f"Table S1: {name}", static_figures(entry), partial(blank_model, name)
    listed = {more["rows"][row]: added for row, added in tables["added_mops_vit_small"].items()}
    for where, name, added, _ in more["added"]:
        yield f"{where}: {name}", {ADDED: listed.get(name, added)}, partial(blank_model, name)


def printed(tables: dict[str, Any]) -> dict[str, dict[str, str]]:
    """What the tables print for registered models, by name."""
    more = more_rows("context_broadcast")
    accuracies = {name: top1 for _, name, _, top1 in more["added"] if top1} | more["also_on"]
    return _registered(tables) | {name: {"top1": top1} for name, top1 in accuracies.items()}


def _registered(tables: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Rows such as "deit_tiny_distilled + cb" by the name of our model."""
    return {entry["model"].replace(" + ", "_"): entry for entry in tables["models"]}


def added_operations(model: nn.Module) -> float:
    """Millions of operations that context broadcasting adds at 224 pixels, counted where they are executed."""

    def added(module: nn.Module, inputs: tuple, output: Any) -> int:
        return OPERATIONS[module.kind] * output.numel() if isinstance(module, ContextBroadcast) else 0

    return count_calls(model, (1, 3, 224, 224), beyond=added)[1] / 1e6
