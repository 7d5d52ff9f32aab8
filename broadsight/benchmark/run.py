"""Speed and memory of any timm models, measured side by side.

Timings on a shared machine drift. Every round therefore runs every candidate once, each round starting with another
one, and candidates are compared within rounds: what slows the whole machine down for a second cancels in the ratio.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch

from .. import files
from ..deployment.formats import runtimes
from ..errors import nearest
from . import dense
from .candidates import Candidate, blame, build, load_rival, name_and_arguments, name_and_size, variants
from .machine import describe_machine, fixed_threads, gemm_peak, load, synchronize
from .memory import kernel_launches, peak_memory, saved_for_backward
from .settings import RUNTIMES as RUNTIMES
from .settings import Settings
from .timing import Summary, interleave, paired_ratio, summarize
from .timing import median_interval as median_interval

try:
    import resource
except ImportError:  # Windows has no page-fault counter to read; the column stays empty there
    resource = None

Progress = Callable[[int, int | None, str], None]  # steps done, steps in all, what is being done now
GEMM_SIZES = (1024, 1536, 2048)  # sides of the square products that stand for the machine's peak,
LARGE_GEMM_SIZES = (4096, 8192)  # or a GPU's


@dataclass(frozen=True)
class Row:
    """One candidate: a model under a runtime; with the yardstick: the first, or with `Settings.against` that pool."""

    model: str
    runtime: str
    params: int  # after fusing if asked for
    macs: int  # multiply-accumulates that one image's forward pass executes
    wall_ms: Summary  # of a call (one batch): elapsed,
    cpu_ms: Summary  # and consumed by the process in all its threads
    throughput: float  # images per second at the median wall time
    ratio: Summary  # of the wall time to the yardstick's, paired within each round; above 1 is slower
    cpu_ratio: Summary
    speedup: Summary  # the inverse of cpu_ratio, on a GPU of ratio
    # 2 * MACs per second of the fastest call over the best matrix product's FLOP per second; a training step counts as
    # 3 forwards. Above 1 the precision is emulated, and large products are what it is slowest at; or a dense model has
    # looked into fewer regions than are counted.
    peak_fraction: float
    peak_bytes: int | None  # see `peak_memory`; None in an exported runtime, whose allocations torch does not see
    saved_bytes: int | None  # see `saved_for_backward`; None in inference, like
    saved_ratio: float | None  # these over the yardstick's
    launches: int | None  # see `kernel_launches`; None unless a pool is run alone and eagerly
    page_faults: float | None  # median of the minor ones in a call: memory handed back to the system and fetched anew
    wall_samples_ms: list[float]  # every round, in order
    cpu_samples_ms: list[float]
    size: list[int] | None = None  # height and width of the images; None in reports that are older than it, like
    artefact_bytes: int | None = None  # what lies on the disk: the exported files, or the weights as safetensors,
    start_up_s: float | None = None  # what a fresh process takes, see `cold_start.StartUp`,
    import_s: float | None = None
    resident_bytes: int | None = None
    difference: float | None = None  # of an exported runtime's outputs from the model's, relative to the largest
    objects: float | None = None  # that a dense model found in an image, which costs time; None of others
    precision: str = "fp32"


@dataclass(frozen=True)
class Report:
    """Everything `measure` found; `dataclasses.asdict` gives what JSON can hold and `from_dict` takes it back."""

    machine: dict[str, Any]
    settings: Settings
    rows: list[Row]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Report":
        """Takes reports of earlier versions as well: what these did not measure is None."""
        rows, settings, machine = [], Settings.from_dict(data["settings"]), dict(data["machine"])
        if isinstance(peak := machine.get("gemm_flops"), float):
            machine["gemm_flops"] = {settings.precisions[0]: peak}
        for row in data["rows"]:
            if "speedup" not in row:
                row = row | {"speedup": asdict(paired_ratio(data["rows"][0]["cpu_samples_ms"], row["cpu_samples_ms"]))}
            values: dict[str, Any] = {one.name: Summary(**row[one.name]) for one in fields(Row) if one.type is Summary}
            absent = {"saved_ratio": None, "launches": None, "precision": settings.precisions[0]}
            rows.append(Row(**(absent | row | values)))
        return cls(machine, settings, rows)


class _Sample(NamedTuple):
    wall: float  # seconds
    cpu: float  # seconds, summed over threads: what other processes disturb least
    faults: int


class _Entry(NamedTuple):
    candidate: Candidate
    settings: Settings
    yardstick: int  # position of whom it is compared with
    at: str  # its size, in words if there are several
    weight: int  # its pixels, where the smallest size has 1


def measure(
    names: Sequence[str],
    settings: Settings | None = None,
    progress: Progress | None = None,
    artefacts: str | Path | None = None,
) -> Report:
    """Time models against each other; all of them are held in memory at once. What is exported is kept in `artefacts`.

    Names are those of timm or wildcards such as `stvit_*`, or `NAME:key=value@256` with arguments and a size of its
    own. The first is what the others are compared with; naming one twice shows the noise.
    """
    settings = settings or Settings()
    return measure_sizes(names, settings, [settings.size], progress, artefacts)[0]


def measure_sizes(
    names: Sequence[str],
    settings: Settings,
    sizes: Sequence[tuple[int, int]],
    progress: Progress | None = None,
    artefacts: str | Path | None = None,
) -> list[Report]:
    """A report for each of several image sizes in place of the settings' own; every round runs all models at all."""
    each = [replace(settings, size=size) for size in sizes]
    models = variants(expand(names), settings)
    if len(sizes) > 1 and (own := [model for model in models if model.size]):
        raise ValueError(f"{own[0]} has a size of its own beside several sizes; drop its @, or name one size")
    keeping: Any = nullcontext()
    if settings.exported:
        from .runtimes import keep

        keeping = keep(artefacts, settings)
    fresh = settings.start_up and bool(settings.exported)
    rival = None if settings.against is None else load_rival(settings.against)
    per_size, pixels = len(models) * len(settings.lineup()) * (1 if rival is None else 2), [h * w for h, w in sizes]
    weights = [round(count / min(pixels)) for count in pixels]
    total = 1 + len(models) * len(sizes) + per_size * sum(weights) * (1 + settings.warmup + settings.rounds)
    total += per_size * len(sizes) if fresh else 0
    done = 0

    def step(doing: str, weight: int = 1) -> None:  # in calls at the smallest size: at others by their pixels
        nonlocal done
        if progress:
            progress(done, total, doing)
        done += weight

    compiling: Any = nullcontext()
    if "compile" in settings.runtimes:
        from torch._dynamo import config  # seconds of import that an eager measurement does not need

        # Models of one class share torch.compile's cache; past its limit they would silently be timed in eager mode.
        limit = 8 + 4 * per_size * len(sizes)
        limits: dict[str, Any] = dict(recompile_limit=limit, accumulated_recompile_limit=32 * limit)
        compiling = config.patch(**limits, fail_on_recompile_limit_hit=True)
    with fixed_threads(settings.threads), torch.random.fork_rng(), compiling, keeping as kept:
        machine = describe_machine(settings)
        entries: list[_Entry] = []
        for here, weight in zip(each, weights, strict=True):
            first, at = len(entries), " at {}x{}".format(*here.size) if len(sizes) > 1 else ""
            for variant in models:
                step(f"building {variant}{at}")
                made = build(variant, here, rival, kept) if variant.head is None else dense.build(variant, here)
                yardstick = first if rival is None else len(entries)
                entries += [_Entry(one, replace(here, size=one.size), yardstick, at, weight) for one in made]
            for before, entry in zip(entries[:first], entries[first:], strict=False):
                # Random parameters of equal shape are held once, lest a model at six sizes take six times its memory.
                theirs = dict(before.candidate.model.named_parameters())
                for name, mine in entry.candidate.model.named_parameters():
                    same = theirs.get(name, mine)
                    if (same.shape, same.stride()) == (mine.shape, mine.stride()):
                        mine.data = same.data
        step("matrix-product peak of this machine")
        sides = GEMM_SIZES if settings.device == "cpu" else LARGE_GEMM_SIZES
        kinds = dict.fromkeys(["fp32", "bf16", *(entry.candidate.precision for entry in entries)])
        machine["gemm_flops"] = {kind: gemm_peak(settings.device, kind, sides) for kind in kinds}
        for entry in entries:
            for _ in range(settings.warmup):
                step(f"warming up {entry.candidate}{entry.at}", entry.weight)
                _timed(entry.candidate, entry.settings)

        def timed(entry: _Entry, round_: int) -> _Sample:
            step(f"round {round_ + 1} of {settings.rounds}{entry.at}", entry.weight)
            return _timed(entry.candidate, entry.settings)

        samples = interleave(entries, timed, settings.rounds)
        machine["load_after"] = load()
        machine["rounds_completed"] = len(samples[0])
        rows: list[Row] = []
        for entry, mine in zip(entries, samples, strict=True):
            # After the timing: watching what is saved makes torch.compile specialise a second time.
            step(f"memory of {entry.candidate}{entry.at}", entry.weight)
            peak = machine["gemm_flops"][entry.candidate.precision]
            row = _row(entry.candidate, mine, samples[entry.yardstick], peak, entry.settings)
            if row.saved_bytes is not None:
                base = (rows[entry.yardstick] if entry.yardstick < len(rows) else row).saved_bytes or 1
                row = replace(row, saved_ratio=row.saved_bytes / base)
            if fresh:
                from . import cold_start

                step(f"a fresh process with {entry.candidate}{entry.at}")
                assert entry.candidate.artefact is not None
                with blame(str(entry.candidate), "starting elsewhere"):
                    found = cold_start.measure(entry.candidate, entry.settings, entry.candidate.artefact)
                costs = dict(start_up_s=found.seconds, import_s=found.import_s, resident_bytes=found.resident_bytes)
                row = replace(row, **costs)
            rows.append(row)
    if progress:
        progress(total, total, "done")
    return [Report(machine, here, rows[i * per_size :][:per_size]) for i, here in enumerate(each)]


