"""One writer a folder, and nobody once its process is gone."""

import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from broadsight.cli.main import main
from broadsight.training import lock
from broadsight.training.lock import LOCK, Busy, locked, refuse_if_held
from broadsight.training.objectives.classification import Classification
from tests.refusals import refused

from .runs import everything_in, kill, small

HOLD = """
import os, sys, time
from pathlib import Path
import importlib.util
spec = importlib.util.spec_from_file_location("lock", sys.argv[2] + "/broadsight/training/lock.py")
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)
with lock.locked(Path(sys.argv[1])):
    child = os.fork() if sys.argv[3] == "fork" else None
    if child != 0:
        print(child or 0, flush=True)
    time.sleep(60)
"""
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(lock.__file__))))


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the folder, and a worker of it if asked for."""
    started = []

    def start(how="alone"):
        command = [sys.executable, "-c", HOLD, str(tmp_path), ROOT, how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        process.worker = int(process.stdout.readline())
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.worker:
            os.kill(process.worker, signal.SIGKILL)


def test_held__refused_with_its_process(holder, tmp_path):
    process = holder()
    for look in (refuse_if_held, lambda folder: locked(folder).__enter__()):
        words = rf"^{tmp_path} is being written by process {process.pid}; .*nothing was changed$"
        refused(words, look, tmp_path, error=Busy)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_killed__free_though_its_worker_lives(holder, tmp_path):
    process = holder("fork")
    process.kill()
    process.wait()
    os.kill(process.worker, 0)  # it is there
    refuse_if_held(tmp_path)
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text().split()[0] == str(os.getpid())


def test_same_process__once(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0)
    with locked(tmp_path), pytest.raises(Busy, match=f"process {os.getpid()};"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == ""
    # A folder that cannot be written to is not locked
    monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    with locked(tmp_path):
        pass


def test_train__second_writer_is_refused_as_is_one_that_begins_at_once(images, tmp_path, monkeypatch, capsys):
    """To continue the run, or to begin one in the same folder; the first goes on undisturbed."""
    monkeypatch.setattr(lock, "PATIENCE", 0)
    folder, step, said = tmp_path / "run", Classification.step, []
    common = ["--out", str(folder), "--workers", "0", "--threads", "1", "--no-report"]

    def but_events(found):  # the first writer's, whose thread writes when it likes: their names alone
        return {name: content if "tfevents" not in name else None for name, content in found.items()}

    def meanwhile(self, batch):
        if not said:
            said.append(capsys.readouterr().err)
            before = but_events(everything_in(folder))
            for command in (["--resume"], [str(images), "--model", "test_vit"]):
                assert main(["train", *command, *common]) == 2
                said.append(capsys.readouterr().err)
            assert but_events(everything_in(folder)) == before
        return step(self, batch)

    monkeypatch.setattr(Classification, "step", meanwhile)
    left = kill(small(images, folder), tmp_path / "left", Classification, "evaluate")
    assert len(said) == 3
    assert all(f"is being written by process {os.getpid()};" in text and text.count("\n") == 1 for text in said[1:])
    assert (tmp_path / "left" / "last" / "update-000000003").is_dir() and left.out == str(tmp_path / "left")
    # The folder was free when both looked
    (tmp_path / "free").mkdir()
    with locked(tmp_path / "free"):
        code = main(["train", str(images), "--model", "test_vit", "--size", "32", "--out", str(tmp_path / "free")])
    assert code == 2 and f"process {os.getpid()};" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "free").iterdir()] == [LOCK]
