"""What int8 costs and brings on trained models: accuracy and speed side by side, in ONNX Runtime and OpenVINO.

    broadsight train DATA --model mat_1 --out RUN ...
    python benchmarks/int8_accuracy.py RUN... [--data DATA] [--artefacts FOLDER] [--json results/int8.json]

RUN is what `broadsight export` takes: run folders, or packaged weights with labelled images by --data. Every model is
exported in float32 and in int8, calibrated on images that it was trained on; accuracy is that of its validation images
in the runtime itself. Files are timed interleaved in one process, on a thread, with one image. An int8 file that would
lose more than --max-drop points with half of its layers in float is not written: then the row says what it lost.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from broadsight.api import export
from broadsight.benchmark.machine import describe_machine
from broadsight.benchmark.run import Settings, fixed_threads, write_json
from broadsight.benchmark.timing import interleave, paired_ratio, summarize
from broadsight.deployment import open_artefact
from broadsight.errors import first_line

SUFFIXES = {"onnx": ".onnx", "openvino": ".xml"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--data", help="labelled images, of what is not a run folder")
    parser.add_argument("--artefacts", metavar="FOLDER", default="runs/int8", help="where files go")
    parser.add_argument("--max-drop", type=float, default=1.0, help="points that int8 may lose")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    settings = Settings(batch=1, rounds=args.rounds)
    about = describe_machine(settings)
    with fixed_threads(settings.threads):
        rows = [measured(run, args) for run in args.runs]
    for row in rows:
        for name, one in row["formats"].items():
            gain = one.get("refused") or f"{one['top1']}, {one['speedup']['median']:.2f} times as fast"
            print(row["model"], name, gain)
    if args.json:
        write_json({"machine": about, "max_drop": args.max_drop, "rounds": args.rounds, "rows": rows}, args.json)


def measured(run: str, args: argparse.Namespace) -> dict[str, Any]:
    """What both formats lose and gain on one model."""
    formats: dict[str, dict[str, Any]] = {}
    files: dict[tuple[str, str], Path] = {}
    title = ""
    for name, suffix in SUFFIXES.items():
        here = Path(args.artefacts) / f"{Path(run).name}{suffix}"
        title = export(run, format=name, out=str(here), rounds=0).description.title
        files[name, "float"] = here
        quantised = here.with_stem(f"{here.stem}-int8")
        options: dict[str, Any] = dict(int8=True, data=args.data, max_drop=args.max_drop, rounds=0)
        try:
            found = export(run, format=name, out=str(quantised), **options).int8
        except RuntimeError as error:
            formats[name] = {"refused": first_line(error)}
            continue
        assert found is not None
        files[name, "int8"] = quantised
        formats[name] = {key: value for key, value in found.items() if key != "lines"}
    for name, times in timed(files, args.rounds).items():
        formats[name] |= times
    return {"model": title, "run": Path(run).name, "formats": formats}


def timed(files: dict[tuple[str, str], Path], rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of one image by format, in float and int8, and how many times as fast int8 is."""
    sessions = {key: open_artefact(path) for key, path in files.items()}
    image = next(iter(sessions.values())).description.image
    one = np.random.default_rng(0).random((1, image["channels"], image["height"], image["width"]), dtype=np.float32)
    calls: list[Callable[[], Any]] = [lambda session=session: session(one) for session in sessions.values()]

    def call(what: Callable[[], Any], _: int) -> float:
        before = time.perf_counter()
        what()
        return 1e3 * (time.perf_counter() - before)

    interleave(calls, call, 3)  # to warm up
    samples = dict(zip(sessions, interleave(calls, call, rounds), strict=True))
    found: dict[str, dict[str, Any]] = {}
    for (name, kind), values in samples.items():
        found.setdefault(name, {})[f"{kind}_ms"] = vars(summarize(values))
    for name, one_format in found.items():
        if (name, "int8") in samples:
            one_format["speedup"] = vars(paired_ratio(samples[name, "float"], samples[name, "int8"]))
    return found


if __name__ == "__main__":
    main()
