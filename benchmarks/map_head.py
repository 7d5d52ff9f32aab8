"""How much faster multi-token pooling is than a loop over its groups (per_group_map.py), on the released sizes.

    python benchmarks/map_head.py [--rounds 9] [--json results/map_head.json]

Pools alone, one thread, process CPU time, interleaved, the same weights and outputs: several runs of
`broadsight bench map_resnet50 map_convnext_tiny map_pit_s --head-only --against benchmarks/per_group_map.py`.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import broadsight  # noqa: F401  (registers the models)
from broadsight.benchmark.run import Settings, measure, write_json

HEADS = ("map_resnet50", "map_convnext_tiny", "map_pit_s")
ROOT = Path(__file__).parents[1]
RUNS = [
    dict(batch=1),
    dict(batch=8),
    dict(batch=1, fuse=True),
    dict(batch=8, fuse=True),
    dict(batch=64, fuse=True),
    dict(batch=8, fuse=True, light=True),
    dict(batch=8, train=True),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of each run; small batches have twice as many")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    against = str((Path(__file__).parent / "per_group_map.py").relative_to(ROOT))
    reports = []
    for run in RUNS:
        rounds = args.rounds * (2 if run["batch"] == 1 else 1)
        report = measure(HEADS, Settings(**run, rounds=rounds, head_only=True, against=against))
        reports.append(asdict(report))
        for row in report.rows[1::2]:
            speedup = f"{row.speedup.median:.2f}x ±{row.speedup.spread:.0%}"
            kept = "" if row.saved_ratio is None else f"   keeps {row.saved_ratio:.2f} of the bytes"
            print(f"{run}   {row.model:18} {row.cpu_ms.median:8.1f} ms   {speedup}   {row.launches} kernels{kept}")
    if args.json:
        write_json({"reports": reports}, args.json)


if __name__ == "__main__":
    main()
