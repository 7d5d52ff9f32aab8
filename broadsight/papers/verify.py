"""Recomputes the static figures of the papers' tables: paper, ours, and whether they agree at the printed precision."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from fnmatch import fnmatch
from importlib.resources import files
from types import ModuleType
from typing import Any

import timm
import torch
import yaml
from rich.table import Table
from rich.text import Text
from torch import nn

from ..inspection.macs import blank_model, executed_macs
from ..layers import PartialAttention
from ..models import FAMILIES, STViT
from ..models.context_broadcast import ALIASES
from . import broadcast as broadcast_tables
from . import dense as dense_tables
from . import map as map_tables
from .macs import FVCORE, LAYERS, OLD_PROFILER, PRODUCTS, Convention, count
from .map import Row

Progress = Callable[[int, int | None, str], None]  # steps done, steps in all, what is being done now

SIZE = (224, 224)

SOURCES = {
    "stvit": "Huang et al., CVPR 2023, supplement, Tables I, II",
    "emsnet": "thesis, chapter 3, Tables 3.1, 3.5, 3.7, 3.9",
    "mat": "thesis, chapter 4, Tables 4.2, 4.4, 4.9",
    "partialformer": "thesis, chapter 5, Table 5.1 and section 5.3.3",
    "map": "MAP, WACV 2025, Tables 1-3, 6, 8, 9; supplement, Tables 1, 4, 6, 7",
    "context_broadcast": "Hyeon-Woo et al., ICCV 2023, supplement, Tables S1, S3, S5, S6",
}

# What has a file of its own: tables of some families, and the tables of detectors and the like of all papers.
TABLES: dict[str, ModuleType] = {"map": map_tables, "context_broadcast": broadcast_tables, "dense": dense_tables}
SUBJECTS = (*SOURCES, "dense")  # what can be verified

# The counting tool that each family's tables fit. docs/models.md says how it was found.
CONVENTIONS = {
    "stvit": FVCORE,
    "emsnet": OLD_PROFILER,
    "mat": FVCORE,
    "partialformer": PRODUCTS,
    "map": LAYERS,
    "context_broadcast": PRODUCTS,
}

# The EMSNet tables truncate: one prints 2.5 for the model that another prints as 2.56. Operation counts do either.
ROUNDINGS = {
    ("emsnet", "params"): (ROUND_DOWN,),
    ("emsnet", "macs"): (ROUND_DOWN, ROUND_HALF_UP),
}

# Rows that no reading reproduces, and why. Anything else that disagrees is a miss.
CONTRADICTIONS = {
    (
        "emsnet",
        "emsnet_xtiny",
        "params",
    ): "no setting fits: the printed widths, depths and ratios give 2.29 M and 0.7 G; "
    "3.0 M needs wider MLPs, which then give 0.83 G",
    (
        "emsnet",
        "without fusion",
        "params",
    ): "contradicts itself: stem, transitions, MLPs and head alone take 1.80 M and "
    "0.42 G; the 0.32 M left cannot cost the 0.10 G left",
    ("emsnet", "without fusion", "macs"): "contradicts itself: see its parameters",
    ("emsnet", "static ratio 1/2:1/4:1/4", "macs"): "1.6 % low under every counting convention; parameters agree",
    ("emsnet", "static ratio 1/4:1/4:1/2", "macs"): "1.5 % low under every counting convention; parameters agree",
    (
        "emsnet",
        "without channel splitting",
        "macs",
    ): "2.2 % low: how this row was built is a guess among 480 that fit its parameters",
    **{
        (family, *place): reason for family, tables in TABLES.items() for place, reason in tables.CONTRADICTIONS.items()
    },
}


@dataclass(frozen=True)
class Check:
    """One printed figure beside ours. Parameters in millions; operations (MACs) in the unit of the row.

    Args:
        family, row, figure: Which number of which table; figure is "params", "macs", either "over" another model or
            "at" another image size (height x width), one of SIZES, or the operations that context broadcasting adds.
        convention: How operations are counted.
        paper: The figure as printed.
        ours: The same figure of our model, in the paper's formulation; None if there is no model to run.
        executed: Operations that our faster form really runs, in the same unit.
        status: "match" at the printed precision, "explained" where the papers contradict themselves or do not say
            enough, "not run" where there is no model, or "miss".
        note: Why a figure is explained or was not run.
    """

    family: str
    row: str
    figure: str
    convention: str
    paper: str
    ours: float | None
    executed: float | None
    status: str
    note: str = ""


def published() -> dict[str, Any]:
    """The published figures, every number as the text that was printed."""
    text = files("broadsight.papers").joinpath("paper_tables.yaml").read_text("utf-8")
    return {family: {"models": []} for family in FAMILIES} | yaml.load(text, Loader=yaml.BaseLoader)


def verify(families: Sequence[str] = (), progress: Progress | None = None) -> list[Check]:
    """Recompute every static figure of the given families' classifiers, of all dense tables, or of all.

    Args:
        families: Some of SUBJECTS; none means all.
        progress: Called before each row is computed: rows done, rows in all, the row's name.
    """
    for family in families:
        if family not in SUBJECTS:
            raise ValueError(f"unknown family {family!r}; choose among {', '.join(SUBJECTS)}")
    rows = [(family, *row) for family in families or SUBJECTS for row in _rows(family)]
    checks = []
    for done, (family, row, printed, build) in enumerate(rows):
        if progress:
            progress(done, len(rows), f"{family}: {row}")
        checks += _check(family, row, printed, build)
    return checks


def render(checks: Sequence[Check]) -> Table:
    """The checks as a table for the terminal."""
    table = Table(
        title="Published figures, recomputed",
        caption="params in M, macs in G (M where marked), at 224x224 unless marked (height x width)",
    )
    for column in ("family", "row", "figure", "counted as"):
        table.add_column(column, overflow="fold")
    for column in ("paper", "ours", "executed"):
        table.add_column(column, justify="right")
    table.add_column("match")
    table.add_column("note", overflow="fold")
    marks = {"match": ("yes", "green"), "explained": ("no, explained", "yellow"), "miss": ("NO", "red")}
    for c in checks:
        ours, executed = ("" if x is None else f"{x:.3f}" for x in (c.ours, c.executed))
        if c.figure in map_tables.SIZES:
            ours = f"{c.ours:.0f}"
        mark = Text(*marks.get(c.status, (c.status, "yellow")))
        table.add_row(c.family, c.row, c.figure, c.convention, c.paper, ours, executed, mark, c.note)
    return table


def catalogue(
    pattern: str | None = None, progress: Progress | None = None, families: Sequence[str] = FAMILIES
) -> list[dict[str, Any]]:
    """Our registered models that match a wildcard pattern: sizes computed here beside the published figures.

    Without a pattern a model that has two names is listed once.
    """
    second_names = ALIASES if pattern is None else ()
    chosen = {
        family: [n for n in timm.list_models(module=family) if fnmatch(n, pattern or "*") and n not in second_names]
        for family in families
    }
    total = sum(len(names) for names in chosen.values())
    rows: list[dict[str, Any]] = []
    for family, names in chosen.items():
        printed = _printed_of_models(family)
        for name in names:
            if progress:
                progress(len(rows), total, name)
            model = blank_model(name)
            paper = printed.get(ALIASES.get(name, name), {})
            rows.append(
                {
                    "model": name,
                    "family": family,
                    "params": sum(p.numel() for p in model.parameters()),
                    "macs": executed_macs(model, SIZE),
                    "paper_params_m": _number(paper.get("params")),
                    "paper_macs_g": _number(paper.get("macs")),
                    "paper_top1": _number(paper.get("top1")),
                    "source": SOURCES.get(family, ""),
                }
            )
    return rows


def _rows(family: str) -> Iterator[Row]:
    tables = published() if family == "dense" else published()[family]
    if family in TABLES:
        yield from TABLES[family].rows(tables)
        return
    for entry in tables["models"]:
        yield entry["model"], entry, lambda name=entry["model"]: blank_model(name)
    if family == "stvit":
        for entry in tables["isotropic"]:
            dims, depths = [int(n) for n in entry["channels"]], [int(n) for n in entry["depths"]]
            position = "relative" if entry["rpe"] == "true" else "none"
            yield f"isotropic {dims}, {position} position", entry, lambda a=(dims, depths, position): _isotropic(*a)
    elif family == "emsnet":
        for entry in tables["ablation_xxtiny"]:
            yield (
                entry["variant"],
                entry,
                lambda kw=EMSNET_ABLATIONS[entry["variant"]]: blank_model("emsnet_xxtiny", **kw),
            )
    elif family == "mat":
        for entry in tables["ablation_mat_2"]:
            yield entry["variant"], entry, lambda kw=MAT_ABLATIONS[entry["variant"]]: blank_model("mat_2", **kw)
    elif family == "partialformer":
        yield "one attention module", tables["attention_module"], lambda: nn.Identity()


# How the rows of the ablation tables are built.
EMSNET_ABLATIONS: dict[str, dict[str, Any]] = {
    "baseline": dict(mixer="baseline"),
    "whiten": dict(mixer="whiten"),
    "patch2": dict(mixer="patch2"),
    "patch4": dict(mixer="patch4"),
    "gated": dict(mixer="gated"),
    "c_mhsa": dict(mixer="c_mhsa"),
    "g_mhsa (full)": {},
    "static ratio 1/2:1/4:1/4": dict(ratios=(2, 1, 1)),
    "static ratio 1/4:1/4:1/2": dict(ratios=(1, 1, 2)),
    "without fusion": dict(mixer="no_fusion"),
    "without channel splitting": dict(mixer="no_split"),
}
MAT_ABLATIONS: dict[str, dict[str, Any]] = {
    "mat blocks in stages 1-4": dict(mixer_stages=(1, 2, 3, 4)),
    "mat blocks in stages 2-4": dict(mixer_stages=(2, 3, 4)),
    "mat blocks in stage 4 only": dict(mixer_stages=(4,)),
    "pure mlp": dict(mixer="none"),
    "window attention only": dict(mixer="window"),
    "3x3 conv patch embedding": dict(embed="conv"),
    "patch merging": dict(embed="merge"),
}


def _check(family: str, row: str, printed: dict[str, str], build: Callable[[], nn.Module] | str) -> list[Check]:
    name = row.rpartition(": ")[2]
    if isinstance(build, str):
        return [
            Check(family, row, figure, "", paper, None, None, "not run", build) for figure, paper in printed.items()
        ]
    if "mmacs" in printed:  # a single module, in millions
        tokens, dim, heads = int(printed["height"]) * int(printed["width"]), int(printed["dim"]), int(printed["heads"])
        module = PartialAttention(dim, heads, (39, 3136))
        executed, extra = count(module, (1, tokens, dim), (1, tokens), convention=PRODUCTS)
        figures = {"macs": printed["mmacs"]}
        measured = {"macs": ((executed + extra) / 1e6, executed / 1e6, f"{PRODUCTS.name}, in M")}
    else:
        model, convention = build(), _convention(family, name)
        figures = printed if family in TABLES else map_tables.static_figures(printed)
        measured = {}
        for figure in figures:
            quantity, _, baseline = figure.partition(" over ")
            measured[figure] = measured.get(quantity) or _measure(model, quantity, convention)
            if baseline:
                measured[figure] = _difference(measured[figure], _measure(blank_model(baseline), quantity, convention))
    checks = []
    for figure, paper in figures.items():
        (ours, run, counted), note = measured[figure], ""
        if any(_prints(ours, paper, rounding) for rounding in _roundings(family, row, figure)):
            status = "match"
        else:
            note = CONTRADICTIONS.get((family, name, figure), "")
            status = "explained" if note else "miss"
        checks.append(Check(family, row, figure, counted, paper, ours, run, status, note))
    return checks


Measured = tuple[float, float | None, str]  # ours, executed, how it was counted


def _measure(model: nn.Module, figure: str, convention: Convention) -> Measured:
    """A figure of the model in the tables' unit; operations also as executed, and how they were counted."""
    figure, _, size = figure.partition(" at ")
    if figure in map_tables.SIZES:
        return float(map_tables.SIZES[figure](model)), None, ""
    if figure == broadcast_tables.ADDED:
        return broadcast_tables.added_operations(model), None, "sums, products, in M"
    if figure == "params":
        return sum(p.numel() for p in model.parameters()) / 1e6, None, ""
    height, width = (int(side) for side in (size.split("x") * 2)[:2]) if size else SIZE
    executed, extra = count(model, (1, 3, height, width), convention=convention)
    return (executed + extra) / 1e9, executed / 1e9, convention.name


