"""A fresh process that loads one artefact and answers once."""

from pathlib import Path

import pytest

from broadsight.benchmark import cold_start as start_up
from broadsight.benchmark.candidates import Candidate, Variant, build
from broadsight.benchmark.run import Settings
from broadsight.benchmark.runtimes import Artefacts


def candidate(runtime: str, folder: Path) -> tuple[Candidate, Settings]:
    settings = Settings(batch=2, size=(32, 32), runtimes=(runtime,))
    (made,) = build(Variant("test_resnet"), settings, None, Artefacts(folder, settings.threads))
    return made, settings


@pytest.mark.parametrize("runtime", ["eager", pytest.param("pt2", marks=pytest.mark.slow)])
def test_measure__torch_starts_from_its_weights_and_others_from_files(runtime, tmp_path):
    made, settings = candidate(runtime, tmp_path)
    found = start_up.measure(made, settings, made.artefact)
    assert 0 < found.seconds < found.seconds + found.import_s
    assert found.resident_bytes is None or 0 < found.resident_bytes < 1e9


def test_measure__says_why_a_process_failed(tmp_path, monkeypatch):
    eager, settings = candidate("eager", tmp_path)

    def run(command, **options):
        assert command[1:3] == ["-m", "broadsight.benchmark.cold_start"] and options["env"]["OMP_NUM_THREADS"] == "1"
        return start_up.subprocess.CompletedProcess(command, 1, "", "Traceback\n  File x\nValueError: no such file\n")

    monkeypatch.setattr(start_up.subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"^a fresh process failed: ValueError: no such file$"):
        start_up.measure(eager, settings, Path("gone.safetensors"))


def test_status__bytes_of_this_process():
    resident, peak = start_up._status("VmRSS"), start_up._status("VmHWM")
    if resident is None or peak is None:
        pytest.skip("the system does not say")
    assert 1e6 < resident <= peak
    assert start_up._status("VmNothing") is None
