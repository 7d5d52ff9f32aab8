"""What looking inside costs: each capture against a plain pass of the same images.

    python benchmarks/capture_cost.py [--models mat_2,deit_small_patch16_224] [--captures entropy,variance] [--size 224]
        [--batch 16] [--rounds 7] [--json results/capture_cost.json]

One thread, process CPU time, interleaved with the plain pass, the same weights and images. Printed are the plain pass
and, for every capture, the median over the rounds of its time divided by that round's plain one. Captures that look at
one image have a plain pass of one image as their yardstick.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
from torch import Tensor, nn

from broadsight import analysis
from broadsight import explanation as explain
from broadsight.benchmark.run import fixed_threads, write_json
from broadsight.benchmark.timing import interleave, paired_ratio, summarize
from broadsight.inspection.passing import pass_images
from broadsight.provenance import versions

MODELS = (
    "mat_2",
    "deit_small_patch16_224",
    "swin_tiny_patch4_window7_224",
    "stvit_small",
    "partialformer_b1",
    "emsnet_tiny",
)
# Functions of broadsight.analysis that look at what one pass computes anyway.
MEASURES = dict(
    entropy="attention_entropy",
    similarity="attention_similarity",
    variance="feature_variance",
    dead="dead_neurons",
    spectrum="log_amplitude",
    logits="token_logits",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--captures", default=",".join([*MEASURES, "look-inside"]))
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows = []
    with fixed_threads(1):
        for name in args.models.split(","):
            torch.manual_seed(0)
            model = timm.create_model(name).eval()
            images = torch.randn(args.batch, 3, args.size, args.size)
            for capture, plain_ms, ratio in cost(model, images, args.captures.split(","), args.rounds):
                rows.append(dict(model=name, capture=capture, plain_ms=plain_ms, ratio=ratio, size=args.size))
                print(f"{name:30} {capture:12} plain {plain_ms:8.1f} ms   {ratio:.3f} x", flush=True)
    if args.json:
        about = dict(batch=args.batch, rounds=args.rounds, threads=1, versions=versions())
        write_json({**about, "rows": rows}, args.json)


def cost(model: nn.Module, images: Tensor, captures: list[str], rounds: int) -> Iterator[tuple[str, float, float]]:
    """(capture, plain pass in ms, ratio) of all captures that the model has something for."""
    one = images[:1]
    plain = {len(x): lambda x=x: pass_images(model, x, batch_size=len(x)) for x in (one, images)}
    candidates: dict[str, tuple[int, Callable[[], Any]]] = {}
    for capture in captures:
        run = look_inside(model, one) if capture == "look-inside" else measure(capture, model, images)
        if run is not None:
            candidates[capture] = len(one if capture == "look-inside" else images), run
    yardsticks = {f"plain {count}": (count, plain[count]) for count in {count for count, _ in candidates.values()}}
    everyone = yardsticks | candidates
    for _, run in everyone.values():  # warms up
        run()

    def timed(who: tuple[int, Callable[[], Any]], _: int) -> float:
        started = time.process_time()
        who[1]()
        return time.process_time() - started

    samples = dict(zip(everyone, interleave(list(everyone.values()), timed, rounds), strict=True))
    for capture, (count, _) in candidates.items():
        base = samples[f"plain {count}"]
        yield capture, 1000 * summarize(base).median, paired_ratio(samples[capture], base).median


def measure(capture: str, model: nn.Module, images: Tensor) -> Callable[[], Any] | None:
    function = getattr(analysis, MEASURES[capture])
    try:
        function(model, images, batch_size=len(images))
    except ValueError as error:
        print(f"{type(model).__name__}, {capture}: {error}")
        return None
    return lambda: function(model, images, batch_size=len(images))


def look_inside(model: nn.Module, image: Tensor) -> Callable[[], Any]:
    kinds = [kind for kind in explain.kinds_of(model) if kind != "gradcam"]  # which has passes of its own
    return lambda: explain.look_inside(model, image, kinds=kinds)


if __name__ == "__main__":
    main()
