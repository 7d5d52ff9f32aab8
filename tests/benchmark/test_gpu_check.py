"""The script for those who have a GPU: what it says without one, and a rehearsal on the CPU."""

import json
from pathlib import Path

import pytest
import torch


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import gpu_check

    return gpu_check


def test_refused__without_a_gpu(gpu_check, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--json", str(tmp_path / "gpu.json")]) == 2
    said = "gpu_check: torch finds no CUDA device here; rehearse with --device cpu --quick\n"
    assert capsys.readouterr() == ("", said) and not list(tmp_path.iterdir())


def test_check__names_what_is_wrong(gpu_check, monkeypatch):
    case = next(case for case in gpu_check.cases(64, True) if case.title == "test_resnet, gap")
    assert [row["right"] for row in gpu_check.check(case, "cpu")] == [True, True, True]
    found = gpu_check.found

    def off(case, device, precision):
        right = found(case, "cpu", precision)
        return right._replace(gradients=1.5 * right.gradients) if device == "cuda" else right

    monkeypatch.setattr(gpu_check, "found", off)
    rows = list(gpu_check.check(case, "cuda"))
    assert [row["right"] for row in rows] == [False, False, False]
    assert gpu_check.cells("right", rows[0])[-1].startswith("WRONG: CPU")


@pytest.mark.slow
def test_rehearsal(gpu_check, tmp_path, capsys):
    assert gpu_check.main(["--device", "cpu", "--quick", "--json", str(tmp_path / "gpu.json")]) == 0
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert all(row["right"] for row in record["right"]) and record["machine"]["versions"]["torch"]
    for part in ("published", "peers"):
        assert record[part] and not [row["failure"] for row in record[part] if "failure" in row]
    assert f"all {len(record['right'])} comparisons are right" in capsys.readouterr().out
