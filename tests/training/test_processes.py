"""Who trains what: shares of the data without overlap, and commands that would train in fewer processes than asked."""

import faulthandler
import io
import json
import os
import tarfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from broadsight.cli.main import main
from broadsight.data.loading import EvalOrder, SourceDataset, TrainOrder, Transforms, load
from broadsight.data.sources import resolve
from broadsight.training import processes
from broadsight.training.request import Request
from broadsight.training.run import train
from broadsight.training.run_folder import is_run
from tests.refusals import refused

from .runs import new_processes
from .runs import small as small_run
from .small_runs import png


def small(data: Path, **fields: Any) -> Request:
    """A run in a folder of its own choice."""
    return replace(small_run(data, data, **fields), out=None)


@pytest.fixture(scope="module")
def shard_source(tmp_path_factory) -> Any:
    """Twenty shards, more than are shuffled at once, of unequal size."""
    folder = tmp_path_factory.mktemp("shards")
    number = 0
    for shard in range(20):
        with tarfile.open(folder / f"train-{shard:03d}.tar", "w") as tar:
            for _ in range(1 + shard % 3):
                for extension, content in (("png", png(number, 0, 0)), ("cls", str(number % 3).encode())):
                    member = tarfile.TarInfo(f"{number:04d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                number += 1
    return resolve(str(folder), split=0.1, cache=tmp_path_factory.mktemp("cache")).train


def shares(source: Any, batch: int, count: int, epoch: int = 0, first: int = 0, **options: Any) -> list[list[list]]:
    """For each process its passes over an epoch."""
    orders = [TrainOrder(source, batch, rank=rank, processes=count, **options) for rank in range(count)]
    for order in orders:
        order.start(epoch, first)
    return [list(order) for order in orders]


def together(parts: list[list[list]]) -> list[set]:
    """The keys of each pass over all processes, after a check that none has any twice."""
    passes = [[key for one in part for key in one] for part in zip(*parts, strict=True)]
    assert all(len(set(keys)) == len(keys) for keys in passes)
    return [set(keys) for keys in passes]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("repeats", [1, 3])
def test_every_update_has_the_same_images_over_any_number_of_processes(count, accumulate, repeats):
    source, options = range(100), dict(seed=5, accumulate=accumulate, repeats=repeats)
    for epoch in (0, 1):
        alone = shares(source, 24, 1, epoch, **options)
        several = shares(source, 24, count, epoch, **options)
        # Each pass as well, or BatchNorm over all processes would not be that of one.
        assert together(several) == together(alone)
        continued = shares(source, 24, count, epoch, first=2, **options)  # what other processes have left
        assert together(continued) == together(alone)[2 * accumulate :]
        assert all(len(one) == 24 // (accumulate * count) for part in several for one in part)
        order = TrainOrder(source, 24, **options)
        order.start(epoch)
        expected = {(epoch, place, int(index)) for place, index in enumerate(order.order()[: 4 * 24])}
        assert set().union(*together(several)) == expected
        if repeats == 1:
            assert len({index for _, _, index in expected}) == 96


def test_shards_are_shared_without_overlap_and_workers_give_each_image_once(shard_source):
    count = len(shard_source)
    for epoch in (0, 1):
        alone, several = shares(shard_source, 6, 1, epoch), shares(shard_source, 6, 2, epoch)
        assert together(several) == together(alone)
        indices = [index for update in together(several) for _, _, index in update]
        assert len(set(indices)) == len(indices) == count // 6 * 6
    orders = [EvalOrder(shard_source, 4, rank=rank, processes=2) for rank in (0, 1)]
    assert sorted(index for order in orders for batch in order for _, _, index in batch) == list(range(count))
    transform = Transforms(8, augmentation=dict(auto_augment="rand-m5-n2")).build(True)
    images = SourceDataset(shard_source, transform, training=True)
    seen: dict[Any, torch.Tensor] = {}
    for rank in (0, 1):
        order = TrainOrder(shard_source, 6, rank=rank, processes=2)
        for batch in load(images, order, workers=2):
            assert not seen.keys() & set(batch.keys)
            seen |= dict(zip(batch.keys, batch.images, strict=True))
    for batch in load(images, TrainOrder(shard_source, 6)):  # the same images, augmented alike, in one process
        for key, image in zip(batch.keys, batch.images, strict=True):
            assert torch.equal(seen.pop(key), image)
    assert not seen


ASKED = {"--num_processes 2 ": 2, "--num-processes=4 ": 4, "": None}
COMMANDS = {f"python accelerate launch --cpu {asked}-m broadsight train": number for asked, number in ASKED.items()}
COMMANDS["bash train.sh --num_processes 2"] = None


def test_what_accelerate_launch_was_told_is_known_and_what_is_not_there_is_refused(
    images, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "run"
    assert main(["train", str(images), "--processes", "2", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "2 processes asked for, 1 running" in error
    assert "torchrun --standalone --nproc-per-node 2 -m broadsight train" in error
    assert not out.exists()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for command, asked in COMMANDS.items():
        parent = SimpleNamespace(cmdline=command.split)
        monkeypatch.setattr(psutil.Process, "parent", lambda self, parent=parent: parent)
        assert processes._launched() == asked
    monkeypatch.undo()
    refused("precision=fp16 needs a GPU", processes.connect, "cpu", "fp16")
    if not torch.cuda.is_available():
        refused("torch sees no GPU", processes.connect, "cuda")
    # Alone, everything shared is one's own
    values = torch.tensor([1.0, 2.0])
    assert torch.equal(processes.sum_over_processes(values), values)
    assert processes.gather_objects("mine") == ["mine"] and processes.from_first("mine") == "mine"


def test_a_restart_continues_no_run_but_its_own(images, tmp_path, monkeypatch):
    # A process dies before the run's folder exists; beside it lies a finished run of an earlier launch.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "earlier")
    earlier = train(small(images, seed=1)).folder
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "present")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    present = train(small(images, seed=2)).folder
    assert present != earlier
    config = json.loads((present / "config.json").read_text())
    assert config["broadsight"]["settings"]["seed"] == 2
    # But its own
    assert train(small(images, seed=2)).folder == present
    assert sorted(path for path in Path("runs").iterdir() if is_run(path)) == sorted([earlier, present])


def join(rank: int, port: int, restarts: int, results: Any) -> None:
    """Join a group of two as a process of torchrun would, twice, as a run and its twin do."""
    faulthandler.dump_traceback_later(50)  # where it hangs, if it does
    os.environ |= dict(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ |= dict(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=str(restarts))
    torch.set_num_threads(1)
    for _ in range(2):
        processes.connect("cpu")
        sums = processes.sum_over_processes(torch.tensor([1.0 + rank]))
        agreed = processes.gather_objects(processes.restarted()), processes.from_first(f"from {rank}")
        results.put((float(sums), *agreed))
        processes.leave()


# A restart, one that is counted on one node, and two
@pytest.mark.parametrize("attempts", [[(0, 0), (1, 1)], [(0, 0), (0, 1)], [(0, 0), (1, 0), (1, 1)]])
def test_processes_meet_whatever_earlier_ones_left_in_the_store(attempts):
    """torchrun keeps its store over restarts, and counts those on the node alone whose process has failed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    new = new_processes()
    for restarts in attempts:
        results = new.Queue()
        arguments = [(rank, store.port, count, results) for rank, count in enumerate(restarts)]
        children = [new.Process(target=join, args=one, daemon=True) for one in arguments]
        try:
            for child in children:
                child.start()
            found = [results.get(timeout=60) for _ in range(4)]
        finally:
            for child in children:
                child.kill()
        assert found == [(3.0, [any(restarts)] * 2, "from 0")] * 4
