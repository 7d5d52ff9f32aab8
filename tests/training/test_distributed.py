"""Two processes on this machine, started as users do: the same curve as one, and nothing lost when they are killed.

A start takes ten seconds or more, nearly all of them imports. So the tests look at few starts, from all sides.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from broadsight.cli.main import main
from broadsight.training import checkpoints as state

from .runs import again, kill, lines_of, small, wait_for
from .runs import train as train_in_process

ROOT = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TWO = ("--standalone", "--nproc-per-node", "2")
# Sums of the same numbers in another order. Measured: at most 1e-6 of a loss, after up to 42 updates.
TOLERANCE = dict(rtol=1e-5, atol=1e-6)

# Several runs in the same two processes, without the curves that would take longer than they do.
SEVERAL = """
import json, sys
from broadsight.cli.main import main
from broadsight.training import run_folder

run_folder.draw_curves = lambda lines, path: None
for arguments in json.loads(sys.argv[1]):
    if main(arguments):
        sys.exit(1)
"""

AUGMENTED = ("--set", "auto_augment=rand-m5-mstd0.5-inc1")
# Without dropout, of which each process draws its own
MAP = (*shlex.split("--pool map --pool-args dim=48 heads=4 groups=2 tokens=2 mlp_dim=96"), "pool_options={drop: 0}")

# Branches that begin at zero have gradients of the size of rounding, and Adam would make these as large as all others.
RESNET = ("--model", "test_resnet", "--set", "optimizer=sgd", "momentum=0.9")

# What is asked for in all processes, and what only where there are two.
CURVES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no BatchNorm": (("--model", "test_vit", *AUGMENTED), ()),
    "BatchNorm": ((*RESNET, *AUGMENTED), ("--set", "sync_bn=true")),
    "accumulated": ((*RESNET, *AUGMENTED, "--set", "accumulate=2"), ("--set", "sync_bn=true")),
    "multi-token": ((*RESNET, *MAP), ("--set", "sync_bn=true")),
    "averaged weights": (("--model", "test_convnext", "--set", "ema=0.9", "drop_path=0"), ()),
}
LONG = ("--model", "test_vit", "--epochs", "14")


def options(data: Path, out: Path | None, *more: str) -> list[str]:
    common = shlex.split("--size 32 --lr 3e-3 --log-every 1 --workers 0 --threads 1 --batch 8 --device cpu")
    common += [] if "--epochs" in more else ["--epochs", "2"]
    return ["train", str(data), *common, *(["--out", str(out)] if out else []), *more]


@contextmanager
def started(*command: str, cwd: Path, log: Path, **env: str) -> Iterator[subprocess.Popen]:
    """A command in a session of its own, of which nothing is left in the end."""
    with log.open("wb") as file:
        ours = {k: v for k, v in os.environ.items() if k != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
        ours |= dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", NO_COLOR="1") | env
        streams: dict[str, Any] = dict(stdout=file, stderr=subprocess.STDOUT)
        process = subprocess.Popen(command, cwd=cwd, env=ours, start_new_session=True, **streams)
    family: set[psutil.Process] = set()
    try:
        yield process
    finally:
        if process.poll() is None:
            family |= set(psutil.Process(process.pid).children(recursive=True))  # torchrun's are sessions of their own
            process.kill()
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(30)


def finish(*command: str, cwd: Path, code: int = 0, **env: str) -> str:
    """Run a command to its end, which must be `code` (or anything but 0 for -1); what it printed."""
    log = cwd / "log.txt"
    with started(*command, cwd=cwd, log=log, **env) as process:
        ended = process.wait(240)
    assert ended == code or (code < 0 and ended), log.read_text()[-3000:]
    return log.read_text()


def await_in(process: subprocess.Popen, log: Path, what: Callable[[], Any]) -> Any:
    """Wait for something that a process brings about; if it ends too early, its words are the failure."""
    return wait_for(what, 180, lambda: None if process.poll() is None else log.read_text()[-3000:] or "ended")


def workers_of(process: subprocess.Popen) -> dict[int, psutil.Process]:
    """torchrun's processes by their ranks."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            rank = child.environ().get("RANK")
        except psutil.Error:
            continue
        if rank is not None:
            found[int(rank)] = child
    return found


