"""The command that times models side by side: bench."""

import json as json_
import re
from dataclasses import asdict
from typing import Annotated, Any, Literal

from ..errors import UsageError
from .parser import DONE, MOST, Arg, refuse_ignored, register_models, typed
from .terminal import check_writable, progress_bar, show

EXPORTS = "exported runtimes (--runtime onnx and others)"


def bench(
    models: Annotated[
        list[str],
        Arg("timm models, names or wildcards, NAME@256 for another size; the first is the yardstick", True, "MODEL"),
    ],
    pool: Annotated[
        str | None, Arg("run every model under each of these, comma-separated: gap, cap, ga, map, map-light, vgg, dft")
    ] = None,
    broadcast: Annotated[
        str | None,
        Arg(
            "run every model with each of these, joined by commas: none, cb, scaled, gate, hybrid", of=("whole models",)
        ),
    ] = None,
    head_only: Annotated[
        bool, Arg("only the pooling on feature maps of the right shapes, without the backbone")
    ] = False,
    light: Annotated[bool, Arg("let 'map' pools classify with their averaged tokens alone")] = False,
    against: Annotated[
        str | None,
        Arg(
            "with --head-only: yardstick is the class PerGroupPool of this Python file, on the same weights",
            False,
            "FILE",
        ),
    ] = None,
    runtime: Annotated[
        str,
        Arg("by commas: eager, compile, onnx, int8 (of onnx), openvino, openvino-int8, pt2, executorch"),
    ] = "eager",
    start_up: Annotated[
        bool,
        Arg("with an exported runtime: also time the start of every contender in a process of its own", of=(EXPORTS,)),
    ] = True,
    artefacts: Annotated[
        str | None, Arg("keep what is exported in this folder, and use it again", metavar="FOLDER", of=(EXPORTS,))
    ] = None,
    batch: Annotated[int, Arg("images per call", least=1)] = 8,
    threads: Annotated[int, Arg("threads of operators, in every runtime", least=1, most=MOST)] = 1,
    size: Annotated[
        int | str,
        Arg(
            "image side in pixels, or HEIGHTxWIDTH; several joined by commas show how costs grow",
            of=("models that bring no size of their own (NAME@256)",),
        ),
    ] = 224,
    growth_from: Annotated[
        int,
        Arg(
            "with several sizes: growth exponents are of those with at least the pixels of this side squared",
            of=("several sizes (--size 224,448)",),
            least=1,
        ),
    ] = 512,
    rounds: Annotated[int, Arg("timed calls of each contender", least=1)] = 9,
    warmup: Annotated[int, Arg("calls of each contender before those", least=0)] = 2,
    train: Annotated[bool, Arg("time forward and backward in train mode")] = False,
    fuse: Annotated[bool, Arg("fold what inference allows first, as `broadsight.fuse` does")] = False,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Arg("of weights and images")] = "float32",
    device: Annotated[str, Arg("cpu or cuda")] = "cpu",
    channels_last: Annotated[bool, Arg("channels-last memory format")] = False,
    seed: Annotated[int, Arg("of weights and images", least=0)] = 0,
    json: Annotated[
        str | None, Arg("print JSON, not a table, or write it to FILE; comes last", False, "FILE", "-")
    ] = None,
    plot: Annotated[str | None, Arg("draw the result into a png, svg or pdf file", metavar="FILE")] = None,
    scatter: Annotated[str | None, Arg("draw published top-1 against latency into such a file", metavar="FILE")] = None,
) -> int:
    """Time models side by side: latency, throughput, memory, share of the machine's peak; start-up and file size."""
    given = dict(locals())
    found = [re.fullmatch(r"(\d+)(?:x(\d+))?", one.strip()) for one in str(size).split(",")]
    sizes = [(int(one[1]), int(one[2] or one[1])) for one in found if one]
    if len(sizes) < len(found):
        raise UsageError(f"--size {size}; expected pixels such as 224 or, height first, 224x320; several by commas")
    exports = any(name.strip() not in ("eager", "compile") for name in runtime.split(","))
    facts = {
        EXPORTS: None if exports else f"this is --runtime {runtime}",
        "several sizes (--size 224,448)": None if len(sizes) > 1 else f"this has one, {size}",
        "models that bring no size of their own (NAME@256)": None if not all("@" in m for m in models) else "all do",
        "whole models": "--head-only runs the pool alone" if head_only else None,
    }
    refuse_ignored(bench, given, facts)
    if scatter and len(sizes) > 1:
        raise UsageError("--scatter with several sizes; accuracy is published for one: drop one of the two")
    for path in (json if json != "-" else None, plot, scatter):
        check_writable(path)
    register_models()
    from ..benchmark import accuracy_plot
    from ..benchmark import report as benchmark_report
    from ..benchmark import run as benchmark
    from ..benchmark import scaling as growth
    from ..visual.plots import plot_format

    for path in filter(None, (plot, scatter)):
        plot_format(path)
    settings = benchmark.Settings(
        batch=batch,
        size=sizes[0],
        threads=threads,
        rounds=rounds,
        warmup=warmup,
        runtimes=tuple(name.strip() for name in runtime.split(",")),
        train=train,
        device=device,
        dtype=dtype,
        channels_last=channels_last,
        fuse=fuse,
        seed=seed,
        pools=tuple(name.strip() for name in pool.split(",")) if pool is not None else (),
        broadcasts=tuple(name.strip() for name in broadcast.split(",")) if broadcast is not None else (),
        head_only=head_only,
        light=light,
        against=against,
        start_up=start_up,
    )
    if scatter:
        accuracy_plot.check(benchmark.expand(models), settings.size)
    kept = {} if artefacts is None else {"artefacts": artefacts}
    report: Any
    view: Any = benchmark_report if len(sizes) == 1 else growth
    with progress_bar() as progress:
        if len(sizes) == 1:
            report = benchmark.measure(models, settings, progress, **kept)
        else:
            report = growth.measure(models, settings, sizes, growth_from, progress, **kept)
    record = {"command": typed(), **asdict(report)}
    if json and json != "-":  # files first: whoever reads our output may leave at any time
        benchmark.write_json(record, json)
    if plot:
        view.plot(report, plot)
    if scatter:
        drawn: list[Any] = [report]  # of one size, see above
        accuracy_plot.plot(drawn, scatter)
    if json == "-":
        print(json_.dumps(record, indent=2))
    else:
        show(view.render(report), whole=True)
    return DONE
