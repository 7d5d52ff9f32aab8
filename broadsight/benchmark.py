"""Speed and memory of any timm models, measured side by side.

Timings on a shared machine drift. Every round therefore runs every contender once, each round starting with another
one, and contenders are compared within rounds: what slows the whole machine down for a second cancels in the ratio.
Wall time says how long one waits; CPU time, summed over threads, is what other processes disturb least.
"""

import gc
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

try:
    import resource
except ImportError:  # Windows has no page-fault counter to read; the column stays empty there
    resource = None

__all__ = ["DTYPES", "RUNTIMES", "Report", "Row", "Settings", "Summary", "measure", "plot", "render"]

T = TypeVar("T")
Progress = Callable[[int, int | None, str], None]  # steps done, steps in all, what is being done now

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLOT_FORMATS = ("png", "svg", "pdf")
GEMM_SIZES = (1024, 1536, 2048)  # sides of the square products that stand for the machine's peak
TRAIN_FORWARDS = 3  # a step multiplies once forward and twice backward: towards the inputs and towards the weights
MEMORY_VARIABLES = ("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES", "MIMALLOC_", "TCMALLOC_", "JEMALLOC", "PYTORCH_")
THREAD_VARIABLES = ("OMP_", "KMP_", "GOMP_", "MKL_")


def _eager(model: nn.Module, example: Tensor) -> Callable[[Tensor], Tensor]:
    return model


def _compile(model: nn.Module, example: Tensor) -> Callable[[Tensor], Tensor]:
    # dynamic=False: having seen another shape first, torch would otherwise time slower shape-generic kernels
    return torch.compile(model, dynamic=False)


# name -> function(model, example batch) returning what is called with a batch in place of the model
RUNTIMES: dict[str, Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]] = {"eager": _eager, "compile": _compile}


@dataclass(frozen=True)
class Settings:
    """What is measured, and how often.

    Args:
        batch: Images per call.
        size: Height and width of an image in pixels; a single number is a square.
        threads: Threads of torch's operators; the previous number is restored afterwards.
        rounds: Calls of each contender that count.
        warmup: Calls of each contender beforehand that do not.
        runtimes: Keys of RUNTIMES; every model becomes one contender per runtime.
        train: Time zero_grad + forward + cross-entropy + backward in train mode, not a forward pass in eval mode.
        device: `cpu` or `cuda` (also `cuda:1`).
        dtype: Key of DTYPES; weights and images are cast to it, no autocast.
        channels_last: Keep weights and images in channels-last memory format.
        fuse: Run `broadsight.fuse` on every model first; inference only.
        seed: Of weights, images and labels.
    """

    batch: int = 8
    size: tuple[int, int] = (224, 224)
    threads: int = 1
    rounds: int = 9
    warmup: int = 2
    runtimes: tuple[str, ...] = ("eager",)
    train: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    channels_last: bool = False
    fuse: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        size = (self.size, self.size) if isinstance(self.size, int) else tuple(self.size)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "runtimes", tuple(self.runtimes))
        for name, least in {"batch": 1, "threads": 1, "rounds": 1, "warmup": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}; expected {least} or more")
        if len(size) != 2 or min(size) < 1:
            raise ValueError(f"size={size}; expected two positive numbers, height and width in pixels")
        for runtime in self.runtimes:
            _choose("runtime", runtime, RUNTIMES)
        if not self.runtimes:
            raise ValueError(f"runtimes is empty; expected some of {', '.join(RUNTIMES)}")
        _choose("dtype", self.dtype, DTYPES)
        kind = _choose("device", self.device.partition(":")[0], ("cpu", "cuda"))
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={self.device!r}, but torch finds no CUDA device here; use device='cpu'")
        if self.fuse and self.train:
            raise ValueError("fuse=True with train=True; fusing is for inference, drop one of the two")


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
        ratio, cpu_ratio: This contender's time over the first contender's, paired within each round. Above 1 is slower.
        peak_fraction: 2 * MACs per second of the fastest call over the best matrix product's FLOP per second: best
            against best, since both are what the machine can do when left alone. A training step counts as 3 forwards.
            Above 1 means that the dtype is emulated and large products, of all things, are what it is slowest at.
        peak_bytes: See `peak_memory`.
        saved_bytes: See `saved_for_backward`; None in inference.
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
    peak_fraction: float
    peak_bytes: int
    saved_bytes: int | None
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


@dataclass(frozen=True)
class _Contender:
    name: str
    runtime: str
    model: nn.Module
    macs: int
    forward: Callable[[], Tensor]
    call: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.name} ({self.runtime})"


