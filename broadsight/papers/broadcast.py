"""The tables of the context broadcasting supplement: how each row is built, and why some cannot be reproduced."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..inspection.macs import blank_model
from ..layers import ContextBroadcast
from ..layers.context_broadcast import OPERATIONS
from .map import Row, static_figures

ADDED = "added operations"
SIZE = (224, 224)

# Tables S5 and S6: the model, what it adds to ViT-S in millions of operations, top-1 accuracy. Some of this is in
# paper_tables.yaml too, under the names of NAMES.
TABLES: tuple[tuple[str, str, str, str | None], ...] = (
    ("Tables S5, S6", "vit_small_cb", "0.9", "80.5"),
    ("Table S5", "vit_small_cb_attn", "0.9", "80.1"),
    ("Table S5", "vit_small_cb_both", "1.8", "80.1"),
    ("Tables S5, S6", "vit_small_cb_gate", "0.9", "80.4"),
    ("Table S5", "vit_small_cb_gate_attn", "0.9", "80.0"),
    ("Table S5", "vit_small_cb_gate_both", "1.8", "80.0"),
    ("Tables S5, S6", "vit_small_cb_hybrid", "1.8", "80.5"),
    ("Table S5", "vit_small_cb_hybrid_attn", "1.8", "80.4"),
    ("Table S5", "vit_small_cb_hybrid_both", "3.6", None),
    ("Table S6", "vit_small_cb_front", "0.9", "79.9"),
    ("Table S6", "vit_small_cb_mid", "3.6", "80.5"),
    ("Table S6", "vit_small_cb_gate_front", "0.9", "80.3"),
    ("Table S6", "vit_small_cb_gate_mid", "3.6", "80.2"),
    ("Table S6", "vit_small_cb_hybrid_front", "1.8", "80.5"),
    ("Table S6", "vit_small_cb_hybrid_mid", "7.3", "80.1"),
)
NAMES = {
    "cb_mlp_end": "vit_small_cb",
    "cb_msa": "vit_small_cb_attn",
    "cb_both": "vit_small_cb_both",
    "cb_mlp_mid": "vit_small_cb_mid",
    "gate_mlp_end": "vit_small_cb_gate",
    "hybrid_mlp_end": "vit_small_cb_hybrid",
    "hybrid_mlp_mid": "vit_small_cb_hybrid_mid",
}
# Table S3 prints accuracies alone, after 120 epochs, and does not say which PVTv2 it is about.
ALSO_ON = {"swin_tiny_cb": "79.5"}
# Rows of Table S1 without broadcasting, and what Tables S5 and S6 print above theirs.
BASELINES = (
    ("Table S1", "deit_tiny_distilled_patch16_224", {"params": "5.9", "macs": "1.3"}),
    ("Table S1", "deit_small_distilled_patch16_224", {"params": "22.4", "macs": "4.6"}),
    ("Table S1", "deit_base_distilled_patch16_224", {"params": "87.3", "macs": "17.6"}),
    ("Tables S5, S6", "vit_small_patch16_224", {"macs": "1.260"}),
)

ONE_TOKEN_LESS = "the printed figure is that of the model without the distillation token"
CONTRADICTIONS = {
    ("deit_base_distilled_patch16_224", "macs"): ONE_TOKEN_LESS,
    ("deit_base_distilled_cb", "macs"): ONE_TOKEN_LESS,
    ("deit_base_distilled_cb_s", "macs"): ONE_TOKEN_LESS,
    (
        "vit_small_patch16_224",
        "macs",
    ): "1260 M is ViT-Ti's figure; the operations that the same rows add are ViT-S's",
}


def rows(tables: dict[str, Any]) -> Iterator[Row]:
    """Every figure once, though several tables print it."""
    for where, name, figures in BASELINES:
        yield f"{where}: {name}", dict(figures), partial(blank_model, name)
    for entry in tables["models"]:
        name = registered(entry["model"])
        yield f"Table S1: {name}", static_figures(entry), partial(blank_model, name)
    listed = {NAMES[row]: added for row, added in tables["added_mops_vit_small"].items()}
    for where, name, added, _ in TABLES:
        yield f"{where}: {name}", {ADDED: listed.get(name, added)}, partial(blank_model, name)


def printed(tables: dict[str, Any]) -> dict[str, dict[str, str]]:
    """What the tables print for registered models, by name."""
    found = {registered(entry["model"]): entry for entry in tables["models"]}
    accuracies = {name: top1 for _, name, _, top1 in TABLES} | ALSO_ON
    return found | {name: {"top1": top1} for name, top1 in accuracies.items() if top1 is not None}


def registered(row: str) -> str:
    """The name of our model for a row such as "deit_tiny_distilled + cb"."""
    return row.replace(" + ", "_")


def added_operations(model: nn.Module) -> float:
    """Millions of operations that context broadcasting adds for an image of SIZE, counted where they are executed."""
    counts: list[int] = []

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, ContextBroadcast)
        counts.append(OPERATIONS[module.kind] * output.numel())

    broadcasts = [module for module in model.modules() if isinstance(module, ContextBroadcast)]
    hooks = [module.register_forward_hook(count) for module in broadcasts]
    try:
        with torch.no_grad():
            like = next(model.parameters())
            model(torch.zeros(1, 3, *SIZE, device=like.device, dtype=like.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counts) / 1e6