def assert_same_curve(found: Path, expected: Path) -> None:
    pairs = list(zip(lines_of(found), lines_of(expected), strict=True))
    assert pairs
    for a, b in pairs:
        assert a.keys() == b.keys()
        for key, value in b.items():
            if isinstance(value, str):
                assert a[key] == value
            elif "loss" in key:
                assert a[key] == pytest.approx(value, rel=TOLERANCE["rtol"], abs=TOLERANCE["atol"]), (key, a, b)
            else:  # learning rates, counts, and shares of right answers
                assert a[key] == pytest.approx(value, rel=1e-6), (key, a, b)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """24 images of 7 classes to train on, and 13 to validate, one of which cannot be read."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for part, count in (("train", 24), ("val", 13)):
        for number in range(count):
            kind = number % 7
            pixels = random.normal(90, 60, (40, 40, 3))
            pixels[..., kind % 3] += 25 * kind
            path = folder / part / f"class{kind}" / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(path)
    (folder / "val" / "class3" / "03.png").write_bytes(b"\x89PNG no more")
    return folder


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory) -> Path:
    """Each run in one process; and one that dies after its third checkpoint."""
    folder = tmp_path_factory.mktemp("alone")
    for name, asked in {"long": LONG, **{name: both for name, (both, _) in CURVES.items()}}.items():
        assert main(options(data, folder / name, *asked)) == 0
    changes = dict(epochs=5, lr=3e-3)
    request = small(data, folder / "dying", changes=changes, log_every=1)
    kill(request, folder / "dead", state, "save", 3, after=True)
    train_in_process(small(data, folder / "never dying", changes=changes, log_every=1))
    return folder


def test_two_processes_do_what_one_does(data, alone, tmp_path):
    """The same curves and weights, every image validated once, and one process's checkpoint continued by two."""
    (tmp_path / "several.py").write_text(SEVERAL)
    runs = [options(data, tmp_path / name, *both, *several) for name, (both, several) in CURVES.items()]
    runs += [options(data, tmp_path / "not shared", *CURVES["BatchNorm"][0])]
    runs += [["train", "--resume", "--out", str(alone / "dead"), "--workers", "0", "--device", "cpu"]]
    log = finish(*TORCHRUN, *TWO, str(tmp_path / "several.py"), json.dumps(runs), cwd=tmp_path)
    for name in CURVES:
        two, one = tmp_path / name, alone / name
        assert_same_curve(two, one)
        assert json.loads((two / "config.json").read_text())["broadsight"]["processes"] == 2
        for line in lines_of(two, "epoch"):
            assert line["skipped"] == 1
            right = line["val_top1"] * 12 / 100  # of twelve that can be read
            assert right == pytest.approx(round(right), abs=1e-4)
        assert (two / "skipped.json").read_text() == (one / "skipped.json").read_text()
        found, expected = (load_file(folder / "model.safetensors") for folder in (two, one))
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert torch.allclose(found[key], value, rtol=1e-2, atol=1e-3), (name, key)
    assert_same_curve(alone / "dead", alone / "never dying")
    # Of BatchNorm that is not shared another curve, or the comparisons above could not fail
    pairs = zip(lines_of(tmp_path / "not shared"), lines_of(alone / "BatchNorm"), strict=True)
    differences = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in pairs if a["kind"] == "updates"]
    assert max(differences) > 100 * TOLERANCE["rtol"]
    # Nothing is warned of that users cannot change; torch's remark on gradients of depth-wise convolutions is not ours
    assert [line for line in re.findall(r"\w*Warning: .*", log) if "Grad strides do not match" not in line] == []


def test_killed_and_stopped__all_continue_from_the_checkpoint_in_one_folder(data, alone, tmp_path):
    """A run without --out, of which one process is killed, and then torchrun asked to stop, as SLURM does."""
    log = tmp_path / "log.txt"
    command = (*TORCHRUN, *TWO, "--max-restarts", "2", "-m", "broadsight", *options(data, None, *LONG))
    with started(*command, cwd=tmp_path, log=log) as process:

        def run() -> Path | None:
            return next((tmp_path / "runs").glob("*"), None) if (tmp_path / "runs").is_dir() else None

        await_in(process, log, lambda: state.newest(run() / "last") if run() else None)
        first = workers_of(process)
        first[1].kill()
        await_in(process, log, lambda: "continuing after" in log.read_text())
        at = len(lines_of(run(), "epoch"))
        await_in(process, log, lambda: len(lines_of(run(), "epoch")) > at)
        second = workers_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
        assert not [one for one in second.values() if one.is_running() and one.status() != "zombie"]
    assert first.keys() == second.keys() == {0, 1}
    assert not {one.pid for one in first.values()} & {one.pid for one in second.values()}
    said, folder = log.read_text(), run()
    assert len(re.findall(r"continuing after \d+ epochs, [1-9]", said)) == 1
    assert [path.parent for path in tmp_path.glob("runs/*/metrics.jsonl")] == [folder]
    assert "stopped in epoch" in said and "continue with: broadsight train --resume --out runs/" in said
    progress = state.read_progress(state.newest(folder / "last"))
    assert not progress["finished"] and progress["metrics_size"] == (folder / "metrics.jsonl").stat().st_size
    epochs = [line["epoch"] for line in lines_of(folder, "epoch")]
    assert epochs == list(range(1, len(epochs) + 1))
    # What two processes left is finished by one
    progress = train_in_process(replace(again(folder), resume=True)).progress
    assert progress.finished and progress.epoch == 14
    assert [line["epoch"] for line in lines_of(folder, "epoch")] == list(range(1, 15))
    assert_same_curve(folder, alone / "long")