def measure(names: Sequence[str], settings: Settings | None = None, progress: Progress | None = None) -> Report:
    """Time models against each other; all of them are held in memory at once.

    Args:
        names: timm model names or wildcards such as `stvit_*`. The first is what the others are compared with; naming
            a model twice shows the noise of the measurement.
        progress: Called before every step with steps done, steps in all, and a few words on what comes.
    """
    settings = settings or Settings()
    models = expand(names)
    total = 1 + len(models) * len(settings.runtimes) * (2 + settings.warmup + settings.rounds)
    done = 0

    def step(doing: str) -> None:
        nonlocal done
        if progress:
            progress(done, total, doing)
        done += 1

    compiling = _room_for_compilations(len(models)) if "compile" in settings.runtimes else nullcontext()
    with fixed_threads(settings.threads), torch.random.fork_rng(), compiling:
        machine = describe_machine(settings)
        step("matrix-product peak of this machine")
        machine["gemm_flops"] = gemm_peak(settings)
        contenders = []
        for name, runtime in ((name, runtime) for name in models for runtime in settings.runtimes):
            step(f"building {name}")
            contenders.append(_build(name, runtime, settings))
        for contender in contenders:
            for _ in range(settings.warmup):
                step(f"warming up {contender}")
                _timed(contender, settings)

        def timed(contender: _Contender, round_: int) -> _Sample:
            step(f"round {round_ + 1} of {settings.rounds}")
            return _timed(contender, settings)

        samples = interleave(contenders, timed, settings.rounds)
        machine["load_after"] = _load()
        machine["rounds_completed"] = len(samples[0])
        rows = []
        for contender, mine in zip(contenders, samples, strict=True):
            # After the timing: watching what is saved makes torch.compile specialise a second time.
            step(f"memory of {contender}")
            rows.append(_row(contender, mine, samples[0], machine["gemm_flops"], settings))
    if progress:
        progress(total, total, "done")
    return Report(machine, settings, rows)


