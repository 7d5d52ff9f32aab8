"""Whether exported models became slower: files of an earlier version beside those of this one, in one process.

    python benchmarks/before_after.py BEFORE AFTER [--rounds 15] [--json results/runtimes-before-after.json]

BEFORE and AFTER are folders that `performance_study.py --prepare --artefacts FOLDER` filled, each in its own version.
One image of 224 pixels, one thread, process CPU time, interleaved; each earlier file is opened twice, which shows the
noise.
"""

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from broadsight.benchmark.machine import describe_machine, fixed_threads
from broadsight.benchmark.settings import Settings
from broadsight.benchmark.timing import interleave, paired_ratio, summarize
from broadsight.deployment import open_artefact
from broadsight.files import write_json

CALLS = 3  # of a round


def found(folder: str) -> dict[tuple[str, str], Path]:
    """The ONNX and OpenVINO files of a folder, by model and runtime."""
    files = {".onnx": "onnx", ".xml": "openvino"}
    paths = [path for path in sorted(Path(folder).iterdir()) if path.suffix in files]
    return {(path.name.partition("-224x224")[0], files[path.suffix]): path for path in paths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    before, after, rows = found(args.before), found(args.after), []
    image = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)

    def timed(session, _: int) -> float:
        start = time.process_time()
        for _ in range(CALLS):
            session(image)
        return (time.process_time() - start) / CALLS

    settings = Settings(batch=1, rounds=args.rounds, threads=1)
    with fixed_threads(1):
        machine = describe_machine(settings)
        for key in sorted(before.keys() & after.keys()):
            sessions = [open_artefact(path, threads=1) for path in (before[key], after[key], before[key])]
            interleave(sessions, timed, 2)
            earlier, now, again = interleave(sessions, timed, args.rounds)
            row = {"model": key[0], "runtime": key[1]}
            row |= {"before_s": asdict(summarize(earlier)), "after_s": asdict(summarize(now))}
            row |= {
                "after_over_before": asdict(paired_ratio(now, earlier)),
                "noise": asdict(paired_ratio(again, earlier)),
            }
            rows.append(row)
            ratio, noise = row["after_over_before"], row["noise"]
            print(f"{key[0]:26} {key[1]:9} {ratio['median']:.3f} ±{ratio['spread']:.0%}, itself {noise['median']:.3f}")
        if args.json:
            write_json({"machine": machine, "settings": asdict(settings), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