def _difference(ours: Measured, its: Measured) -> Measured:
    return ours[0] - its[0], None if ours[1] is None or its[1] is None else ours[1] - its[1], ours[2]


def _roundings(family: str, row: str, figure: str) -> Sequence[str]:
    if family == "dense":
        return dense_tables.roundings(row, figure)
    return ROUNDINGS.get((family, figure), (ROUND_HALF_UP,))


def _convention(family: str, name: str) -> Convention:
    if family == "dense":
        return dense_tables.convention(name)
    # The isotropic rows fit when norms are left out (4.34 prints 4.3; with norms 4.35 would print 4.4). DaViT's figure
    # is quoted from its own paper.
    return PRODUCTS if name.startswith(("isotropic", "davit")) else CONVENTIONS[family]


def _prints(ours: float, paper: str, rounding: str) -> bool:
    printed = Decimal(paper)
    return Decimal(repr(ours)).quantize(Decimal(1).scaleb(int(printed.as_tuple().exponent)), rounding) == printed


def _printed_of_models(family: str) -> dict[str, dict[str, str]]:
    """What the tables print for registered models, by name."""
    tables = published()[family]
    if family in TABLES:
        return TABLES[family].printed(tables)
    return {entry["model"]: entry for entry in tables["models"]}


def _isotropic(dims: Sequence[int], depths: Sequence[int], position: str) -> nn.Module:
    heads = [dim // 32 for dim in dims]  # as Swin, with which that table compares; the counts hardly depend on it
    with torch.device("meta"):
        return STViT(dims, depths, heads, projection=0, stem="patch", position=position, ffn="plain")


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)
