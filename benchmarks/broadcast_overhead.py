"""What context broadcasting costs a ViT-S, in inference and in a training step.

    python benchmarks/broadcast_overhead.py [--rounds 200] [--batch 2] [--json results/broadcast.json]

Measured twice, since the costs are far below the noise of a single call. As a ratio: one thread, process CPU time,
interleaved, the same weights, many short rounds, in two runs of
`broadsight bench vit_small_patch16_224 --broadcast none,cb,scaled`, the second with `--train`; the printed interval is
that of the median ratio. And as a share: the time that is spent in the broadcasts and in their backward passes, of the
time of the whole step, by a stopwatch around each.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import timm
import torch

import broadsight
from broadsight.benchmark.run import Settings, fixed_threads, measure, median_interval, write_json
from broadsight.layers import ContextBroadcast
from broadsight.layers.kernels.uniform import Uniform

MODEL = "vit_small_patch16_224"
KINDS = ("none", "none", "cb", "scaled")  # the plain model twice, which shows the noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated, the yardstick first")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    kinds = tuple(args.kinds.split(","))
    reports, shares = [], []
    for train in (False, True):
        what = "training step" if train else "inference"
        with fixed_threads(1):
            for kind in ("cb", "scaled"):
                found = share(kind, train)
                shares.append(dict(kind=kind, train=train, batch=8, share=found))
                print(f"{what:14} {kind:10} {found:.2%} of the time, batch 8", flush=True)
        report = measure([MODEL], Settings(batch=args.batch, rounds=args.rounds, train=train, broadcasts=kinds))
        reports.append(asdict(report))
        base = report.rows[0].cpu_samples_ms
        for row in report.rows:
            ratios = [mine / other for mine, other in zip(row.cpu_samples_ms, base, strict=True)]
            low, high = median_interval(ratios)
            ratio = f"{row.cpu_ratio.median:.4f} [{low:.4f}, {high:.4f}]"
            print(f"{what:14} {row.model:45} {row.cpu_ms.median:8.1f} ms   {ratio}", flush=True)
        if args.json:
            write_json({"shares": shares, "reports": reports}, args.json)


def share(kind: str, train: bool, batch: int = 8, steps: int = 9) -> float:
    """Of the time of a step, that of the broadcasts, in training with their backward pass; the median of the steps."""
    torch.manual_seed(0)
    model = broadsight.add_context_broadcast(timm.create_model(MODEL), kind).train(train)
    images = torch.randn(batch, 3, 224, 224)
    watch = Stopwatch()
    for module in model.modules():
        if isinstance(module, ContextBroadcast):
            module.forward = watch.timed(module.forward)
    backward = Uniform.backward
    Uniform.backward = staticmethod(watch.timed(backward))
    shares = []
    try:
        for _ in range(steps + 1):
            watch.seconds, started = 0.0, time.perf_counter()
            with torch.set_grad_enabled(train):
                y = model(images).sum()
            if train:
                model.zero_grad(set_to_none=True)
                y.backward()
            shares.append(watch.seconds / (time.perf_counter() - started))
    finally:
        Uniform.backward = backward
    return statistics.median(shares[1:])  # the first one warms up


class Stopwatch:
    """Adds up the time that functions take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return run


if __name__ == "__main__":
    main()