def accelerate(kind: str) -> tuple[str, ...]:
    asked = "--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no -m broadsight"
    return (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", kind, *asked.split())


@pytest.mark.slow
def test_accelerate_launch_on_cpus_is_refused_and_one_that_starts_two_works(data, alone, tmp_path):
    log = finish(*accelerate("--cpu"), *options(data, tmp_path / "run"), cwd=tmp_path, code=-1)
    assert "broadsight: 2 processes asked for, 1 running" in log
    assert "torchrun --standalone --nproc-per-node 2 -m broadsight train" in log
    assert not (tmp_path / "run").exists()
    asked = options(data, tmp_path / "run", *CURVES["no BatchNorm"][0])
    finish(*accelerate("--multi_gpu"), *asked, cwd=tmp_path, ACCELERATE_USE_CPU="true")
    assert_same_curve(tmp_path / "run", alone / "no BatchNorm")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_processes_reach_the_end_of_those_that_were_not(rank, data, alone, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log.txt"
    command = (*TORCHRUN, *TWO, "--max-restarts", "3", "-m", "broadsight", *options(data, run, *LONG))
    with started(*command, cwd=tmp_path, log=log) as process:
        for _ in range(2):
            at = len(lines_of(run, "epoch"))
            await_in(process, log, lambda at=at: len(lines_of(run, "epoch")) > at and rank in workers_of(process))
            before = log.read_text().count("continuing after")
            workers_of(process)[rank].kill()
            await_in(process, log, lambda n=before: log.read_text().count("continuing after") > n)
        assert process.wait(180) == 0
    assert [line["epoch"] for line in lines_of(run, "epoch")] == list(range(1, 15))
    assert_same_curve(run, alone / "long")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_killed_on_one_of_two_nodes_makes_both_continue(rank, data, alone, tmp_path):
    """Two agents of torchrun, as on two nodes. One restart must do: agents count only the failures of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run, logs = tmp_path / "run", [tmp_path / f"log{node}.txt" for node in (0, 1)]
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job")
    command = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *rendezvous, "--max-restarts", "1")
    command += ("-m", "broadsight", *options(data, run, *LONG))
    with started(*command, cwd=tmp_path, log=logs[0]) as a, started(*command, cwd=tmp_path, log=logs[1]) as b:
        await_in(a, logs[0], lambda: run.is_dir() and state.newest(run / "last"))
        (workers_of(a) | workers_of(b))[rank].kill()
        assert (a.wait(240), b.wait(240)) == (0, 0), logs[0].read_text() + logs[1].read_text()
    assert_same_curve(run, alone / "long")


@pytest.mark.slow
def test_a_twin_is_trained_by_two_processes_as_well(data, tmp_path):
    asked = options(data, tmp_path / "run", "--model", "test_vit", "--twin", "gap")
    finish(*TORCHRUN, *TWO, "-m", "broadsight", *asked, cwd=tmp_path)
    assert len(lines_of(tmp_path / "run" / "twin-gap", "epoch")) == 2


DENSE = {
    "detect": ("--head-args", "width=32"),
    "segment": ("--head-args", "pyramid_channels=32", "channels=16", "dropout=0"),
    "keypoints": ("--head", "simple_baseline", "--head-args", "channels=16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", DENSE)
def test_dense__two_processes_have_the_curve_and_the_figures_of_one(task, tmp_path):
    """Of images that are all of one size: where they differ, each process pads its own."""
    asked = [*f"train scenes:8 --task {task} --model test_vit --size 64 --batch 4 --epochs 2".split(), *DENSE[task]]
    asked += shlex.split("--workers 0 --log-every 1 --no-report --no-strict --device cpu")
    asked += shlex.split("--set resize=1,1 warmup_epochs=0 sync_bn=true")
    finish(*TORCHRUN, *TWO, "-m", "broadsight", *asked, "--out", "two", cwd=tmp_path)
    assert main([*asked, "--out", str(tmp_path / "one"), "--threads", "1"]) == 0
    for one, two in zip(lines_of(tmp_path / "one"), lines_of(tmp_path / "two"), strict=True):
        assert one.pop("kind") == two.pop("kind")
        missing = [{name for name in line if line[name] is None} for line in (one, two)]  # figures of nothing
        assert missing[0] == missing[1]
        known = [{name: value for name, value in line.items() if value is not None} for line in (one, two)]
        assert known[0] == pytest.approx(known[1], rel=2e-3, abs=1e-3)