def expand(names: Sequence[str]) -> list[str]:
    """timm names as given, with arguments and sizes, wildcards replaced by what they match and is not listed yet."""
    found: list[str] = []
    for name in names:
        given, name = name, name_and_arguments(name_and_size(name)[0])[0]
        at = given[len(name) :]
        if any(c in name for c in "*?["):
            matches = timm.list_models(name)
            if not matches:
                raise ValueError(f"no timm model matches {name!r}; `broadsight models` lists those of broadsight")
            found += [match + at for match in matches if match + at not in found]
        elif timm.is_model(name):
            found.append(given)
        else:
            near = nearest(name, timm.list_models(), 3)
            hint = f"nearest: {', '.join(near)}" if near else "`broadsight models` lists those of broadsight"
            raise ValueError(f"unknown model {name!r}; {hint}")
    if not found:
        raise ValueError("no model named; expected at least one timm model name or wildcard")
    return found


def write_json(data: Any, path: str | Path) -> None:
    """Write JSON, null for what is no number; like a plot, the file appears complete or not at all."""
    files.write_json(json.loads(json.dumps(data), parse_constant=lambda _: None), path)


def _timed(candidate: Candidate, settings: Settings) -> _Sample:
    collecting = gc.isenabled()
    gc.disable()  # a collection belongs to whoever left the garbage, not to the candidate during which it happens
    try:
        with blame(str(candidate), f"running a batch of {settings.batch} at {settings.size[0]}x{settings.size[1]}"):
            synchronize(settings.device)
            faults, cpu, wall = _page_faults(), time.process_time(), time.perf_counter()
            candidate.call()
            synchronize(settings.device)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            return _Sample(wall, cpu, _page_faults() - faults)
    finally:
        if collecting:
            gc.enable()


