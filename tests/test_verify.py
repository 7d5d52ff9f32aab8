"""Every static figure of the four families is recomputed and agrees, but for the six that contradict themselves."""

import io
from collections import Counter
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from importlib.resources import files
from pathlib import Path

import pytest
import timm
from rich.console import Console

from broadsight import verify as verification
from broadsight.models import FAMILIES
from broadsight.verify import Check, catalogue, published, verify

SHARED = Path(__file__).parents[2] / "shared" / "paper_tables.yaml"
FIGURES = ("params", "macs", "mmacs")
EXPLAINED = {
    ("emsnet_xtiny", "params"),
    ("without fusion", "params"),
    ("without fusion", "macs"),
    ("without channel splitting", "macs"),
    ("static ratio 1/2:1/4:1/4", "macs"),
    ("static ratio 1/4:1/4:1/2", "macs"),
}


@pytest.fixture(scope="module")
def steps() -> list[tuple[int, int, str]]:
    return []


@pytest.fixture(scope="module")
def checks(steps) -> list[Check]:
    return verify(progress=lambda done, total, row: steps.append((done, total, row)))


def printed_figures(family: str) -> list[str]:
    """The figures of a family's static tables as they were printed."""
    tables = [table for name, table in published()[family].items() if name != "dense"]
    rows = [row for table in tables for row in (table if isinstance(table, list) else [table])]
    return [row[figure] for row in rows for figure in FIGURES if figure in row]


def test_verify__no_figure_is_missed(checks):
    assert [check for check in checks if check.status == "miss"] == []
    assert {check.status for check in checks} == {"match", "explained"}


def test_verify__only_the_contradictory_rows_are_explained(checks):
    explained = {(check.row, check.figure): check for check in checks if check.status == "explained"}
    assert explained.keys() == EXPLAINED
    assert all(check.family == "emsnet" and check.note for check in explained.values())
    assert all(not check.note for check in checks if check.status == "match")
    assert {(row, figure) for _, row, figure in verification.CONTRADICTIONS} == EXPLAINED  # no excuse unused


@pytest.mark.parametrize("family", FAMILIES)
def test_verify__covers_every_printed_figure(checks, family):
    mine = [check for check in checks if check.family == family]
    figures = printed_figures(family)
    assert len(figures) > 6 and Counter(check.paper for check in mine) == Counter(figures)
    assert len({(check.row, check.figure) for check in mine}) == len(mine)
    assert set(timm.list_models(module=family)) <= {check.row for check in mine}


def test_verify__a_match_is_within_one_unit_of_the_last_digit(checks):
    for check in checks:
        unit = 10.0 ** Decimal(check.paper).as_tuple().exponent
        off = check.ours - float(check.paper)
        assert (-unit / 2 <= off < unit) == (check.status == "match"), check


def test_verify__executed_is_given_for_operations_alone(checks):
    for check in checks:
        assert (check.executed is None) == (check.figure == "params")
        assert check.executed is None or 0 < check.executed <= check.ours


def test_verify__reports_every_row_before_it_is_computed(checks, steps):
    rows = dict.fromkeys(f"{check.family}: {check.row}" for check in checks)
    assert steps == [(i, len(rows), row) for i, row in enumerate(rows)]


def test_verify__unknown_family_is_refused():
    with pytest.raises(ValueError, match="^unknown family 'resnet'; choose among " + ", ".join(FAMILIES) + "$"):
        verify(["mat", "resnet"], progress=lambda *_: pytest.fail("computed before the names were checked"))


@pytest.mark.parametrize(
    ("ours", "paper", "rounding", "expected"),
    [
        (4.449, "4.4", ROUND_HALF_UP, True),
        (4.35, "4.4", ROUND_HALF_UP, True),
        (4.3499, "4.4", ROUND_HALF_UP, False),
        (4.45, "4.4", ROUND_HALF_UP, False),
        (2.5999, "2.5", ROUND_DOWN, True),
        (2.4999, "2.5", ROUND_DOWN, False),
        (2.6, "2.5", ROUND_DOWN, False),
        (24.5, "25", ROUND_HALF_UP, True),
        (24.4999, "25", ROUND_HALF_UP, False),
        (3.04, "3.0", ROUND_HALF_UP, True),
        (3.04, "3.00", ROUND_HALF_UP, False),
        (0.00004, "0.0", ROUND_HALF_UP, True),
    ],
)
def test_prints__at_the_printed_precision(ours, paper, rounding, expected):
    assert verification._prints(ours, paper, rounding) == expected


def test_render__shows_every_check(checks):
    output = io.StringIO()
    Console(width=240, file=output).print(verification.render(checks))
    text = output.getvalue()
    assert text.count("no, explained") == len(EXPLAINED) and " NO " not in text
    for check in checks:
        assert check.row in text and f"{check.ours:.3f}" in text


def test_published__is_the_shared_table():
    if not SHARED.exists():
        pytest.skip("paper_tables.yaml is not beside the repository")
    assert files("broadsight").joinpath("paper_tables.yaml").read_bytes() == SHARED.read_bytes()


def test_published__numbers_are_the_printed_text():
    assert next(row for row in published()["emsnet"]["models"] if row["model"] == "emsnet_xtiny")["params"] == "3.0"


def test_catalogue__by_pattern():
    steps = []
    rows = catalogue("mat_*", progress=lambda *step: steps.append(step))
    names = timm.list_models(module="mat")
    assert [row["model"] for row in rows] == names
    assert steps == [(i, len(names), name) for i, name in enumerate(names)]
    for row in rows:
        assert row["family"] == "mat" and "thesis" in row["source"]
        assert row["params"] / 1e6 == pytest.approx(row["paper_params_m"], abs=5e-4)
        assert row["macs"] / 1e9 == pytest.approx(row["paper_macs_g"], rel=0.05)
        assert 70 < row["paper_top1"] < 90
    assert catalogue("mat_[!1-5]") == [] and catalogue("resnet*") == []


def test_catalogue__a_model_without_published_accuracy():
    (row,) = catalogue("stvit_small")
    assert row["paper_top1"] is None and row["paper_params_m"] == 25 and row["paper_macs_g"] == 4.4
