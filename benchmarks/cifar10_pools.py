"""Accuracy of the poolings on real images: GAP, CAP, MAP and MAP-light under one narrow ResNet on CIFAR-10.

    python benchmarks/cifar10_pools.py --data TRAIN --val VAL [--out runs/cifar10_pools] [--jobs 2]
        [--json results/cifar10_pools.json]

TRAIN and VAL are whatever `broadsight train` takes: folders or tars of class folders, or torch/cifar10 with --val left
out. Every pool is trained by `broadsight train` with the same recipe, images, epochs and augmentation, once for each
seed. MAP-light is not trained: it is the trained MAP model, lightened, so its figures are of the same weights. All
figures are of the weights after the last epoch, not of the best epoch, which the same images would have chosen.

The backbone is ResNet10-t, a quarter as wide, at CIFAR's own 32 pixels; its last two stages keep the grid, so that
there are 4x4 positions to pool. The settings of MAP are a quarter of its defaults. They, the recipe and the learning
rate were fixed at the start, after one epoch of GAP and of MAP had shown that the rate breaks neither. The epochs were
cut from 7 to 5 to 4 for time alone, when unfinished runs of CAP and MAP had shown their first epochs.

Run again, it continues what was interrupted and repeats nothing. Two runs at a time on a thread each use two cores
better than one on both.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broadsight.benchmark.run import fixed_threads, write_json
from broadsight.inspection.macs import executed_macs
from broadsight.provenance import commit, versions
from broadsight.training import processes
from broadsight.training.request import Request
from broadsight.training.run import Prepared, prepare
from broadsight.training.settings import settings_of, stored_in

MODEL = "resnet10t"
MODEL_ARGS = dict(channels=[16, 32, 64, 128], stem_width=8, output_stride=8)
POOLS: dict[str, dict[str, Any]] = {
    "map": dict(groups=2, tokens=4, dim=96, heads=3, mlp_dim=384),  # first, since it takes longest
    "cap": {},
    "gap": {},
}
LIGHT = "map-light"
RECIPE = "quick"
CHANGES = dict(batch_size=128, lr=2e-3, image_size=32, color_jitter=0.0, channels_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="TRAIN", help="images to train on")
    parser.add_argument("--val", metavar="VAL", help="images to validate on, unless TRAIN sets some apart")
    parser.add_argument("--out", default="runs/cifar10_pools", metavar="DIR", help="where the runs are")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    clock = Times(out / "times.json")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with clock.measuring("total"), ThreadPoolExecutor(args.jobs) as pool:
        pairs = [(name, seed) for seed in range(args.seeds) for name in POOLS]
        list(pool.map(lambda pair: run(*pair, args, out, clock), pairs))
        with fixed_threads(1):
            runs = [outcome(name, seed, out, clock) for name, seed in pairs]
            runs += [lightened(out / f"map-{seed}", seed) for seed in range(args.seeds)]
    record = {
        "model": MODEL,
        "model_args": MODEL_ARGS,
        "pool_args": POOLS,
        "recipe": RECIPE,
        "changes": CHANGES | {"epochs": args.epochs},
        **described(out / "gap-0"),
        "seeds": args.seeds,
        "jobs": args.jobs,
        "threads": 1,
        "cores": os.cpu_count(),
        "load_before": load,
        "machine": "CPU, shared with other work: seconds are an upper bound, cpu_seconds count this work alone",
        "weights": "of the last epoch; map-light: those of map",
        "spread": "sample standard deviation over the seeds",
        "seconds": round(clock.of("total")["seconds"], 1),
        "versions": versions(),
        "commit": commit(),
        "runs": sorted(runs, key=lambda row: (order(row["pool"]), row["seed"])),
        "summary": summary(runs),
    }
    for row in record["summary"]:
        print(
            f"{row['pool']:10} {row['parameters']:9,} parameters {row['macs'] / 1e6:6.2f} M MACs  top-1 "
            f"{row['top1_mean']:.2f} ± {row['top1_spread']:.2f}  over gap {row['over_gap_mean']:+.2f} ± "
            f"{row['over_gap_spread']:.2f}"
        )
    print(f"{record['seconds'] / 60:.1f} minutes in all")
    if args.json:
        write_json(record, args.json)


class Times:
    """Seconds that each part of the study took, kept in a file, so that a continued study adds to them."""

    def __init__(self, path: Path):
        self.path, self.lock = path, threading.Lock()
        self.kept: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.is_file() else {}

    def of(self, name: str) -> dict[str, float]:
        return self.kept.get(name, {"seconds": 0.0, "cpu_seconds": 0.0})

    def add(self, name: str, seconds: float, cpu_seconds: float = 0.0) -> None:
        with self.lock:
            before = self.of(name)
            self.kept[name] = dict(seconds=before["seconds"] + seconds, cpu_seconds=before["cpu_seconds"] + cpu_seconds)
            write_json(self.kept, self.path)

    @contextmanager
    def measuring(self, name: str) -> Generator[None, None, None]:
        """Adds the time within, whether it ends well or not."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - start)


def run(pool: str, seed: int, args: argparse.Namespace, out: Path, clock: Times) -> None:
    """Train one model, unless that was done."""
    name = f"{pool}-{seed}"
    words = [args.data, *(["--val", args.val] if args.val else [])]
    words += ["--model", MODEL, "--model-args", *written(MODEL_ARGS), "--pool", pool]
    words += ["--pool-args", *written(POOLS[pool])] if POOLS[pool] else []
    words += ["--recipe", RECIPE, "--set", *written(CHANGES), f"epochs={args.epochs}", "--seed", str(seed)]
    train(name, words, out, clock)


