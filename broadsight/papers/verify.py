"""Recomputes the static figures of the papers' tables: paper, ours, and whether they agree at the printed precision."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fnmatch import fnmatch
from functools import partial
from types import ModuleType
from typing import Any

import timm
from rich.table import Table
from rich.text import Text
from torch import nn

from ..errors import first_line
from ..inspection.macs import blank_model, executed_macs
from ..layers import PartialAttention
from ..models import FAMILIES, STViT
from ..models.context_broadcast import ALIASES
from . import broadcast as broadcast_tables
from . import dense as dense_tables
from . import map as map_tables
from .macs import FVCORE, LAYERS, OLD_PROFILER, PRODUCTS, Convention, count
from .tables import Row, contradictions, more_rows, recorded, roundings, static_figures, tables_of
from .tables import published as published

Progress = Callable[[int, int | None, str], None]  # steps done, steps in all, what is being done now
Measured = tuple[float, float | None, str]  # ours, executed, how it was counted
SIZE = (224, 224)
SOURCES: dict[str, str] = more_rows("sources")  # by family
# What has a file of its own: tables of some families, and the tables of detectors and the like of all papers.
TABLES: dict[str, ModuleType] = {"map": map_tables, "context_broadcast": broadcast_tables, "dense": dense_tables}
SUBJECTS = (*SOURCES, "dense")  # what can be verified
# The counting tool that each family's tables fit. docs/models.md says how it was found.
CONVENTIONS = dict(stvit=FVCORE, emsnet=OLD_PROFILER, mat=FVCORE, partialformer=PRODUCTS, map=LAYERS)
CONVENTIONS |= dict.fromkeys(("context_broadcast", "pvt", "localvit"), PRODUCTS)


@dataclass(frozen=True)
class Check:
    """One printed figure beside ours. Parameters in millions; operations (MACs) in the unit of the row."""

    family: str
    row: str
    # "params", "macs", either "over" another model or "at" another image size (height x width), one of SIZES, or the
    # operations that context broadcasting adds.
    figure: str
    convention: str  # how operations are counted
    paper: str  # as printed
    ours: float | None  # of our model, in the paper's formulation; None if there is no model to run
    executed: float | None  # operations that our faster form really runs
    # "match" at the printed precision, "explained" where the papers contradict themselves or do not say enough, "not
    # run" where there is no model, or "miss": neither, or ours is not what is recorded of the model.
    status: str
    note: str = ""  # why it is explained or was not run, or what ours was


def verify(families: Sequence[str] = (), progress: Progress | None = None) -> list[Check]:
    """Recompute every static figure of some of SUBJECTS, of all if none is named; progress is told before each row."""
    if strange := [family for family in families if family not in SUBJECTS]:
        raise ValueError(f"unknown family {strange[0]!r}; choose among {', '.join(SUBJECTS)}")
    rows = [(family, *row) for family in families or SUBJECTS for row in _rows(family)]
    checks = []
    for done, (family, row, printed, build) in enumerate(rows):
        if progress:
            progress(done, len(rows), f"{family}: {row}")
        checks += _check(family, row, printed, build)
    return checks


def render(checks: Sequence[Check]) -> Table:
    """The checks as a table for the terminal."""
    caption = "params in M, macs in G (M where marked), at 224x224 unless marked (height x width)"
    table = Table(title="Published figures, recomputed", caption=caption)
    numbers = ("paper", "ours", "executed")
    for column in ("family", "row", "figure", "counted as", *numbers, "match", "note"):
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
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
    """Our models that match a pattern, by default each once: sizes computed here beside the published ones."""
    known = [(family, name) for family in families for name in timm.list_models(module=family)]
    names = [(of, name) for of, name in known if (fnmatch(name, pattern) if pattern else name not in ALIASES)]
    printed = {family: printed_of_models(family) for family in families}
    rows = []
    for done, (family, name) in enumerate(names):
        if progress:
            progress(done, len(names), name)
        row: dict[str, Any] = {"model": name, "family": family, "params": None, "macs": None}
        source, paper = SOURCES.get(family, ""), printed[family].get(ALIASES.get(name, name), {})
        try:
            model = blank_model(name)
            row |= {"params": sum(p.numel() for p in model.parameters()), "macs": executed_macs(model, SIZE)}
        except ImportError as error:  # a package that we do not install ourselves
            source = first_line(error)
        for key, figure in {"paper_params_m": "params", "paper_macs_g": "macs", "paper_top1": "top1"}.items():
            row[key] = float(paper[figure]) if figure in paper else None
        rows.append(row | {"source": source})
    return rows


def printed_of_models(family: str) -> dict[str, dict[str, str]]:
    """What the tables print for registered models, by name."""
    tables, ours = tables_of(family), set(timm.list_models(module=family))
    if family in TABLES:
        return TABLES[family].printed(tables)
    return {entry["model"]: entry for entry in tables["models"] if entry["model"] in ours}


def _rows(family: str) -> Iterator[Row]:
    tables = published() if family == "dense" else tables_of(family)
    if family in TABLES:
        yield from TABLES[family].rows(tables)
        return
    for entry in tables["models"]:
        yield entry["model"], static_figures(entry), partial(blank_model, entry["model"])
    for entry in tables.get("isotropic", []):
        dims, depths = (tuple(map(int, entry[key])) for key in ("channels", "depths"))
        heads = tuple(dim // 32 for dim in dims)  # as Swin, with which it compares; counts hardly depend on it
        how = dict(stem="patch", position="relative" if entry["rpe"] == "true" else "none", ffn="plain")
        build = partial(blank_model, STViT, dims, depths, heads, projection=0, **how)
        yield f"isotropic {[*dims]}, {how['position']} position", static_figures(entry), build
    if ablation := more_rows("ablations").get(family):
        for entry in tables[ablation["table"]]:
            changes = ablation["rows"][entry["variant"]].items()
            settings = {name: tuple(map(int, value)) if isinstance(value, list) else value for name, value in changes}
            yield entry["variant"], static_figures(entry), partial(blank_model, ablation["model"], **settings)
    if module := tables.get("attention_module"):
        build = partial(_AttentionModule, *(int(module[name]) for name in ("height", "width", "dim", "heads")))
        yield "one attention module", {"macs": module["mmacs"]}, build


class _AttentionModule(PartialAttention):
    """One module for itself, whose operations are in millions."""

    def __init__(self, height: int, width: int, dim: int, heads: int):
        super().__init__(dim, heads, (39, 3136))
        self.inputs = (1, height * width, dim), (1, height * width)


def _check(family: str, row: str, printed: dict[str, str], build: Callable[[], nn.Module] | str) -> list[Check]:
    if isinstance(build, str):
        return [Check(family, row, one, "", paper, None, None, "not run", build) for one, paper in printed.items()]
    name, model, dense = row.rpartition(": ")[2], build(), family == "dense"
    convention = dense_tables.convention(name) if dense else CONVENTIONS[family]
    if name.startswith(("isotropic", "davit")):
        # The isotropic rows fit when norms are left out (4.34 prints 4.3; with norms 4.35 would print 4.4). DaViT's
        # figure is quoted from its own paper.
        convention = PRODUCTS
    measured: dict[str, Measured] = {}
    checks = []
    for figure, paper in printed.items():
        quantity, _, baseline = figure.partition(" over ")
        ours, run, counted = measured[figure] = measured.get(quantity) or _measure(model, quantity, convention)
        if baseline:
            its, its_run, _ = _measure(blank_model(baseline), quantity, convention)
            ours, run = ours - its, None if run is None or its_run is None else run - its_run
        allowed = roundings(row.partition(" on ")[0] if dense else family, figure)
        place, status, note = (family, name, figure), "match", ""
        held = recorded().get(place)
        if held is not None and shown(ours) != held:
            status, note = "miss", f"ours is {shown(ours)}, but was {held}: the model has changed"
        elif not any(_prints(ours, paper, rounding) for rounding in allowed):
            note = contradictions().get(place, "")
            status = "explained" if note and held else "miss"
        checks.append(Check(family, row, figure, counted, paper, ours, run, status, note))
    return checks


def _measure(model: nn.Module, figure: str, convention: Convention) -> Measured:
    """A figure of the model in the tables' unit; operations also as executed, and how they were counted."""
    figure, _, size = figure.partition(" at ")
    if figure in map_tables.SIZES:
        return float(map_tables.SIZES[figure](model)), None, ""
    if figure == broadcast_tables.ADDED:
        return broadcast_tables.added_operations(model), None, "sums, products, in M"
    if figure == "params":
        return sum(p.numel() for p in model.parameters()) / 1e6, None, ""
    if isinstance(model, _AttentionModule):
        executed, extra = count(model, *model.inputs, convention=convention)
        return (executed + extra) / 1e6, executed / 1e6, f"{convention.name}, in M"
    height, width = (int(side) for side in (size.split("x") * 2)[:2]) if size else SIZE
    executed, extra = count(model, (1, 3, height, width), convention=convention)
    return (executed + extra) / 1e9, executed / 1e9, convention.name


def shown(ours: float) -> str:
    """Ours as it is recorded."""
    return f"{ours:.7g}"


def _prints(ours: float, paper: str, rounding: str) -> bool:
    printed = Decimal(paper)
    return Decimal(repr(ours)).quantize(Decimal(1).scaleb(int(printed.as_tuple().exponent)), rounding) == printed