def _row(candidate: Candidate, mine: list[_Sample], base: list[_Sample], gemm_flops: float, settings: Settings) -> Row:
    wall_ms, cpu_ms = [1e3 * s.wall for s in mine], [1e3 * s.cpu for s in mine]
    wall = summarize(wall_ms)
    # A step multiplies once forward and twice backward: towards the inputs and towards the weights.
    flops = 2 * candidate.macs * settings.batch * (3 if settings.train else 1)
    candidate.model.zero_grad(set_to_none=True)  # the last step's gradients are not there at the start of a first one
    artefact_bytes, gpu = None, settings.device != "cpu"
    if candidate.artefact is not None:
        from .runtimes import file_bytes

        artefact_bytes = file_bytes(candidate.artefact)
    with blame(str(candidate), "measuring memory"):
        peak_bytes = None if candidate.runtime in runtimes() else peak_memory(candidate.call, settings.device)
        saved_bytes = saved_for_backward(candidate.model, candidate.forward) if settings.train else None
        counted = settings.head_only and candidate.runtime == "eager"
        # Not the call itself: inference mode does not show what operations are made of.
        once = candidate.call if settings.train else torch.no_grad()(candidate.forward)
        launches = kernel_launches(once) if counted else None
    return Row(
        model=candidate.name,
        runtime=candidate.runtime,
        params=sum(p.numel() for p in candidate.model.parameters()),
        macs=candidate.macs,
        wall_ms=wall,
        cpu_ms=summarize(cpu_ms),
        throughput=1e3 * settings.batch / wall.median,
        ratio=paired_ratio([s.wall for s in mine], [s.wall for s in base]),
        cpu_ratio=paired_ratio([s.cpu for s in mine], [s.cpu for s in base]),
        speedup=paired_ratio(*([s.wall if gpu else s.cpu for s in one] for one in (base, mine))),
        peak_fraction=flops / (wall.minimum / 1e3) / gemm_flops,
        peak_bytes=peak_bytes,
        saved_bytes=saved_bytes,
        saved_ratio=None,
        launches=launches,
        page_faults=float(statistics.median(s.faults for s in mine)) if resource else None,
        wall_samples_ms=wall_ms,
        cpu_samples_ms=cpu_ms,
        size=list(candidate.size),
        artefact_bytes=artefact_bytes,
        difference=candidate.difference,
        objects=candidate.objects,
        precision=candidate.precision,
    )


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0
