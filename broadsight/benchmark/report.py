"""A report of the benchmark as a table and as an image."""

import statistics
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..visual.plots import PALETTE, plot_format, save
from .run import Report, Row, Summary
from .settings import EXPORTED, Settings


def render(report: Report) -> Table:
    """A table with one row per contender, times as median ± spread."""
    settings = report.settings
    runtimes = {row.runtime for row in report.rows}
    against, digits = settings.against is not None, 2 if settings.head_only else 1
    compared = (
        "speed-up: how many times faster than PerGroupPool with the same weights, in CPU time"
        if against
        else ("ratios are to the first row")
    )
    table = Table(
        title=headline(settings) + (f", {runtimes.pop()}" if len(runtimes) == 1 else ""),
        caption=f"{caption(report)}\n± is the inter-quartile range; {compared}, paired within rounds"
        + _exported(report),
        box=SIMPLE_HEAD,  # the fewest columns lost to decoration: the table has to fit a terminal
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("model", no_wrap=True)
    if runtimes:
        table.add_column("runtime")
    started = any(row.start_up_s is not None for row in report.rows)
    numbers = ["params\nM", "MACs\nG", "wall\nms", "min\nms", "CPU\nms", "images\n/s"]
    numbers += ["speed-up"] if against else ["wall\nratio", "CPU\nratio"]
    numbers += ["of\npeak", "memory\nMB", *(["saved\nMB", "saved\nratio"] if settings.train else [])]
    numbers += ["start-up\ns", "resident\nMB"] if started else ["page\nfaults"]
    numbers += ["file\nMB"] if settings.exported else []
    for name in [*numbers, *(["kernels"] if settings.head_only else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        cells = [f"{row.params / 1e6:.2f}", f"{row.macs / 1e9:.2f}", plus_minus(row.wall_ms, digits)]
        cells += [f"{row.wall_ms.minimum:.{digits}f}", plus_minus(row.cpu_ms, digits), f"{row.throughput:.1f}"]
        cells += [_times(row.speedup)] if against else [plus_minus(row.ratio, 2), plus_minus(row.cpu_ratio, 2)]
        cells += [f"{row.peak_fraction:.0%}", _number(row.peak_bytes, 1e6, 1)]
        if row.saved_bytes is not None:
            cells += [f"{row.saved_bytes / 1e6:.1f}", f"{row.saved_ratio:.2f}"]
        if started:
            cells += [_number(row.start_up_s, 1, 2), _number(row.resident_bytes, 1e6, 1)]
        else:
            cells += [_number(row.page_faults, 1, 0)]
        cells += [_number(row.artefact_bytes, 1e6, 1)] if settings.exported else []
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
    figure.suptitle(f"{headline(settings)}: median and quartiles")
    save(figure, path)


def caption(report: Report) -> str:
    """On which machine, how busy it was, and with what."""
    settings, machine = report.settings, report.machine
    interrupted = machine["rounds_completed"] < settings.rounds
    load = f"; interrupted after {machine['rounds_completed']} rounds" if interrupted else ""
    if machine["load_before"]:
        load += f"; load {machine['load_before'][0]:.1f} before, {machine['load_after'][0]:.1f} after"
    versions = machine["versions"]
    return (
        f"{machine['cpu'] if machine['device'] == 'cpu' else machine['device']}{load}; "
        f"peak {machine['gemm_flops'] / 1e9:.1f} GFLOP/s; torch {versions['torch']}, timm {versions['timm']}"
    )


def headline(settings: Settings, sizes: str | None = None) -> str:
    """What was measured, at the settings' size unless others are named."""
    what = "training step" if settings.train else "inference" + (", fused" if settings.fuse else "")
    what = ("pools alone, " if settings.head_only else "") + ("light, " if settings.light else "") + what
    layout = ", channels last" if settings.channels_last else ""
    plural = "s" if settings.threads > 1 else ""
    sizes = sizes or "{}x{}".format(*settings.size)
    return (
        f"{what}, batch {settings.batch} at {sizes}, {settings.dtype}{layout}, "
        f"{settings.threads} thread{plural}, {settings.rounds} rounds"
    )


def _exported(report: Report) -> str:
    """What a reader has to know of exported runtimes."""
    if not report.settings.exported:
        return ""
    text = "\nwhat is exported is folded first; memory: what torch allocates in a call"
    if any(row.start_up_s is not None for row in report.rows):
        text += "; start-up, resident: a fresh process that loads the file and answers once, imports apart"
    if any(_int8(row) for row in report.rows):
        text += "\nint8 is calibrated on noise: for its speed alone"
    return text


def _int8(row: Row) -> bool:
    return EXPORTED.get(row.runtime, ("", False))[1]


def _times(speedup: Summary) -> str:
    return "1 (yardstick)" if speedup == Summary(1.0, 1.0, 0.0) else f"{speedup.median:.2f}x ±{speedup.spread:.0%}"


def _number(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def plus_minus(summary: Summary, digits: int) -> str:
    return f"{summary.median:.{digits}f} ±{summary.spread:.0%}"
