"""A report of the benchmark as a table and as a plot."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..dense.counting import BOXES, REGIONS
from ..deployment.formats import runtimes
from ..visual.plots import PALETTE, new_panels, save
from ..visual.terminal import number
from .candidates import how, spelled
from .run import Report, Row, Summary
from .settings import Settings


def render(report: Report) -> Table:
    """Make a table with one row per candidate, times as median ± spread."""
    compared = "ratios are to the first row"
    if report.settings.against is not None:
        clock = "in CPU time" if report.settings.device == "cpu" else "elapsed"
        compared = f"speed-up: how many times faster than PerGroupPool with the same weights, {clock}"
    about = f"{caption(report)}\n± is the inter-quartile range; {compared}, paired within rounds"
    if report.settings.exported:
        about += "\nwhat is exported is folded first; memory: what torch allocates in a call"
        if any(row.start_up_s is not None for row in report.rows):
            about += "; start-up, resident: a fresh process that loads the file and answers once, imports apart"
        if any(is_int8(row.runtime) for row in report.rows):
            about += "\nint8 is calibrated on noise: for its speed alone"
    if "rcnn" in (report.settings.head or ""):
        about += f"\nMACs: where regions are looked into, with {BOXES} boxes and {REGIONS} masks or poses"
    if any(row.objects is not None for row in report.rows):
        about += "\ntimed from images of noise to what is found in them, with random weights: so many objects an image"
    columns = _columns(report)
    lines = [(row.model, how(row), *(text(row) for text in columns.values())) for row in report.rows]
    return table_of(headline(report.settings), about, list(columns), lines)


def _columns(report: Report) -> dict[str, Callable[[Row], str]]:
    """Headings of the columns that a report fills, and how each writes a row."""

    def speed_up(one: Summary) -> str:
        return "1 (yardstick)" if one == Summary(1.0, 1.0, 0.0) else f"{one.median:.2f}x ±{one.spread:.0%}"

    settings, started = report.settings, any(row.start_up_s is not None for row in report.rows)
    against, digits = settings.against is not None, 2 if settings.head_only else 1
    columns: list[tuple[bool, str, Callable[[Row], str]]] = [
        (True, "params\nM", lambda row: number(row.params, 1e6, 2)),
        (True, "MACs\nG", lambda row: number(row.macs, 1e9, 2)),
        (True, "wall\nms", lambda row: plus_minus(row.wall_ms, digits)),
        (True, "min\nms", lambda row: number(row.wall_ms.minimum, 1, digits)),
        (True, "CPU\nms", lambda row: plus_minus(row.cpu_ms, digits)),
        (True, "images\n/s", lambda row: number(row.throughput, 1, 1)),
        (against, "speed-up", lambda row: speed_up(row.speedup)),
        (not against, "wall\nratio", lambda row: plus_minus(row.ratio, 2)),
        (not against, "CPU\nratio", lambda row: plus_minus(row.cpu_ratio, 2)),
        (settings.head is None, "of\npeak", lambda row: f"{row.peak_fraction:.0%}"),
        (True, "memory\nMB", lambda row: number(row.peak_bytes, 1e6, 1)),
        (settings.train, "saved\nMB", lambda row: number(row.saved_bytes, 1e6, 1)),
        (settings.train, "saved\nratio", lambda row: number(row.saved_ratio, 1, 2)),
        (started, "start-up\ns", lambda row: number(row.start_up_s, 1, 2)),
        (started, "resident\nMB", lambda row: number(row.resident_bytes, 1e6, 1)),
        (not started, "page\nfaults", lambda row: number(row.page_faults, 1, 0)),
        (bool(settings.exported), "file\nMB", lambda row: number(row.artefact_bytes, 1e6, 1)),
        (any(row.objects is not None for row in report.rows), "objects", lambda row: number(row.objects, 1, 0)),
        (settings.head_only, "kernels", lambda row: number(row.launches, 1, 0)),
    ]
    return {heading: text for shown, heading, text in columns if shown}


def table_of(title: str, caption: str, numbers: Sequence[str], lines: Sequence[tuple[str, ...]]) -> Table:
    """A table of candidates: model, runtime and numbers of each. A runtime that all share is named in the title."""
    runtimes = {runtime for _, runtime, *_ in lines}
    title = f"{title}, {next(iter(runtimes))}" if len(runtimes) == 1 else title
    # The fewest columns lost to decoration: the table has to fit a terminal.
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("model", no_wrap=True)
    if len(runtimes) > 1:
        table.add_column("runtime")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    for model, runtime, *cells in lines:
        table.add_row(model, *([runtime] if len(runtimes) > 1 else []), *cells)
    return table


def plot(report: Report, path: str | Path) -> None:
    """Draw latency and throughput as bars with quartile whiskers into a png, svg or pdf file."""
    settings, rows = report.settings, report.rows
    figure, panels = new_panels(path, 11, 1.8 + 0.42 * len(rows), columns=2, sharey=True)
    from matplotlib.patches import Patch

    colours = {runtime: PALETTE[i % len(PALETTE)] for i, runtime in enumerate(dict.fromkeys(map(how, rows)))}
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
            panel.barh(place, middle, color=colours[how(row)], xerr=whisker, ecolor="black", capsize=3, height=0.7)
            beside: Any = dict(xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
            panel.annotate(f"{middle:.4g}", (max(middle, high), place), **beside)
        panel.set_xlabel(label)
        panel.margins(x=0.15)
    panels[0].set_yticks(range(len(rows)), [row.model for row in rows])
    panels[0].invert_yaxis()  # shared, so that both panels read from the top like the table
    if len(colours) > 1:
        handles = [Patch(color=colour, label=runtime) for runtime, colour in colours.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(f"{headline(settings)}: median and quartiles")
    save(figure, path)


def caption(report: Report) -> str:
    """Name the machine, how busy it was, and the versions."""
    done, machine = report.machine["rounds_completed"], report.machine
    load = f"; interrupted after {done} rounds" if done < report.settings.rounds else ""
    if machine["load_before"]:
        load += f"; load {machine['load_before'][0]:.1f} before, {machine['load_after'][0]:.1f} after"
    name = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    versions = "torch {torch}, timm {timm}".format(**machine["versions"])
    peaks = ", ".join(f"{kind} {peak / 1e9:.1f}" for kind, peak in machine["gemm_flops"].items())
    return f"{name}{load}; peak GFLOP/s: {peaks}; {versions}"


def headline(settings: Settings, sizes: str | None = None) -> str:
    """Say what was measured, at the settings' size unless others are named."""
    what = f"with {spelled(settings.head_args)}, " if settings.head_args else ""
    what += "training step" if settings.train else "inference" + (", fused" if settings.fuse else "")
    what = ("pools alone, " if settings.head_only else "") + ("light, " if settings.light else "") + what
    layout = ", channels last" if settings.channels_last else ""
    threads = f"{settings.threads} thread{'s' if settings.threads > 1 else ''}"
    batch = f"batch {settings.batch} at {sizes or '{}x{}'.format(*settings.size)}"
    return f"{what}, {batch}, {'/'.join(settings.precisions)}{layout}, {threads}, {settings.rounds} rounds"


def is_int8(runtime: str) -> bool:
    return runtimes().get(runtime, ("", False))[1]


def plus_minus(summary: Summary, digits: int) -> str:
    return f"{summary.median:.{digits}f} ±{summary.spread:.0%}"
