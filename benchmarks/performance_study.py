"""All families beside what a user would pick instead, in several runtimes: the figures of docs/performance.md.

    python benchmarks/performance_study.py --artefacts FOLDER [--prepare] [--part families|runtimes] [--rounds 15]

One image, one thread, float32 (and int8), random weights; every model at the size that its top-1 is published for.
All candidates are interleaved in one process. Exporting takes most of the time and need not be done on a quiet machine:
with --prepare the script only fills the folder, in as many processes as --jobs says, and may be stopped and started
again. What some runtime cannot take is left out and named in the result, with the reason.

The part `families` holds every family with ONNX Runtime, OpenVINO and int8; `runtimes` one model of each family in
all runtimes, since compiling and lowering take minutes for each.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

import broadsight.models  # noqa: F401  registers the models
from broadsight.benchmark.accuracy_plot import published
from broadsight.benchmark.candidates import Variant, create, name_and_size
from broadsight.benchmark.run import Settings, fixed_threads, measure, write_json
from broadsight.benchmark.runtimes import Artefacts

OURS = (
    *("stvit_small", "emsnet_xxtiny", "mat_1", "partialformer_b0"),
    *("map_mobilenetv1", "map_resnet50", "deit_tiny_distilled_cb_s", "pvt_v2_b0_cb"),
)
OTHERS = (
    *("mobilenetv4_conv_small", "efficientnet_b0", "fastvit_t8", "repvit_m0_9", "efficientformerv2_s0"),
    *("mobilevitv2_100", "edgenext_small", "pvt_v2_b1", "swin_tiny_patch4_window7_224", "convnext_tiny", "resnet50"),
)
ONE_EACH = ("stvit_small", "emsnet_xxtiny", "mat_1", "partialformer_b0", "map_mobilenetv1", "deit_tiny_distilled_cb_s")
PARTS = {
    "families": ((*OURS, *OTHERS), ("eager", "onnx", "openvino", "int8")),
    "runtimes": (
        (*ONE_EACH, "mobilenetv4_conv_small", "resnet50"),
        ("eager", "compile", "pt2", "onnx", "openvino", "executorch", "int8", "openvino-int8"),
    ),
}
FILES = {"families": "results/performance.json", "runtimes": "results/performance-runtimes.json"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="those of the part if none is named")
    parser.add_argument("--part", choices=PARTS, default="families")
    parser.add_argument("--artefacts", metavar="FOLDER", required=True)
    parser.add_argument("--prepare", action="store_true", help="export only")
    parser.add_argument("--jobs", type=int, default=2, help="processes that export")
    parser.add_argument("--runtimes", help="joined by commas; those of the part if none is named")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-start-up", action="store_true", help="leave out the fresh processes, which take longest")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    names, runtimes = PARTS[args.part]
    names = [sized(name) for name in args.models or names]
    runtimes = tuple(args.runtimes.split(",")) if args.runtimes else runtimes
    settings = Settings(batch=1, rounds=args.rounds, warmup=3, runtimes=runtimes, start_up=not args.no_start_up)
    folder = Path(args.artefacts)
    folder.mkdir(parents=True, exist_ok=True)
    if args.prepare and args.jobs <= 1:
        for name in names:
            prepare(name, settings, folder)
        return
    share = [names[place :: args.jobs] for place in range(args.jobs)]
    common = ["--artefacts", str(folder), "--prepare", "--jobs", "1", "--runtimes", ",".join(runtimes)]
    jobs = [subprocess.Popen([sys.executable, __file__, *mine, *common]) for mine in share if mine]
    codes = [job.wait() for job in jobs]
    if any(codes):
        sys.exit("an export process failed")
    if args.prepare:
        return
    # A model that some runtime cannot take would stop the whole measurement.
    notes = {name: failure_note(folder, name) for name in names}
    left_out = {name: json.loads(note.read_text()) for name, note in notes.items() if note.exists()}
    began = time.time()

    def progress(done: int, total: int | None, doing: str) -> None:
        print(f"{time.time() - began:6.0f} s  {done}/{total}  {doing}", file=sys.stderr)

    report = measure([name for name in names if name not in left_out], settings, progress, folder)
    record = {"left_out": left_out, "minutes": (time.time() - began) / 60, **asdict(report)}
    write_json(record, args.json or FILES[args.part])


def sized(name: str) -> str:
    """A name with the size that its top-1 is published for, if that is another than the papers' own."""
    figure = published().get(name)
    return name if "@" in name or figure is None or figure.size == 224 else f"{name}@{figure.size}"


def prepare(given: str, settings: Settings, folder: Path) -> None:
    """Export a model for all runtimes that are named; what fails is written down."""
    artefacts = Artefacts(folder, settings.threads)
    name, size = name_and_size(given)
    variant = Variant(name, size=size)
    here = replace(settings, size=size or settings.size)
    with fixed_threads(settings.threads):
        model = create(variant, here).eval()
        images = torch.randn(settings.batch, model.pretrained_cfg["input_size"][0], *here.size)
        failures: dict[str, str] = {}
        for runtime in settings.exported:
            began = time.time()
            try:
                artefacts.open(runtime, model, str(variant), images)
                print(f"{given} for {runtime}: {time.time() - began:.0f} s", flush=True)
            except Exception as error:
                reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
                failures[runtime] = reason
                print(f"{given} for {runtime}: {reason}", flush=True)
    note = failure_note(folder, given)
    note.unlink(missing_ok=True)
    if failures:
        write_json(failures, note)


def failure_note(folder: Path, name: str) -> Path:
    return folder / f"{name}-failed.json"


if __name__ == "__main__":
    main()
