"""The tables of docs/performance.md say what the study found, flattering or not."""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest

from broadsight.benchmark.run import Report
from broadsight.benchmark.settings import Settings

from .conftest import MACHINE, row

TABLES = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "performance_tables.py"))
COSTS = dict(start_up_s=0.5, resident_bytes=3_000_000, artefact_bytes=2_500_000, import_s=1.0, peak_bytes=1)


@pytest.fixture
def file(tmp_path) -> str:
    rows = [
        *(row("mat_1", "eager", 30), row("mat_1", "onnx", 20, **COSTS), row("mat_1", "int8", 5)),  # 76.3 %
        *(row("partialformer_b3", "eager", 90), row("partialformer_b3", "onnx", 80)),  # 83.0 %
        *(row("fastvit_t8@256", "eager", 5, 256), row("fastvit_t8@256", "onnx", 4, 256)),  # 76.2 %: not enough
        *(row("efficientnet_b0", "eager", 25), row("efficientnet_b0", "onnx", 16)),  # 77.7 %
        *(row("resnet50", "eager", 99), row("resnet50", "onnx", 98)),  # 80.85 %, but slower
        row("pvt_v2_b0_cb", "eager", 9),
    ]
    report = Report(MACHINE, Settings(batch=1, rounds=1, runtimes=("eager", "onnx", "int8")), rows)
    data = {"left_out": {"swin": {"onnx": "no way"}}, **dataclasses.asdict(report)}
    (tmp_path / "a.json").write_text(json.dumps(data))
    return str(tmp_path / "a.json")


def test_instead__the_fastest_other_of_no_less_accuracy(file):
    lines = TABLES["instead"](file).splitlines()
    mat = "| `mat_1` | 76.3 % | 20.0 ms (onnx) | `efficientnet_b0`, 77.7 % | 16.0 ms (onnx) | 1.25 times as long |"
    assert mat in lines
    assert "| `partialformer_b3` | 83.0 % | 80.0 ms (onnx) | none of those in the table | - | - |" in lines
    assert lines[-1] == "No published top-1 in our sources: `pvt_v2_b0_cb`."


def test_latency_costs_runtimes_and_sources__and_what_was_not_run(file):
    text = TABLES["latency"](file)
    assert "| MAT | `mat_1` | 76.3 % | 0.0 M | 0.00 G | 30.0 ±0% | 20.0 ±0% | 5.0 ±0% | 1.50 (onnx) |" in text
    assert "| not in our sources | 0.0 M | 0.00 G | 9.0 ±0% | not run | not run | 1 (eager) |" in text
    assert "Not run: `swin` (no way)." in text and "torch 2.0, timm 1.0" in text
    models = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| ") and "`" in line]
    order = "pvt_v2_b0_cb", "mat_1", "partialformer_b3", "efficientnet_b0", "fastvit_t8@256", "resnet50"
    assert models == [f"`{name}`" for name in order]
    text = TABLES["costs"](file)
    assert "| `mat_1` | not run | 0.50 s, 3 MB, 2.5 MB | not run |" in text
    assert "comes before that: onnx 1.0 s." in text
    lines = TABLES["sources"](file).splitlines()
    assert "* `mat_1`: thesis, chapter 4, Tables 4.2, 4.4, 4.9." in lines
    assert any(line.startswith("* `efficientnet_b0` (ra_in1k), `resnet50` (tv2_in1k): timm, results") for line in lines)
    data = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps(data | {"rows": data["rows"][:3]}))
    assert "| `mat_1` | 30.0 ±0% (1.00) | 20.0 ±0% (1.50) | 5.0 ±0% (6.00) |" in TABLES["runtimes"](file)
