"""What exported models gained: files of an earlier version beside those of this one, in one process.

    python benchmarks/before_after.py BEFORE AFTER [--rounds 15] [--json results/runtimes-before-after.json]

BEFORE and AFTER are folders that `performance_study.py --prepare --artefacts FOLDER` filled, each in its own version.
One image of 224 pixels, one thread, process CPU time, all files interleaved, OpenVINO in float32 and in bfloat16; each
earlier file is opened twice, which shows the noise. With --operators also where the time goes, by class of operator, as
the runtimes count it: of every node the shortest of all its runs, since whatever else runs only makes it longer.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from broadsight.benchmark.machine import describe_machine, fixed_threads
from broadsight.benchmark.settings import Settings
from broadsight.benchmark.timing import interleave, paired_ratio, summarize
from broadsight.files import write_json

CALLS = 3  # of a round
RUNTIMES = {"onnx": (".onnx", "f32"), "openvino": (".xml", "f32"), "openvino bf16": (".xml", "bf16")}
CLASSES = {
    "index": ("TopK", "Gather", "Scatter", "CumSum", "Equal", "Sign", "Convert", "Cast", "Where", "Select", "Broad"),
    "products": ("Conv", "GroupConv", "FullyConnected", "MatMul", "Gemm", "Fused"),
    "layout": ("Transpose", "Reorder", "Reshape", "Concat", "Split", "VariadicSplit", "Slice", "StridedSlice", "Pad"),
    "norms and means": ("MVN", "RMS", "LayerNorm", "Reduce", "MaxPool", "AveragePool", "AvgPool", "GlobalAverage"),
    "soft-max": ("Softmax",),
    "element-wise": ("",),
}  # by how the name of a type begins; the first that fits
Session = Callable[[np.ndarray], Any]
Nodes = Callable[[], list[tuple[str, float]]]


def found(folder: str) -> dict[tuple[str, str], Path]:
    """The ONNX and OpenVINO files of a folder, by model and runtime."""
    paths = sorted(Path(folder).iterdir())
    return {
        (path.name.partition("-224x224")[0], runtime): path
        for path in paths
        for runtime, (suffix, _) in RUNTIMES.items()
        if path.suffix == suffix
    }


def opened(path: Path, runtime: str, counts: str | None = None) -> tuple[Session, Nodes]:
    """A file in its runtime, with one thread, and what gives (type, shortest seconds) of all nodes that ran, if it was
    opened with a prefix for the files that it counts in."""
    if runtime == "onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level, options.enable_profiling = 3, counts is not None
        options.profile_file_prefix = counts or ""
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

        def nodes() -> list[tuple[str, float]]:
            events = json.loads(Path(session.end_profiling()).read_text())
            return shortest((one["name"], one["args"]["op_name"], one["dur"] / 1e6) for one in events if is_node(one))

        return lambda image: session.run(None, {"images": image}), nodes
    import openvino

    core = openvino.Core()
    model, seen = core.read_model(str(path)), []
    model.reshape([1, 3, 224, 224])
    hints = {"INFERENCE_PRECISION_HINT": RUNTIMES[runtime][1], "INFERENCE_NUM_THREADS": 1}
    hints |= {"PERFORMANCE_HINT": "LATENCY", "PERF_COUNT": counts is not None}
    request = core.compile_model(model, "CPU", hints).create_infer_request()

    def run(image: np.ndarray) -> None:
        request.infer({0: image}, share_inputs=True)
        if counts is not None:
            ran = (one for one in request.profiling_info if str(one.status).endswith("EXECUTED"))
            seen.extend((one.node_name, one.node_type, one.real_time.total_seconds()) for one in ran)

    return run, lambda: shortest(seen)


def is_node(event: Any) -> bool:
    return event.get("cat") == "Node" and event["name"].endswith("kernel_time")


def shortest(runs: Any) -> list[tuple[str, float]]:
    """(name, type, seconds) of every run of every node -> (type, least seconds) of every node."""
    least: dict[str, tuple[str, float]] = {}
    for name, kind, seconds in runs:
        least[name] = kind, min(seconds, least.get(name, (kind, seconds))[1])
    return list(least.values())


def operators(paths: tuple[Path, Path], runtime: str, image: np.ndarray, rounds: int) -> list[dict[str, Any]]:
    """Nodes and seconds of each class of operator of two files, run in turns."""
    with tempfile.TemporaryDirectory() as folder:
        sessions = [opened(path, runtime, f"{folder}/{place}") for place, path in enumerate(paths)]
        for _ in range(rounds * 10):
            for run, _ in sessions:
                run(image)
        tables: list[dict[str, Any]] = []
        for _, nodes in sessions:
            table = {name: {"nodes": 0, "s": 0.0} for name in CLASSES}
            for kind, seconds in nodes():
                entry = table[next(name for name, begins in CLASSES.items() if kind.startswith(begins))]
                entry["nodes"], entry["s"] = entry["nodes"] + 1, entry["s"] + seconds
            tables.append(table)
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--operators", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    before, after, rows = found(args.before), found(args.after), []
    image = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)

    def timed(session: Session, _: int) -> float:
        start = time.process_time()
        for _ in range(CALLS):
            session(image)
        return (time.process_time() - start) / CALLS

    settings = Settings(batch=1, rounds=args.rounds, threads=1)
    with fixed_threads(1):
        machine, keys = describe_machine(settings), sorted(before.keys() & after.keys())
        sessions = [opened(path, key[1])[0] for key in keys for path in (before[key], after[key], before[key])]
        interleave(sessions, timed, 2)
        times = interleave(sessions, timed, args.rounds)
        for place, key in enumerate(keys):
            earlier, now, again = times[3 * place : 3 * place + 3]
            row = {"model": key[0], "runtime": key[1]}
            row |= {"before_s": asdict(summarize(earlier)), "after_s": asdict(summarize(now))}
            ratio, noise = asdict(paired_ratio(now, earlier)), asdict(paired_ratio(again, earlier))
            row |= {"after_over_before": ratio, "noise": noise}
            took = f"{row['before_s']['median'] * 1e3:6.2f} -> {row['after_s']['median'] * 1e3:6.2f} ms"
            change = f"{ratio['median']:.3f} ±{ratio['spread']:.0%}, itself {noise['median']:.3f}"
            print(f"{key[0]:26} {key[1]:14} {took}  {change}")
            if args.operators:
                one, other = operators((before[key], after[key]), key[1], image, args.rounds)
                row |= {"operators_before": one, "operators_after": other}
                for name in CLASSES:
                    old, new = one[name], other[name]
                    took = f"{old['s'] * 1e3:7.3f} -> {new['s'] * 1e3:7.3f} ms"
                    print(f"    {name:16} {old['nodes']:4} -> {new['nodes']:4} nodes {took}")
            rows.append(row)
        if args.json:
            write_json({"machine": machine, "settings": asdict(settings), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