def interleave(contenders: Sequence[T], timed: Callable[[T, int], _Sample], rounds: int) -> list[list[_Sample]]:
    """Run `timed(contender, round)` for all contenders in every round, starting each round one further along.

    An interrupt ends it early: the rounds that are complete count, if there is any.

    Returns:
        Samples by contender, then by round.
    """
    samples: list[list[_Sample]] = [[] for _ in contenders]
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
        "commit": _commit(),
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
    table = Table(
        title=_headline(settings) + (f", {runtimes.pop()}" if len(runtimes) == 1 else ""),
        caption=f"{machine['cpu'] if machine['device'] == 'cpu' else machine['device']}{load}; "
        f"peak {machine['gemm_flops'] / 1e9:.1f} GFLOP/s; torch {versions['torch']}, timm {versions['timm']}\n"
        f"± is the inter-quartile range; ratios are to the first row, paired within rounds",
        box=SIMPLE_HEAD,  # the fewest columns lost to decoration: the table has to fit a terminal
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("model", no_wrap=True)
    if runtimes:
        table.add_column("runtime")
    numbers = ["params\nM", "MACs\nG", "wall\nms", "min\nms", "CPU\nms", "images\n/s", "wall\nratio", "CPU\nratio"]
    numbers += ["of\npeak", "memory\nMB", *(["saved\nMB"] if settings.train else []), "page\nfaults"]
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        cells = [f"{row.params / 1e6:.2f}", f"{row.macs / 1e9:.2f}"]
        cells += [_plus_minus(row.wall_ms, 1), f"{row.wall_ms.minimum:.1f}", _plus_minus(row.cpu_ms, 1)]
        cells += [f"{row.throughput:.1f}", _plus_minus(row.ratio, 2), _plus_minus(row.cpu_ratio, 2)]
        cells += [f"{row.peak_fraction:.0%}", f"{row.peak_bytes / 1e6:.1f}"]
        cells += [] if row.saved_bytes is None else [f"{row.saved_bytes / 1e6:.1f}"]
        cells += ["-" if row.page_faults is None else f"{row.page_faults:.0f}"]
        table.add_row(row.model, *([row.runtime] if runtimes else []), *cells)
    return table


def plot_format(path: str | Path) -> str:
    """The picture format that a file name asks for, or a ValueError if it cannot be drawn here."""
    suffix = Path(path).suffix.lstrip(".").lower()
    if suffix not in PLOT_FORMATS:
        raise ValueError(f"cannot plot to {str(path)!r}; expected a name ending in {', '.join(PLOT_FORMATS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError('plotting needs matplotlib; run: pip install "broadsight[plot]"') from None
    return suffix


def plot(report: Report, path: str | Path) -> None:
    """Draw latency and throughput as bars with quartile whiskers into a png, svg or pdf file.

    The file appears complete or not at all.
    """
    suffix = plot_format(path)
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    settings, rows = report.settings, report.rows
    palette = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # Okabe and Ito's safe colours
    colours = {runtime: palette[i % len(palette)] for i, runtime in enumerate(dict.fromkeys(r.runtime for r in rows))}
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
    with _whole_file(Path(path)) as unfinished:
        figure.savefig(unfinished, format=suffix, dpi=150)


def write_json(data: Any, path: str | Path) -> None:
    """Write JSON; like a plot, the file appears complete or not at all."""
    with _whole_file(Path(path)) as unfinished:
        unfinished.write_text(json.dumps(data, indent=2) + "\n")


@contextmanager
def _whole_file(path: Path) -> Generator[Path, None, None]:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _choose(what: str, value: str, allowed: Any) -> str:
    if value not in allowed:
        raise ValueError(f"unknown {what} {value!r}; expected one of {', '.join(allowed)}")
    return value


def _headline(settings: Settings) -> str:
    what = "training step" if settings.train else "inference" + (", fused" if settings.fuse else "")
    layout = ", channels last" if settings.channels_last else ""
    plural = "s" if settings.threads > 1 else ""
    return (
        f"{what}, batch {settings.batch} at {settings.size[0]}x{settings.size[1]}, {settings.dtype}{layout}, "
        f"{settings.threads} thread{plural}, {settings.rounds} rounds"
    )


def _plus_minus(summary: Summary, digits: int) -> str:
    return f"{summary.median:.{digits}f} ±{summary.spread:.0%}"


@contextmanager
def _blame(name: str, doing: str) -> Generator[None, None, None]:
    """Whatever goes wrong inside, say in one line for which model."""
    try:
        yield
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        raise RuntimeError(f"{name} failed while {doing}: {type(error).__name__}: {first}") from error


def _build(name: str, runtime: str, settings: Settings) -> _Contender:
    from .macs import executed_macs

    model: Any = _create(name, settings)
    with _blame(name, "being prepared"):
        in_chans, classes = model.pretrained_cfg["input_size"][0], model.num_classes
        model.eval()
        if settings.fuse:
            from .fusion import fuse

            model = fuse(model)
        macs = executed_macs(model, settings.size, in_chans)
        memory_format = torch.channels_last if settings.channels_last else torch.contiguous_format
        place: dict[str, Any] = {"device": settings.device, "dtype": DTYPES[settings.dtype]}
        model = model.train(settings.train).to(**place, memory_format=memory_format)
        torch.manual_seed(settings.seed)
        images = torch.randn(settings.batch, in_chans, *settings.size).to(**place, memory_format=memory_format)
        labels = torch.randint(classes, (settings.batch,)).to(settings.device)
        run = RUNTIMES[runtime](model, images)

    def forward() -> Tensor:
        return F.cross_entropy(run(images).float(), labels)

    def train() -> None:
        model.zero_grad(set_to_none=True)
        forward().backward()

    @torch.inference_mode()
    def infer() -> None:
        run(images)

    return _Contender(name, runtime, model, macs, forward, train if settings.train else infer)


def _create(name: str, settings: Settings) -> nn.Module:
    """The model with 1000 classes and seeded random weights, built for the size if it is tied to one."""
    cfg = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    tied = cfg is not None and cfg.fixed_input_size and tuple(cfg.input_size[1:]) != settings.size
    height, width = settings.size
    side = height if height == width else (height, width)  # a few models take a single number only
    options: dict[str, Any] = {"img_size": side} if tied else {}
    torch.manual_seed(settings.seed)
    try:
        return timm.create_model(name, num_classes=1000, **options)
    except Exception as error:
        if tied and cfg is not None:
            needed = "x".join(map(str, cfg.input_size[1:]))
            raise ValueError(
                f"{name} cannot be built for {height}x{width}; it is made for {needed}, use that size"
            ) from error
        with _blame(name, "being built"):
            raise


def _timed(contender: _Contender, settings: Settings) -> _Sample:
    collecting = gc.isenabled()
    gc.disable()  # a collection belongs to whoever left the garbage, not to the contender during which it happens
    try:
        with _blame(str(contender), f"running a batch of {settings.batch} at {settings.size[0]}x{settings.size[1]}"):
            _synchronize(settings.device)
            faults, cpu, wall = _page_faults(), time.process_time(), time.perf_counter()
            contender.call()
            _synchronize(settings.device)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            return _Sample(wall, cpu, _page_faults() - faults)
    finally:
        if collecting:
            gc.enable()


def _row(contender: _Contender, mine: list[_Sample], base: list[_Sample], gemm_flops: float, settings: Settings) -> Row:
    wall_ms, cpu_ms = [1e3 * s.wall for s in mine], [1e3 * s.cpu for s in mine]
    wall = summarize(wall_ms)
    flops = 2 * contender.macs * settings.batch * (TRAIN_FORWARDS if settings.train else 1)
    contender.model.zero_grad(set_to_none=True)  # the last step's gradients are not there at the start of a first one
    with _blame(str(contender), "measuring memory"):
        peak_bytes = peak_memory(contender.call, settings.device)
        saved_bytes = saved_for_backward(contender.model, contender.forward) if settings.train else None
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
        peak_fraction=flops / (wall.minimum / 1e3) / gemm_flops,
        peak_bytes=peak_bytes,
        saved_bytes=saved_bytes,
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


def _commit() -> str | None:
    """Commit of the checkout this file belongs to, ending in -dirty if changed; None for an installed package."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        # an environment may lie inside some other project's repository, whose commit says nothing about us
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True, timeout=10)
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(describe, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