def train(name: str, words: Sequence[str], out: Path, clock: Times) -> None:
    """`broadsight train` in a process of its own, on one thread, unless that run is finished."""
    folder = out / name
    if not is_finished(folder):
        command = [sys.executable, "-m", "broadsight", "train", *words, "--out", str(folder), "--plain"]
        command += ["--workers", "0", "--threads", "1", "--device", "cpu", "--no-report"]
        command += ["--resume"]  # which begins where there is nothing yet
        start = time.monotonic()
        with (out / f"{name}.log").open("a") as log:
            print(shlex.join(command), file=log, flush=True)
            process = subprocess.Popen(command, stdout=log, stderr=log)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        clock.add(name, time.monotonic() - start, usage.ru_utime + usage.ru_stime)
        if process.returncode:
            raise RuntimeError(f"{name} ended with code {process.returncode}; see {out / name}.log")
    taken, top1 = clock.of(name), evaluations(folder)[-1]["val_top1"]
    print(f"{name:8} top-1 {top1:.2f}, {taken['seconds']:.0f} s, CPU {taken['cpu_seconds']:.0f} s", flush=True)


def outcome(pool: str, seed: int, out: Path, clock: Times) -> dict[str, Any]:
    """How a run ended."""
    name = f"{pool}-{seed}"
    epochs = evaluations(out / name)
    return {
        "pool": pool,
        "seed": seed,
        **figures(epochs[-1]),
        "best_top1": round(max(line["val_top1"] for line in epochs), 3),
        "train_loss": round(epochs[-1]["train_loss"], 4),
        **{key: round(value, 1) for key, value in clock.of(name).items()},
        **size_of(prepare_again(out / name)),
    }


def lightened(folder: Path, seed: int) -> dict[str, Any]:
    """What a trained MAP model gives as it is, which must be what its run says, and lightened."""
    prepared = prepare_again(folder)
    engine = prepared.engine
    engine.resume()
    work, model = engine.work, engine.plain
    values, _ = work.evaluate(model, lambda *_: None)
    logged = evaluations(folder)[-1]
    if abs(values["val_top1"] - logged["val_top1"]) > 1e-3:
        raise RuntimeError(f"{folder} logged top-1 {logged['val_top1']}, its last weights give {values['val_top1']}")
    model.lighten()  # ty: ignore[call-non-callable]
    values, _ = work.evaluate(model, lambda *_: None)
    print(f"light-{seed}  top-1 {values['val_top1']:.2f}", flush=True)
    return {"pool": LIGHT, "seed": seed, **figures(values), **size_of(prepared)}


def prepare_again(folder: Path) -> Prepared:
    """A run as it was begun, with its data and model."""
    request = Request(out=str(folder), workers=0, threads=1, device="cpu")
    stored = stored_in(folder)
    settings, recipe = settings_of(request, stored)
    return prepare(request, settings, recipe, processes.connect("cpu"), stored)


def size_of(prepared: Prepared) -> dict[str, int]:
    model, side = prepared.engine.plain, prepared.engine.recipe.image_size or 0
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "macs": executed_macs(model, (side, side))}


def figures(values: dict[str, float]) -> dict[str, float]:
    digits = {"top1": 3, "top5": 3, "loss": 5}
    names = {"top1": "top1", "top5": "top5", "loss": "val_loss"}
    return {names[key]: round(values[f"val_{key}"], digits[key]) for key in digits}


def described(folder: Path) -> dict[str, Any]:
    """The recipe as resolved and what was trained on, without the places of this machine."""
    about = json.loads((folder / "config.json").read_text())["broadsight"]
    data = {key: about["data"][key] for key in ("kind", "counts", "classes", "fingerprint", "split")}
    return {"resolved": about["recipe"], "data": data}


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics that end its epochs."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [line for line in lines if "val_top1" in line]


def is_finished(folder: Path) -> bool:
    """Whether the last checkpoint says that nothing is left to do."""
    states = sorted((folder / "last").glob("update-*/progress.json"))
    return bool(states) and json.loads(states[-1].read_text())["finished"]


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each pool: its size, mean and spread over the seeds, and by how much it is above GAP seed by seed."""
    base = {row["seed"]: row["top1"] for row in runs if row["pool"] == "gap"}
    rows = []
    for pool in sorted({row["pool"] for row in runs}, key=order):
        of = [row for row in runs if row["pool"] == pool]
        row: dict[str, Any] = {"pool": pool, "runs": len(of), "parameters": of[0]["parameters"], "macs": of[0]["macs"]}
        row |= mean_and_spread("over_gap", [one["top1"] - base[one["seed"]] for one in of])
        for key in ("top1", "top5", "val_loss", "seconds", "cpu_seconds"):
            row |= mean_and_spread(key, [one[key] for one in of if key in one])
        rows.append(row)
    return rows


def mean_and_spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {f"{name}_mean": round(statistics.mean(values), 4), f"{name}_spread": round(spread, 4)}


def order(pool: str) -> int:
    return ("gap", "cap", LIGHT, "map").index(pool)


def written(values: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


if __name__ == "__main__":
    main()
