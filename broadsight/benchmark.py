"""Speed and memory of any timm models, measured side by side.

Timings on a shared machine drift. Every round therefore runs every contender once, each round starting with another
one, and contenders are compared within rounds: what slows the whole machine down for a second cancels in the ratio.
Wall time says how long one waits; CPU time, summed over threads, is what other processes disturb least.
"""

import gc
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from .contenders import DTYPES, RUNTIMES, Contender, Settings, blame, build, load_rival, variants
from .drawing import PALETTE, plot_format, save, whole_file
from .provenance import commit

try:
    import resource
except ImportError:  # Windows has no page-fault counter to read; the column stays empty there
    resource = None

__all__ = ["DTYPES", "RUNTIMES", "Report", "Row", "Settings", "Summary", "measure", "plot", "render"]

T = TypeVar("T")
S = TypeVar("S")
Progress = Callable[[int, int | None, str], None]  # steps done, steps in all, what is being done now

GEMM_SIZES = (1024, 1536, 2048)  # sides of the square products that stand for the machine's peak
TRAIN_FORWARDS = 3  # a step multiplies once forward and twice backward: towards the inputs and towards the weights
FREE_OPERATIONS = (
    *("_unsafe_view", "_reshape_alias", "alias", "detach", "lift_fresh"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
)
MEMORY_VARIABLES = ("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES", "MIMALLOC_", "TCMALLOC_", "JEMALLOC", "PYTORCH_")
THREAD_VARIABLES = ("OMP_", "KMP_", "GOMP_", "MKL_")


@dataclass(frozen=True)
class Summary:
    """Median, minimum and spread of some samples; spread is the inter-quartile range divided by the median."""

    median: float
    minimum: float
    spread: float


@dataclass(frozen=True)
class Row:
    """One contender: a model under a runtime.

    Args:
        params: Parameters, after fusing if asked for.
        macs: Multiply-accumulates that one image's forward pass executes.
        wall_ms, cpu_ms: Milliseconds per call (one batch): elapsed, and consumed by the process in all its threads.
        throughput: Images per second at the median wall time.
        ratio, cpu_ratio: This contender's time over the yardstick's, paired within each round. Above 1 is slower. The
            yardstick is the first contender; with `Settings.against` that implementation of the same pool.
        speedup: The inverse of cpu_ratio: the yardstick's CPU time over this contender's.
        peak_fraction: 2 * MACs per second of the fastest call over the best matrix product's FLOP per second: best
            against best, since both are what the machine can do when left alone. A training step counts as 3 forwards.
            Above 1 means that the dtype is emulated and large products, of all things, are what it is slowest at.
        peak_bytes: See `peak_memory`.
        saved_bytes: See `saved_for_backward`; None in inference, like
        saved_ratio: these over the yardstick's.
        launches: See `kernel_launches`; None unless a pool is run alone and eagerly.
        page_faults: Median of the minor page faults per call: memory handed back to the system and fetched anew.
        wall_samples_ms, cpu_samples_ms: Every round, in order.
    """

    model: str
    runtime: str
    params: int
    macs: int
    wall_ms: Summary
    cpu_ms: Summary
    throughput: float
    ratio: Summary
    cpu_ratio: Summary
    speedup: Summary
    peak_fraction: float
    peak_bytes: int
    saved_bytes: int | None
    saved_ratio: float | None
    launches: int | None
    page_faults: float | None
    wall_samples_ms: list[float]
    cpu_samples_ms: list[float]


@dataclass(frozen=True)
class Report:
    """Everything `measure` found; `dataclasses.asdict` gives what JSON can hold and `from_dict` takes it back."""

    machine: dict[str, Any]
    settings: Settings
    rows: list[Row]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Report":
        summaries = {field.name for field in fields(Row) if field.type is Summary}

        def revive(row: dict[str, Any]) -> Row:
            values: dict[str, Any] = {name: Summary(**row[name]) for name in summaries}
            return Row(**(row | values))

        return cls(data["machine"], Settings(**data["settings"]), [revive(row) for row in data["rows"]])


@dataclass(frozen=True)
class _Sample:
    wall: float  # seconds
    cpu: float  # seconds
    faults: int


def measure(names: Sequence[str], settings: Settings | None = None, progress: Progress | None = None) -> Report:
    """Time models against each other; all of them are held in memory at once.

    Args:
        names: timm model names or wildcards such as `stvit_*`. The first is what the others are compared with; naming
            a model twice shows the noise of the measurement.
        progress: Called before every step with steps done, steps in all, and a few words on what comes.
    """
    settings = settings or Settings()
    models = variants(expand(names), settings)
    rival = None if settings.against is None else load_rival(settings.against)
    count = len(models) * len(settings.runtimes) * (1 if rival is None else 2)
    total = 1 + len(models) + count * (1 + settings.warmup + settings.rounds)
    done = 0

    def step(doing: str) -> None:
        nonlocal done
        if progress:
            progress(done, total, doing)
        done += 1

    compiling = _room_for_compilations(count) if "compile" in settings.runtimes else nullcontext()
    with fixed_threads(settings.threads), torch.random.fork_rng(), compiling:
        machine = describe_machine(settings)
        contenders: list[Contender] = []
        yardsticks: list[int] = []
        for variant in models:
            step(f"building {variant}")
            made = build(variant, settings, rival)
            yardsticks += [0 if rival is None else len(contenders)] * len(made)
            contenders += made
        step("matrix-product peak of this machine")
        machine["gemm_flops"] = gemm_peak(settings)
        for contender in contenders:
            for _ in range(settings.warmup):
                step(f"warming up {contender}")
                _timed(contender, settings)

        def timed(contender: Contender, round_: int) -> _Sample:
            step(f"round {round_ + 1} of {settings.rounds}")
            return _timed(contender, settings)

        samples = interleave(contenders, timed, settings.rounds)
        machine["load_after"] = _load()
        machine["rounds_completed"] = len(samples[0])
        rows: list[Row] = []
        for contender, mine, yardstick in zip(contenders, samples, yardsticks, strict=True):
            # After the timing: watching what is saved makes torch.compile specialise a second time.
            step(f"memory of {contender}")
            row = _row(contender, mine, samples[yardstick], machine["gemm_flops"], settings)
            if row.saved_bytes is not None:
                base = (rows[yardstick] if yardstick < len(rows) else row).saved_bytes or 1
                row = replace(row, saved_ratio=row.saved_bytes / base)
            rows.append(row)
    if progress:
        progress(total, total, "done")
    return Report(machine, settings, rows)


def interleave(contenders: Sequence[T], timed: Callable[[T, int], S], rounds: int) -> list[list[S]]:
    """Run `timed(contender, round)` for all contenders in every round, starting each round one further along.

    An interrupt ends it early: the rounds that are complete count, if there is any.

    Returns:
        Samples by contender, then by round.
    """
    samples: list[list[S]] = [[] for _ in contenders]
    try:
        for round_ in range(rounds):
            for i in range(len(contenders)):
                place = (round_ + i) % len(contenders)
                samples[place].append(timed(contenders[place], round_))
    except KeyboardInterrupt:
        complete = min(len(mine) for mine in samples)
        if not complete:
            raise
        samples = [mine[:complete] for mine in samples]
    return samples


def summarize(values: Sequence[float]) -> Summary:
    median = statistics.median(values)
    if len(values) < 2:
        return Summary(median, median, 0.0)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, min(values), (third - first) / median if median else 0.0)


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> Summary:
    """Summary of `values[r] / base[r]` over the rounds r: a ratio of medians would mix different moments."""
    return summarize([value / max(other, 1e-9) for value, other in zip(values, base, strict=True)])


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Where the median that the values are drawn around lies, by counting alone: whatever their distribution is.

    The values between which it lies are those that so many coin tosses would hardly fall short of or exceed. Few values
    cannot be that sure: then it is the smallest and the largest.
    """
    ordered, count = sorted(values), len(values)
    below, cut = 0.5**count, 0  # the chance that not more than `cut` values are below the median
    while below + math.comb(count, cut + 1) * 0.5**count <= (1 - confidence) / 2:
        cut += 1
        below += math.comb(count, cut) * 0.5**count
    return ordered[cut], ordered[count - 1 - cut]


def expand(names: Sequence[str]) -> list[str]:
    """timm names as given, wildcards replaced by what they match and is not listed yet; unknown names are refused."""
    found: list[str] = []
    for name in names:
        if any(c in name for c in "*?["):
            matches = timm.list_models(name)
            if not matches:
                raise ValueError(f"no timm model matches {name!r}; `broadsight models` lists those of broadsight")
            found += [match for match in matches if match not in found]
        elif timm.is_model(name):
            found.append(name)
        else:
            near = get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
            hint = f"nearest: {', '.join(near)}" if near else "`broadsight models` lists those of broadsight"
            raise ValueError(f"unknown model {name!r}; {hint}")
    if not found:
        raise ValueError("no model named; expected at least one timm model name or wildcard")
    return found


@contextmanager
def fixed_threads(threads: int) -> Generator[None, None, None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gemm_peak(settings: Settings, repeats: int = 4, seconds: float = 3.0) -> float:
    """FLOP per second of the fastest of a few large square matrix products, at the settings' dtype and device.

    Where a dtype is only emulated a product may take a minute; no new one is begun once `seconds` are over.
    """
    best, started = 0.0, time.perf_counter()
    for side in GEMM_SIZES:
        a, b = torch.randn(2, side, side).to(settings.device, DTYPES[settings.dtype])
        for _ in range(repeats):  # the first one warms up; being slower, it never counts
            _synchronize(settings.device)
            start = time.perf_counter()
            torch.mm(a, b)
            _synchronize(settings.device)
            end = time.perf_counter()
            best = max(best, 2 * side**3 / (end - start))
            if end - started > seconds:
                return best
    return best


def peak_memory(call: Callable[[], Any], device: str = "cpu") -> int:
    """Bytes that torch's allocator holds at the worst moment of a call, beyond what was allocated before it.

    Counts activations, temporaries, gradients and the result. Does not count weights and inputs, which exist before,
    nor scratch that BLAS or oneDNN allocate for themselves. On the CPU it is summed up from the profiler's log of
    every allocation, so unlike the resident size of the process it depends neither on the C library's caching nor on
    what ran earlier, and repeats exactly. On CUDA it is the same quantity read from the caching allocator.
    """
    if torch.device(device).type == "cuda":
        _synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        _synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with tempfile.TemporaryDirectory() as folder, _quiet_profiler():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
            call()
        trace = Path(folder) / "trace.json"
        log.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    live: dict[int, int] = {}  # address -> bytes; a block that was there before the call may be freed, but is not ours
    now = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            live[address] = size
            now += size
        else:
            now -= live.pop(address, 0)
        peak = max(peak, now)
    return peak


def saved_for_backward(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes that a forward pass keeps alive for its backward pass.

    Every storage counts once and in full, however many views of it are saved. The model's own parameters and buffers
    are left out; the input batch counts, if some layer needs it again.
    """
    own = {t.untyped_storage().data_ptr() for t in chain(model.parameters(), model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}  # holding the storages stops their addresses from being used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


def kernel_launches(call: Callable[[], Any]) -> int:
    """Operations of a call that compute or copy, which on a GPU is about one kernel each; views are free."""

    class Count(TorchDispatchMode):
        launches = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.launches += not func.is_view and func._schema.name.removeprefix("aten::") not in FREE_OPERATIONS
            return func(*args, **(kwargs or {}))

    with Count() as counted:
        call()
    return counted.launches


def describe_machine(settings: Settings) -> dict[str, Any]:
    """Whatever else a reader needs to know to judge a timing."""
    from . import __version__

    device = torch.device(settings.device)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {
            "broadsight": __version__,
            "torch": torch.__version__,
            "timm": timm.__version__,
            "python": platform.python_version(),
        },
        "commit": commit(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "load_before": _load(),
        "memory_variables": _environment(MEMORY_VARIABLES),
        "thread_variables": _environment(THREAD_VARIABLES),
    }


def render(report: Report) -> Table:
    """A table with one row per contender, times as median ± spread."""
    settings, machine = report.settings, report.machine
    interrupted = machine["rounds_completed"] < settings.rounds
    load = f"; interrupted after {machine['rounds_completed']} rounds" if interrupted else ""
    if machine["load_before"]:
        load += f"; load {machine['load_before'][0]:.1f} before, {machine['load_after'][0]:.1f} after"
    versions = machine["versions"]
    runtimes = {row.runtime for row in report.rows}
    against, digits = settings.against is not None, 2 if settings.head_only else 1
    compared = (
        "speed-up: how many times faster than PerGroupPool with the same weights, in CPU time"
        if against
        else ("ratios are to the first row")
    )
    table = Table(
        title=_headline(settings) + (f", {runtimes.pop()}" if len(runtimes) == 1 else ""),
        caption=f"{machine['cpu'] if machine['device'] == 'cpu' else machine['device']}{load}; "
        f"peak {machine['gemm_flops'] / 1e9:.1f} GFLOP/s; torch {versions['torch']}, timm {versions['timm']}\n"
        f"± is the inter-quartile range; {compared}, paired within rounds",
        box=SIMPLE_HEAD,  # the fewest columns lost to decoration: the table has to fit a terminal
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("model", no_wrap=True)
    if runtimes:
        table.add_column("runtime")
    numbers = ["params\nM", "MACs\nG", "wall\nms", "min\nms", "CPU\nms", "images\n/s"]
    numbers += ["speed-up"] if against else ["wall\nratio", "CPU\nratio"]
    numbers += ["of\npeak", "memory\nMB", *(["saved\nMB", "saved\nratio"] if settings.train else []), "page\nfaults"]
    for name in [*numbers, *(["kernels"] if settings.head_only else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        cells = [f"{row.params / 1e6:.2f}", f"{row.macs / 1e9:.2f}", _plus_minus(row.wall_ms, digits)]
        cells += [f"{row.wall_ms.minimum:.{digits}f}", _plus_minus(row.cpu_ms, digits), f"{row.throughput:.1f}"]
        cells += [_times(row.speedup)] if against else [_plus_minus(row.ratio, 2), _plus_minus(row.cpu_ratio, 2)]
        cells += [f"{row.peak_fraction:.0%}", f"{row.peak_bytes / 1e6:.1f}"]
        if row.saved_bytes is not None:
            cells += [f"{row.saved_bytes / 1e6:.1f}", f"{row.saved_ratio:.2f}"]
        cells += ["-" if row.page_faults is None else f"{row.page_faults:.0f}"]
        cells += [] if not settings.head_only else ["-" if row.launches is None else str(row.launches)]
        table.add_row(row.model, *([row.runtime] if runtimes else []), *cells)
    return table


def plot(report: Report, path: str | Path) -> None:
    """Draw latency and throughput as bars with quartile whiskers into a png, svg or pdf file.

    The file appears complete or not at all.
    """
    plot_format(path)
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    settings, rows = report.settings, report.rows
    colours = {runtime: PALETTE[i % len(PALETTE)] for i, runtime in enumerate(dict.fromkeys(r.runtime for r in rows))}
    figure = Figure(figsize=(11, 1.8 + 0.42 * len(rows)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, label, convert in (
        (panels[0], f"latency, ms per batch of {settings.batch} (less is better)", lambda ms: ms),
        (panels[1], "throughput, images per second (more is better)", lambda ms: 1e3 * settings.batch / ms),
    ):
        for place, row in enumerate(rows):
            samples = [convert(ms) for ms in row.wall_samples_ms]
            middle = convert(row.wall_ms.median)
            low, _, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
            # rounding may put the median an ulp outside its own quartiles, which error bars refuse
            whisker = [[max(middle - low, 0.0)], [max(high - middle, 0.0)]]
            panel.barh(place, middle, color=colours[row.runtime], xerr=whisker, ecolor="black", capsize=3, height=0.7)
            panel.annotate(
                f"{middle:.4g}", (max(middle, high), place), (5, 0), textcoords="offset points", va="center", fontsize=8
            )
        panel.set_xlabel(label)
        panel.margins(x=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), [row.model for row in rows])
    panels[0].invert_yaxis()  # shared, so that both panels read from the top like the table
    if len(colours) > 1:
        handles = [Patch(color=colour, label=runtime) for runtime, colour in colours.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(f"{_headline(settings)}: median and quartiles")
    save(figure, path)


def write_json(data: Any, path: str | Path) -> None:
    """Write JSON; like a plot, the file appears complete or not at all."""
    with whole_file(Path(path)) as unfinished:
        unfinished.write_text(json.dumps(data, indent=2) + "\n")


def _headline(settings: Settings) -> str:
    what = "training step" if settings.train else "inference" + (", fused" if settings.fuse else "")
    what = ("pools alone, " if settings.head_only else "") + ("light, " if settings.light else "") + what
    layout = ", channels last" if settings.channels_last else ""
    plural = "s" if settings.threads > 1 else ""
    return (
        f"{what}, batch {settings.batch} at {settings.size[0]}x{settings.size[1]}, {settings.dtype}{layout}, "
        f"{settings.threads} thread{plural}, {settings.rounds} rounds"
    )


def _times(speedup: Summary) -> str:
    return "1 (yardstick)" if speedup == Summary(1.0, 1.0, 0.0) else f"{speedup.median:.2f}x ±{speedup.spread:.0%}"


def _plus_minus(summary: Summary, digits: int) -> str:
    return f"{summary.median:.{digits}f} ±{summary.spread:.0%}"


def _timed(contender: Contender, settings: Settings) -> _Sample:
    collecting = gc.isenabled()
    gc.disable()  # a collection belongs to whoever left the garbage, not to the contender during which it happens
    try:
        with blame(str(contender), f"running a batch of {settings.batch} at {settings.size[0]}x{settings.size[1]}"):
            _synchronize(settings.device)
            faults, cpu, wall = _page_faults(), time.process_time(), time.perf_counter()
            contender.call()
            _synchronize(settings.device)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            return _Sample(wall, cpu, _page_faults() - faults)
    finally:
        if collecting:
            gc.enable()


def _row(contender: Contender, mine: list[_Sample], base: list[_Sample], gemm_flops: float, settings: Settings) -> Row:
    wall_ms, cpu_ms = [1e3 * s.wall for s in mine], [1e3 * s.cpu for s in mine]
    wall = summarize(wall_ms)
    flops = 2 * contender.macs * settings.batch * (TRAIN_FORWARDS if settings.train else 1)
    contender.model.zero_grad(set_to_none=True)  # the last step's gradients are not there at the start of a first one
    with blame(str(contender), "measuring memory"):
        peak_bytes = peak_memory(contender.call, settings.device)
        saved_bytes = saved_for_backward(contender.model, contender.forward) if settings.train else None
        counted = settings.head_only and contender.runtime == "eager"
        # Not the call itself: inference mode does not show what operations are made of.
        once = contender.call if settings.train else torch.no_grad()(contender.forward)
        launches = kernel_launches(once) if counted else None
    return Row(
        model=contender.name,
        runtime=contender.runtime,
        params=sum(p.numel() for p in contender.model.parameters()),
        macs=contender.macs,
        wall_ms=wall,
        cpu_ms=summarize(cpu_ms),
        throughput=1e3 * settings.batch / wall.median,
        ratio=paired_ratio([s.wall for s in mine], [s.wall for s in base]),
        cpu_ratio=paired_ratio([s.cpu for s in mine], [s.cpu for s in base]),
        speedup=paired_ratio([s.cpu for s in base], [s.cpu for s in mine]),
        peak_fraction=flops / (wall.minimum / 1e3) / gemm_flops,
        peak_bytes=peak_bytes,
        saved_bytes=saved_bytes,
        saved_ratio=None,
        launches=launches,
        page_faults=float(statistics.median(s.faults for s in mine)) if resource else None,
        wall_samples_ms=wall_ms,
        cpu_samples_ms=cpu_ms,
    )


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


def _environment(prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def _load() -> list[float] | None:
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


@contextmanager
def _room_for_compilations(models: int) -> Generator[None, None, None]:
    """Models of one class share torch.compile's cache; past its limit they would silently be timed in eager mode."""
    import torch._dynamo  # seconds of import that an eager measurement does not need

    limit = 8 + 4 * models
    with torch._dynamo.config.patch(
        recompile_limit=limit, accumulated_recompile_limit=32 * limit, fail_on_recompile_limit_hit=True
    ):
        yield


@contextmanager
def _quiet_profiler() -> Generator[None, None, None]:
    """The profiler's library logs to stderr through the progress bar, errors about absent GPUs included."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "") or (
        platform.processor() or platform.machine()
    )
