"""Checkpoints: what is in them comes back, and they are whole or not there."""

import errno
import json
import os
import random
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from broadsight.training import checkpoints as state
from broadsight.training import processes
from broadsight.training.checkpoints import DamagedCheckpoint
from tests.refusals import refused

FILES = ["ema.safetensors", "manifest.json", "model.safetensors", "optimizer.bin", "progress.json"]
FILES += ["random_states_0.pkl"]


class Run:
    """A model in training, as an accelerator has it."""

    def __init__(self, seed: int = 0, width: int = 3):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.average = nn.Linear(2, 2)
        self.accelerator: Accelerator = processes.connect("cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.step()

    def step(self) -> None:
        self.model(torch.randn(4, 2)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder, updates=1, evaluated=False, **progress):
        values = dict(updates=updates, evaluated=evaluated, **progress)
        return state.save(folder, self.accelerator, values, self.average)

    def values(self):
        moments = [v for s in self.optimizer.state_dict()["state"].values() for v in s.values()]
        return [*self.model.state_dict().values(), *self.average.state_dict().values(), *moments]


@pytest.fixture
def run():
    return Run()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return Run().save(tmp_path_factory.mktemp("run") / "last", epoch=3, skipped={"a": "ü"})


def drawn():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_everything_comes_back(run, tmp_path):
    run.save(tmp_path, epoch=3)
    expected, after = [value.clone() for value in run.values()], drawn()
    run.step()
    with torch.no_grad():
        run.average.weight.add_(1)
    assert not all(map(torch.equal, run.values(), expected))
    drawn()
    state.restore(state.newest(tmp_path), run.accelerator, run.average)
    assert all(map(torch.equal, run.values(), expected))
    assert drawn() == after  # Python's, numpy's and torch's generator
    assert state.read_progress(state.newest(tmp_path)) == dict(updates=1, evaluated=False, epoch=3)
    # The scaler too
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run.accelerator.scaler.scale(torch.ones(1))  # it begins with its first loss
    checkpoint = run.save(tmp_path, 2)
    run.accelerator.scaler.update(2.0)
    state.restore(checkpoint, run.accelerator, run.average)
    assert run.accelerator.scaler.get_scale() == 8.0


def test_on_the_disk_before_it_has_its_name_and_the_newest_is_found(run, tmp_path, monkeypatch):
    run.save(tmp_path, 1)
    told = []
    flush, rename, remove = state.flush, type(tmp_path).rename, shutil.rmtree
    monkeypatch.setattr(state, "flush", lambda path: (told.append(("flush", path.name)), flush(path))[1])
    monkeypatch.setattr(type(tmp_path), "rename", lambda p, q: (told.append(("rename", p.name)), rename(p, q))[1])
    monkeypatch.setattr(shutil, "rmtree", lambda p, **kw: (told.append((p.name, p.exists())), remove(p, **kw))[1])
    target = run.save(tmp_path, 2)
    monkeypatch.undo()
    here = told.index(("rename", ".update-000000002.part"))
    assert {("flush", name) for name in FILES} <= set(told[:here])
    assert told[here - 1] == ("flush", ".update-000000002.part")
    assert told[here + 1] == ("flush", tmp_path.name)
    assert told[here + 2 :] == [("update-000000001", True)]
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert state.newest(tmp_path / "none") is None
    names = ["update-000000003", "update-000000010", "update-000000010-evaluated", ".update-000000011.part"]
    for name in names:
        (tmp_path / name).mkdir()
    assert state.newest(tmp_path).name == "update-000000010-evaluated"
    (tmp_path / "update-000000011").mkdir()
    assert state.newest(tmp_path).name == "update-000000011"


def test_leftovers_are_removed_nothing_is_saved_twice_and_the_one_before_is_kept(run, tmp_path):
    for name in (".update-000000001.part", ".update-000000007.part", "update-000000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("x")
    run.save(tmp_path, 7, evaluated=True)
    assert [path.name for path in tmp_path.iterdir()] == ["update-000000007-evaluated"]
    assert not (tmp_path / "update-000000007-evaluated" / "half").exists()
    first = run.save(tmp_path, 8)
    before = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}
    assert run.save(tmp_path, 8) == first
    assert {path.name: path.stat().st_mtime_ns for path in first.iterdir()} == before
    last, previous = tmp_path / "run" / "last", tmp_path / "run" / "previous"
    (tmp_path / "note").write_text("beside")
    for updates in (1, 2, 3):
        values = dict(updates=updates, evaluated=False)
        state.save(last, run.accelerator, values, beside={"copy": tmp_path / "note"}, previous=previous)
    assert [path.name for path in state.checkpoints(last, previous)] == ["update-000000003", "update-000000002"]
    assert [path.name for path in (*last.iterdir(), *previous.iterdir())] == ["update-000000003", "update-000000002"]
    assert state.newest(last, previous).parent == last
    assert state.read_progress(previous / "update-000000002")["updates"] == 2
    assert state.vouched(last / "update-000000003", "copy") == b"beside"
    (last / "update-000000003" / "copy").write_text("besides")
    assert state.vouched(last / "update-000000003", "copy") is None is state.vouched(last, "none")


@pytest.mark.parametrize("place", ["save_file", "_checksum", "flush"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_failed__the_one_before_is_whole(place, error, run, tmp_path, monkeypatch):
    whole = run.save(tmp_path, 1)
    monkeypatch.setattr(state, place, Mock(side_effect=error))
    with pytest.raises(type(error)):
        run.save(tmp_path, 2)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [whole]
    assert state.read_progress(whole)["updates"] == 1
    run.save(tmp_path, 2)
    assert state.newest(tmp_path).name == "update-000000002"


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(name, place, bit, checkpoint):
    file = checkpoint / name
    whole = file.read_bytes()
    content = bytearray(whole)
    content[int(place * len(content))] ^= 1 << bit
    try:
        file.write_bytes(content)
        with pytest.raises(DamagedCheckpoint) as damaged:
            state.read_progress(checkpoint)
    finally:
        file.write_bytes(whole)
    assert str(checkpoint) in str(damaged.value)
    assert "\n" not in str(damaged.value) and "remove the folders `last` and `previous`" in str(damaged.value)
    assert state.read_progress(checkpoint)["skipped"] == {"a": "ü"}


def test_files_that_are_cut_or_missing_another_manifest_and_another_model_are_noticed(checkpoint, tmp_path):
    assert sorted(path.name for path in checkpoint.iterdir()) == FILES
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert sorted(manifest) == [name for name in FILES if name != "manifest.json"]
    assert all(size == (checkpoint / name).stat().st_size for name, (size, _) in manifest.items())
    for name in FILES:
        copy = shutil.copytree(checkpoint, tmp_path / name)
        size = (copy / name).stat().st_size
        for length in (size - 1, size // 2, 0):
            os.truncate(copy / name, length)
            refused("is damaged", state.read_progress, copy, error=DamagedCheckpoint)
        (copy / name).unlink()
        refused(f"{name}'", state.read_progress, copy, error=DamagedCheckpoint)
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    for text in ("{}", "[]", "null", "5", '"x"', "{", '{"a": 1}', '{"": [0, 0]}', '{"\\u0000": [0, 0]}'):
        (copy / "manifest.json").write_text(text)
        refused("is damaged", state.read_progress, copy, error=DamagedCheckpoint)
    other = Run(width=5)
    words = "does not fit this run"
    refused(words, state.restore, checkpoint, other.accelerator, other.average, error=DamagedCheckpoint)
