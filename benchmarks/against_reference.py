"""How much faster the exact fast forms are than the published formulations, side by side in one run.

    python benchmarks/against_reference.py [--train] [--batch 8] [--rounds 9] [--json FILE]

The reference models are those of the tests: written from the papers' equations, the same weights, the same outputs. One
thread, process CPU time, interleaved; the ratio is the median of the rounds' ratios. `gpu_check.py` does the same on a
GPU, in elapsed time.
"""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

import timm
import torch

import broadsight
from broadsight.benchmark.run import (
    Settings,
    _Sample,
    describe_machine,
    fixed_threads,
    interleave,
    paired_ratio,
    peak_memory,
    saved_for_backward,
    summarize,
    synchronize,
    write_json,
)
from broadsight.inspection.precision import DTYPES

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reference import emsnet, mat, partialformer, stvit

REFERENCES = {
    "stvit_small": lambda: stvit.STViT((64, 128, 320, 512), (3, 5, 9, 3), (1, 2, 5, 8)),
    "partialformer_b1": lambda: partialformer.PartialFormer(32, (2, 2, 6, 6), (2, 4, 8, 16)),
    "mat_2": lambda: mat.MAT(32, (2, 2, 6, 6), (2, 4, 8, 16)),
    "emsnet_xxtiny": lambda: emsnet.EMSNet((32, 64, 128, 192), (2, 2, 4, 2), (8, 8, 4, 4)),
}


def compare(name: str, settings: Settings) -> list[dict]:
    torch.manual_seed(settings.seed)
    ours = timm.create_model(name)
    reference = REFERENCES[name]()
    reference.load_state_dict(ours.state_dict())
    images = torch.randn(settings.batch, 3, *settings.size)
    candidates = {"published formulation": reference, "ours": ours}
    if settings.train:
        for model in candidates.values():
            model.train()
    else:
        candidates["ours, fused"] = broadsight.fuse(ours)
        for model in candidates.values():
            model.eval()
        with torch.no_grad():
            expected = reference(images[:1])
            for model in candidates.values():
                torch.testing.assert_close(model(images[:1]), expected, rtol=1e-3, atol=1e-4)

    def call(model: torch.nn.Module) -> None:
        if settings.train:
            model.zero_grad(set_to_none=True)
            model(images).sum().backward()
        else:
            with torch.inference_mode():
                model(images)

    def timed(model: torch.nn.Module, _: int) -> _Sample:
        synchronize(settings.device)
        wall, cpu = time.perf_counter(), time.process_time()
        call(model)
        synchronize(settings.device)
        return _Sample(time.perf_counter() - wall, time.process_time() - cpu, 0)

    place = dict(device=settings.device, dtype=DTYPES[settings.precisions[0]])
    images, models = images.to(**place), [model.to(**place) for model in candidates.values()]
    interleave(models, timed, settings.warmup)
    samples = interleave(models, timed, settings.rounds)
    rows = []
    for (label, model), mine in zip(candidates.items(), samples, strict=True):
        clock = "cpu" if settings.device == "cpu" else "wall"
        seconds, base = ([getattr(s, clock) for s in one] for one in (mine, samples[0]))
        speedup = paired_ratio(base, seconds)
        row = {"model": name, "form": label, f"{clock}_s": asdict(summarize(seconds)), "speedup": asdict(speedup)}
        row["peak_bytes"] = peak_memory(lambda model=model: call(model), settings.device)
        if settings.train:
            row["saved_bytes"] = saved_for_backward(model, lambda model=model: model(images))
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(REFERENCES), help="default: all four")
    parser.add_argument("--train", action="store_true", help="forward and backward in train mode")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    settings = Settings(batch=args.batch, rounds=args.rounds, warmup=1, train=args.train)
    with fixed_threads(1):
        rows = []
        for name in args.models:
            for row in compare(name, settings):
                rows.append(row)
                about, speedup = f"{name:18} {row['form']:22} {1e3 * row['cpu_s']['median']:8.1f} ms", row["speedup"]
                print(f"{about}   {speedup['median']:.2f}x ±{speedup['spread']:.0%}")
        if args.json:
            write_json({"machine": describe_machine(settings), "settings": asdict(settings), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
