"""Rows with given times, tables as text, and a benchmark that does not wait for large products."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from broadsight.benchmark import run as benchmark
from broadsight.benchmark.run import Row, Summary
from broadsight.benchmark.timing import summarize

MACHINE = {"cpu": "a CPU", "device": "cpu", "cores": 2, "load_before": None, "load_after": None}
MACHINE |= {"gemm_flops": {"fp32": 1e9}, "versions": {"torch": "2.0+cpu", "timm": "1.0"}, "rounds_completed": 1}


@pytest.fixture(scope="session", autouse=True)
def _small_products():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "GEMM_SIZES", (64,))
        yield


def row(model: str, runtime: str, wall: float | list[float], size: int | None = 224, **figures) -> Row:
    """A row with the given milliseconds of every round."""
    wall = [wall] if isinstance(wall, int | float) else wall
    cpu = figures.pop("cpu", None) or wall
    usual = dict(params=1, macs=1, throughput=1.0, peak_fraction=1.0, peak_bytes=None, page_faults=None, launches=None)
    usual |= dict.fromkeys(("ratio", "cpu_ratio", "speedup"), Summary(1.0, 1.0, 0.0))
    usual |= dict(saved_bytes=None, saved_ratio=None, size=None if size is None else [size] * 2)
    usual |= dict(wall_ms=summarize(wall), cpu_ms=summarize(cpu), wall_samples_ms=wall, cpu_samples_ms=cpu)
    return Row(model=model, runtime=runtime, **usual | figures)


def shown(table: Table) -> str:
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()
