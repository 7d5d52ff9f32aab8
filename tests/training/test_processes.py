"""Who trains what: shares of the data without overlap, and commands that would train in fewer processes than asked."""

import faulthandler
import io
import json
import os
import tarfile
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from broadsight.cli.main import main
from broadsight.data.loading import EvalOrder, SourceDataset, TrainOrder, Transforms, load
from broadsight.data.seeds import seed_transforms
from broadsight.data.sources import resolve
from broadsight.training import processes
from broadsight.training.request import Request
from broadsight.training.run import prepare, train
from broadsight.training.run_folder import is_run
from broadsight.training.settings import settings_of, stored_in

from .runs import again, fitting, new_processes
from .runs import small as small_run


def small(data: Path, **fields: Any) -> Request:
    """A run in a folder of its own choice."""
    return replace(small_run(data, data, **fields), out=None)


class Numbers:
    """A source of so many images, in a random order."""

    classes = ("a",)

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Twenty shards, more than are shuffled at once, of unequal size."""
    folder = tmp_path_factory.mktemp("shards")
    number = 0
    for shard in range(20):
        with tarfile.open(folder / f"train-{shard:03d}.tar", "w") as tar:
            for _ in range(1 + shard % 3):
                file = io.BytesIO()
                Image.new("RGB", (8, 8), (number, 0, 0)).save(file, "PNG")
                for extension, content in (("png", file.getvalue()), ("cls", str(number % 3).encode())):
                    member = tarfile.TarInfo(f"{number:04d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                number += 1
    return folder


@pytest.fixture(scope="module")
def shard_source(shards, tmp_path_factory) -> Any:
    return resolve(str(shards), split=0.1, cache=tmp_path_factory.mktemp("cache")).train


def shares(source: Any, batch: int, count: int, epoch: int = 0, first: int = 0, **options: Any) -> list[list[list]]:
    """For each process its passes over an epoch."""
    orders = [TrainOrder(source, batch, rank=rank, processes=count, **options) for rank in range(count)]
    for order in orders:
        order.start(epoch, first)
    return [list(order) for order in orders]


def together(parts: list[list[list]], passes: int = 1) -> list[set]:
    """The keys of each update over all processes, after a check that none has any twice."""
    updates = []
    for start in range(0, len(parts[0]), passes):
        keys = [key for part in parts for one in part[start : start + passes] for key in one]
        assert len(set(keys)) == len(keys)
        updates.append(set(keys))
    return updates


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("repeats", [1, 3])
def test_every_update_has_the_same_images_over_any_number_of_processes(count, accumulate, repeats):
    source, options = Numbers(100), dict(seed=5, accumulate=accumulate, repeats=repeats)
    for epoch in (0, 1):
        alone = shares(source, 24, 1, epoch, **options)
        several = shares(source, 24, count, epoch, **options)
        # Each pass as well, or BatchNorm over all processes would not be that of one.
        assert together(several) == together(alone)
        assert all(len(one) == 24 // (accumulate * count) for part in several for one in part)
        order = TrainOrder(source, 24, **options)
        order.start(epoch)
        expected = {(epoch, place, int(index)) for place, index in enumerate(order.order()[: 4 * 24])}
        assert set().union(*together(several)) == expected
        if repeats == 1:
            assert len({index for _, _, index in expected}) == 96


@pytest.mark.parametrize("count", [1, 2, 4])
def test_an_epoch_continues_where_it_was_left__by_other_processes(count):
    source = Numbers(50)
    assert together(shares(source, 8, count, 3, first=2)) == together(shares(source, 8, 1, 3))[2:]


@pytest.mark.parametrize("images", [0, 1, 2, 12, 13])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_evaluation_sees_every_image_once(images, count):
    orders = [EvalOrder(Numbers(images), 4, rank=rank, processes=count) for rank in range(count)]
    keys = Counter(key for order in orders for batch in order for key in batch)
    assert keys == Counter((0, index, index) for index in range(images))
    assert all(len(order) == len(list(order)) for order in orders)


def test_shards_are_shared_without_overlap(shard_source):
    count = len(shard_source)
    for epoch in (0, 1):
        alone, several = shares(shard_source, 6, 1, epoch), shares(shard_source, 6, 2, epoch)
        assert together(several) == together(alone)
        indices = [index for update in together(several) for _, _, index in update]
        assert len(set(indices)) == len(indices) == count // 6 * 6
    validated = [
        key for rank in (0, 1) for batch in EvalOrder(shard_source, 4, rank=rank, processes=2) for key in batch
    ]
    assert sorted(index for _, _, index in validated) == list(range(count))


def test_workers_of_two_processes_give_each_image_once(shard_source):
    images = SourceDataset(
        shard_source, Transforms(8, augmentation=dict(auto_augment="rand-m5-n2")).build(True), training=True
    )
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


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "rand-m10-inc1"])
def test_augmentation_survives_every_seed(policy):
    # timm's posterize may keep no bit of an image, which Pillow 13 refuses: 11 of 6000 images met that.
    transform = Transforms(8, augmentation=dict(auto_augment=policy)).build(True)
    image = Image.new("RGB", (8, 8), (200, 100, 50))
    for seed in range(1500):
        seed_transforms(seed)
        assert transform(image).shape == (3, 8, 8)


def test_a_batch_that_cannot_be_divided_is_refused_with_one_that_can():
    with pytest.raises(ValueError, match=r"batch_size=10 does not divide among 2 processes with accumulate=2.*=8"):
        TrainOrder(Numbers(50), 10, processes=2, accumulate=2)


def test_processes_without_torchrun_are_refused_with_the_command_that_works(images, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", str(images), "--processes", "2", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "2 processes asked for, 1 running" in error
    assert "torchrun --standalone --nproc-per-node 2 -m broadsight train" in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("command", "processes_asked"),
    [
        ("python accelerate launch --cpu --num_processes 2 -m broadsight train", 2),
        ("python accelerate launch --cpu --num-processes=4 -m broadsight train", 4),
        ("python accelerate launch --cpu -m broadsight train", None),
        ("bash train.sh --num_processes 2", None),
    ],
)
def test_what_accelerate_launch_was_told_is_known(command, processes_asked, monkeypatch):
    import psutil

    class Parent:
        def cmdline(self) -> list[str]:
            return command.split()

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(psutil.Process, "parent", lambda self: Parent())
    assert processes._launched() == processes_asked


def test_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="unknown device 'gpu'; expected auto, cpu or cuda"):
        processes.connect("gpu")
    with pytest.raises(ValueError, match="precision=fp16 needs a GPU"):
        processes.connect("cpu", "fp16")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch sees no GPU"):
            processes.connect("cuda")


def test_alone_everything_shared_is_one_s_own():
    values = torch.tensor([1.0, 2.0])
    assert torch.equal(processes.sum_over_processes(values), values)
    assert processes.gather_objects("mine") == ["mine"] and processes.from_first("mine") == "mine"


def test_a_restart_before_there_was_a_folder_does_not_continue_another_run(images, tmp_path, monkeypatch):
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


def test_a_restart_continues_its_own_run(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "present")
    begun = train(small(images)).folder
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(small(images)).folder == begun
    assert [path for path in Path("runs").iterdir() if is_run(path)] == [begun]


def test_a_resumed_run_keeps_the_batch_that_was_asked_for(images, tmp_path):
    # Without the option, which need not be given again, it was fitted to the few images.
    changes = dict(epochs=1, batch_size=8, image_size=32)
    run = fitting(small_run(images, tmp_path / "run", changes=changes))
    assert train(run).progress.updates == 3
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    stored = stored_in(tmp_path / "run")
    settings, recipe = settings_of(again(tmp_path / "run"), stored)
    prepared = prepare(again(tmp_path / "run"), settings, recipe, processes.connect("cpu"), stored)
    assert prepared.engine.work.batch == config["broadsight"]["recipe"]["batch_size"] == 8


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


@pytest.mark.parametrize(
    "attempts",
    [[(0, 0), (1, 1)], [(0, 0), (0, 1)], [(0, 0), (1, 0), (1, 1)]],
    ids=["restart", "restart counted on one node", "two restarts"],
)
def test_processes_meet_whatever_earlier_ones_left_in_the_store(attempts):
    """torchrun keeps its store over restarts, and counts those on the node alone whose process has failed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    new = new_processes()
    for restarts in attempts:
        results = new.Queue()
        children = [
            new.Process(target=join, args=(rank, store.port, count, results), daemon=True)
            for rank, count in enumerate(restarts)
        ]
        try:
            for child in children:
                child.start()
            found = [results.get(timeout=60) for _ in range(4)]
        finally:
            for child in children:
                child.kill()
        assert found == [(3.0, [any(restarts)] * 2, "from 0")] * 4
