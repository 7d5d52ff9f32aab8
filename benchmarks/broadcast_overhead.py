"""What context broadcasting costs a ViT-S, in inference and in a training step.

    python benchmarks/broadcast_overhead.py [--rounds 60] [--json results/broadcast.json]

One thread, process CPU time, interleaved, the same weights: two runs of
`broadsight bench vit_small_patch16_224 --broadcast none,cb,scaled`, the second with `--train`. The costs are far below
the noise of a single call, so many rounds are needed; the printed interval is that of the median ratio.
"""

import argparse
from dataclasses import asdict

import broadsight  # noqa: F401  (registers the models)
from broadsight.benchmark import Settings, measure, median_interval, write_json

MODEL = "vit_small_patch16_224"
KINDS = ("none", "cb", "scaled", "gate", "hybrid")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated, the yardstick first")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    reports = []
    for train in (False, True):
        settings = Settings(batch=args.batch, rounds=args.rounds, train=train, broadcasts=tuple(args.kinds.split(",")))
        report = measure([MODEL], settings)
        reports.append(asdict(report))
        base = report.rows[0].cpu_samples_ms
        for row in report.rows:
            ratios = [mine / other for mine, other in zip(row.cpu_samples_ms, base, strict=True)]
            low, high = median_interval(ratios)
            what = "training step" if train else "inference"
            ratio = f"{row.cpu_ratio.median:.4f} [{low:.4f}, {high:.4f}]"
            print(f"{what:14} {row.model:45} {row.cpu_ms.median:8.1f} ms   {ratio}")
        if args.json:
            write_json({"reports": reports}, args.json)


if __name__ == "__main__":
    main()
