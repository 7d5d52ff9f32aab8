"""Time and peak memory of the backbones from 256x256 to 1333x800, and how both grow with the pixels.

    python benchmarks/high_resolution.py [MODEL...] [--rounds 5] [--json results/high_resolution.json]

As in `broadsight bench MODEL --size 256,384,512,768,1024,1333x800 --batch 1 --threads 1 --warmup 1`: one image, one
thread, float32; every round runs all sizes, and an exponent is the median of the rounds' own, so what slows the machine
down for longer than a round cancels. The models are whole classifiers with random weights. Their heads cost a few
percent and grow linearly, so for dense use the exponents are, if anything, a little higher.

Models of more than 20 G multiply-accumulates at 1024x1024 are run in three rounds at most, of more than 100 G in two.
ResNet, ConvNeXt and Swin are linear by construction, DeiT, ViT and PVT are not: what they show says how far the measure
can be trusted. After each model the file is written anew; run again, the script continues with those that it does not
hold yet.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import broadsight.models  # noqa: F401  registers the models
from broadsight.benchmark.candidates import Variant, build
from broadsight.benchmark.run import Settings, describe_machine, fixed_threads, write_json
from broadsight.benchmark.scaling import Growth, measure, slope
from broadsight.inspection.macs import blank_model, executed_macs

SIZES = ((256, 256), (384, 384), (512, 512), (768, 768), (1024, 1024), (1333, 800))
GROWTH_FROM = 512
FAMILIES = {
    "emsnet": ("emsnet_xxtiny", "emsnet_xtiny", "emsnet_tiny"),
    "mat": ("mat_1", "mat_2", "mat_3", "mat_4", "mat_5"),
    "partialformer": tuple(f"partialformer_b{i}" for i in range(5)),
    "stvit": ("stvit_small", "stvit_base", "stvit_large"),
    "map": ("map_resnet50", "map_convnext_tiny"),
    "broadcast": ("vit_small_cb",),
    "yardsticks": (
        "resnet50",
        "convnext_tiny",
        "swin_tiny_patch4_window7_224",
        "pvt_v2_b1",
        "deit_small_patch16_224",
    ),
}
FEWER_ROUNDS = {100e9: 2, 20e9: 3}  # for models with more multiply-accumulates than that at 1024x1024
CELLS = ((8, 4, 1, 1), (8, 4, 2, 1), (8, 4, 2, 2))  # of super tokens; the first are the paper's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all if none is named")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", default="results/high_resolution.json")
    args = parser.parse_args()
    file = Path(args.json)
    settings = Settings(batch=1, rounds=args.rounds, warmup=1)
    record = opened(file, settings)
    family_of = {name: family for family, names in FAMILIES.items() for name in names}
    for name in args.models or family_of:
        if any(row["model"] == name for row in record["models"]):
            continue
        started, cpu = time.perf_counter(), time.process_time()
        growth = measure([name], rounds_for(name, settings), SIZES, GROWTH_FROM)
        row = described(growth, family_of.get(name, "other"))
        row |= dict(seconds=round(time.perf_counter() - started, 1), cpu_seconds=round(time.process_time() - cpu, 1))
        record["models"].append(row)
        write_json(record, file)
        found = {key: round(row[key]["value"], 3) for key in ("time", "cpu_time", "memory", "macs")}
        print(f"{name:30} {found} {row['cpu_seconds']:.0f} s", flush=True)


def opened(file: Path, settings: Settings) -> dict[str, Any]:
    """What the file holds already, or an empty record."""
    if file.is_file():
        return json.loads(file.read_text("utf-8"))
    with fixed_threads(settings.threads):
        machine = describe_machine(settings)
    return {
        "sizes": SIZES,
        "growth_from": GROWTH_FROM,
        "machine": machine,
        "settings": asdict(settings),
        "stvit_cells": cells_of_stvit(),
        "models": [],
    }


def rounds_for(name: str, settings: Settings) -> Settings:
    (candidate,) = build(Variant(name), replace(settings, size=(1024, 1024)))
    most = next((rounds for macs, rounds in FEWER_ROUNDS.items() if candidate.macs > macs), settings.rounds)
    return replace(settings, rounds=min(settings.rounds, most))


def cells_of_stvit() -> list[dict[str, Any]]:
    """How multiply-accumulates of `stvit_small` would grow with other cells in the upper stages."""
    sizes = [size for size in SIZES if math.prod(size) >= GROWTH_FROM**2]
    pixels = [math.prod(size) for size in sizes]
    models = [blank_model("stvit_small", cells=cells) for cells in CELLS]
    macs = [[executed_macs(model, size) for size in sizes] for model in models]
    return [dict(cells=cells, macs=slope(pixels, counts)) for cells, counts in zip(CELLS, macs, strict=True)]


def described(growth: Growth, family: str) -> dict[str, Any]:
    """A model's exponents, and its figures at every size."""
    machine = growth.reports[0].machine
    at = [
        dict(
            size=report.settings.size,
            macs=row.macs,
            peak_bytes=row.peak_bytes,
            wall_ms=asdict(row.wall_ms),
            cpu_ms=asdict(row.cpu_ms),
            wall_samples_ms=[round(ms, 3) for ms in row.wall_samples_ms],
            cpu_samples_ms=[round(ms, 3) for ms in row.cpu_samples_ms],
        )
        for report in growth.reports
        for row in report.rows
    ]
    loads = dict(load_before=machine["load_before"], load_after=machine["load_after"])
    return asdict(growth.rows[0]) | dict(family=family, rounds=machine["rounds_completed"], at=at, **loads)


if __name__ == "__main__":
    main()
