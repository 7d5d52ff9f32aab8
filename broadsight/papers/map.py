"""The tables of the MAP paper and its supplement: what they print, and how each row is built."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import timm
import torch
from torch import nn

from ..inspection.macs import blank_model
from ..layers import AveragePool, MultiTokenPool
from ..models._faster_vit import INSTALL, MISSING, packaged
from ..models.map import VIT_STYLE
from ..surgery.pooling import PooledModel, swap_pool
from .tables import Row, more_rows, static_figures

NO_FASTER_VIT = "" if find_spec("fastervit") else f"{MISSING}; {INSTALL}"


def rows(tables: dict[str, Any]) -> Iterator[Row]:
    """Every figure once, though several tables print it; the supplement's tables have an S."""
    more = more_rows("map")
    modules = {}  # rows of Table S1; the last figures are those over the model without the pooling
    for name, baseline, *figures in more["modules"]:
        columns = (*MODULE_SIZES, f"params over {baseline}", f"macs over {baseline}")
        modules[name] = dict(zip(columns, figures, strict=True))
    for entry in tables["models"]:
        backbone, pool = entry["backbone"], entry["pool"].split()[0]
        where, name = more["models"][f"{backbone} {pool}"]
        build = partial(blank_model, name) if timm.is_model(name) else partial(blank_model, swap_pool, backbone, pool)
        printed = static_figures(entry) | modules.get(name, {})
        yield f"{where}: {name}", printed, (NO_FASTER_VIT if backbone == "faster_vit_3" else "") or build
    yield "README, Table S9: map_resnet50", static_figures(more["released"]), partial(blank_model, "map_resnet50")
    for entry in tables["scaled_resnet_d"]:
        sizes = {f"{what} of stage {i}": n for what in ("layers", "channels") for i, n in enumerate(entry[what], 1)}
        printed = {**sizes, "macs at 224": entry["macs_224"], "macs at 320": entry["macs_320"]}
        yield f"Tables S6, S7: {entry['model']}", printed, partial(blank_model, entry["model"])
    for entry in (*tables["ablation_resnet50_groups_tokens"], *more["more_groups"]):
        groups, tokens = int(entry["groups"]), int(entry["tokens"])
        build = partial(_grouped, "resnet50", groups, tokens, 384 if groups == 4 else 192)
        yield f"Table 6: resnet50, {groups} x {tokens} tokens", static_figures(entry), build
    build = partial(_repooled, "map_pit_s", AveragePool, norm=True)  # of patches, without timm's class token
    yield "Table 2: pit_s, gap", {"params": "23.3", "macs": "2.4"}, build
    yield f"Table 8: {VIT_STYLE}", static_figures(more["vit_style"]), partial(blank_model, VIT_STYLE)
    for name, step, groups, tokens, macs in more["steps"]:
        build = partial(_grouped, name, int(groups), int(tokens))
        yield f"Table 9: {name}, {step} ({groups} x {tokens})", {"macs": macs}, build
    for where, name, params, macs in more["baselines"]:
        build = partial(blank_model, name) if timm.is_model(name) else "timm has no such model"
        build = NO_FASTER_VIT or partial(blank_model, packaged, 1000) if name == "FasterViT-3" else build
        yield f"{where}: {name}", {"params": params, "macs at 320" if "nfnet" in name else "macs": macs}, build


def printed(tables: dict[str, Any]) -> dict[str, dict[str, str]]:
    """What the tables print for registered models, by name."""
    more = more_rows("map")
    names = {row: name for row, (_, name) in more["models"].items()}
    pooled = {names[f"{entry['backbone']} {entry['pool'].split()[0]}"]: entry for entry in tables["models"]}
    scaled = {e["model"]: {"macs": e["macs_224"], "top1": e["top1_224"]} for e in tables["scaled_resnet_d"]}
    return pooled | scaled | {"map_resnet50": more["released"], VIT_STYLE: more["vit_style"]}


MODULE_SIZES: dict[str, Callable[[Any], int]] = {
    "input size": lambda model: sum(model.head.merge.used),
    "hidden size": lambda model: model.head.dim,
    "MLP size": lambda model: (
        model.head.blocks[0].mlp.fc2.weight[0, 0].numel() * model.head.blocks[0].mlp.channel_groups
    ),
    "heads": lambda model: model.head.blocks[0].heads,
    "groups": lambda model: model.head.groups,
    "tokens": lambda model: model.head.tokens,
}
SIZES = MODULE_SIZES.copy()
for i in (1, 2, 3, 4):
    SIZES[f"layers of stage {i}"] = lambda model, i=i: len(model.backbone.get_submodule(f"layer{i}"))
    SIZES[f"channels of stage {i}"] = lambda model, i=i: model.backbone.get_submodule(f"layer{i}.0.conv1").out_channels


def _grouped(backbone: str, groups: int, tokens: int, attn_dim: int | None = None) -> nn.Module:
    """A model of the MAP paper with another number of tokens; a single one needs no average."""
    usual: Any = blank_model("map_resnet50_paper" if backbone == "resnet50" else f"map_{backbone}")
    same: dict[str, Any] = dict(level=usual.head.level, dim=usual.head.dim, groups=groups, tokens=tokens)
    attn_dim = attn_dim or usual.head.blocks[0].q.out_features
    return _repooled(usual, MultiTokenPool, mean_token=tokens > 1, attn_dim=attn_dim, **same)


def _repooled(model: Any, pool: Callable[..., nn.Module], **arguments: Any) -> nn.Module:
    """A pooled model, or one of ours by its name, with another pool."""
    usual: Any = blank_model(model) if isinstance(model, str) else model
    with torch.device("meta"):
        head = pool(usual.pyramid.channels, usual.num_classes, **arguments)
    return PooledModel(usual.backbone, usual.pyramid, head)
