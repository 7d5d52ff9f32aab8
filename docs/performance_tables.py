"""Tables of docs/performance.md, from what `benchmarks/performance_study.py` wrote; `docs/generate.py` places them."""

import json
from pathlib import Path

from broadsight.benchmark.accuracy_plot import NAMES, Point, points, published
from broadsight.benchmark.candidates import name_and_size
from broadsight.benchmark.run import Report, Row

ROOT = Path(__file__).parents[1]
NOT_RUN = "not run"


def opened(file: str) -> tuple[Report, dict]:
    data = json.loads((ROOT / file).read_text("utf-8"))
    return Report.from_dict(data), data


def latency(file: str) -> str:
    """Milliseconds of every model in every runtime; the published accuracy stands apart."""
    report, data = opened(file)
    runtimes = list(report.settings.runtimes)
    heads = ["family", "model", "published top-1", "parameters", "MACs", *(f"{name}, ms" for name in runtimes)]
    lines = [f"| {' | '.join([*heads, 'fastest float, times eager'])} |", "|---" * (len(heads) + 1) + "|"]
    for model in ordered(report):
        rows = rows_of(report, model)
        first = rows["eager"]
        figure = published().get(name_and_size(model)[0])
        top1 = "not in our sources" if figure is None else f"{figure.top1:.1f} %"
        cells = [family_of(model), f"`{model}`", top1, f"{first.params / 1e6:.1f} M", f"{first.macs / 1e9:.2f} G"]
        cells += [time_of(rows[name]) if name in rows else NOT_RUN for name in runtimes]
        found = min((row for name, row in rows.items() if "int8" not in name), key=lambda row: row.wall_ms.median)
        gain = first.wall_ms.median / found.wall_ms.median
        cells.append(f"{gain:.2f} ({found.runtime})" if found is not first else "1 (eager)")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *left_out(data), "", setting(report)])


def instead(file: str) -> str:
    """For each of ours the fastest other model of at least its published accuracy."""
    report, _ = opened(file)
    found, missing = points([report])
    ours = sorted((p for p in found if p.published.ours), key=lambda p: (p.family, p.published.top1))
    others = [p for p in found if not p.published.ours]
    lines = [
        "| ours | published top-1 | fastest runtime | fastest other of at least that top-1 | its fastest runtime |"
    ]
    lines[0] += " ours takes |"
    lines.append("|---" * 6 + "|")
    for point in ours:
        enough = [p for p in others if p.published.top1 >= point.published.top1]
        best = min(enough, key=lambda p: p.row.wall_ms.median, default=None)
        cells = [f"`{point.model}`", f"{point.published.top1:.1f} %", where(point)]
        if best is None:
            cells += ["none of those in the table", "-", "-"]
        else:
            ratio = point.row.wall_ms.median / best.row.wall_ms.median
            cells += [f"`{best.row.model}`, {best.published.top1:.1f} %", where(best), f"{ratio:.2f} times as long"]
        lines.append(f"| {' | '.join(cells)} |")
    unknown = [f"`{name}`" for name in missing if published().get(name_and_size(name)[0]) is None]
    note = f"No published top-1 in our sources: {', '.join(unknown)}." if unknown else ""
    return "\n".join([*lines, *(["", note] if note else [])])


def costs(file: str) -> str:
    """Start-up, memory and file of every model in every runtime."""
    report, _ = opened(file)
    runtimes = list(report.settings.runtimes)
    lines = ["| model | " + " | ".join(runtimes) + " |", "|---" * (len(runtimes) + 1) + "|"]
    for model in ordered(report):
        rows = rows_of(report, model)
        lines.append(f"| `{model}` | " + " | ".join(cost(rows.get(name)) for name in runtimes) + " |")
    imports: dict[str, list[float]] = {}
    for row in report.rows:
        if row.import_s is not None:
            imports.setdefault(row.runtime, []).append(row.import_s)
    each = ", ".join(f"{name} {sorted(times)[len(times) // 2]:.1f} s" for name, times in imports.items())
    note = "Seconds from the loaded libraries to the first answer, memory by which the process grew, files on the disk."
    note += f" Importing the libraries comes before that: {each}." if each else ""
    return "\n".join([*lines, "", note])


def runtimes(file: str) -> str:
    """Milliseconds of one model of each family in all runtimes, and how many times as fast as eager that is."""
    report, data = opened(file)
    runtimes = list(report.settings.runtimes)
    lines = ["| model | " + " | ".join(runtimes) + " |", "|---" * (len(runtimes) + 1) + "|"]
    for model in ordered(report):
        rows = rows_of(report, model)
        eager = rows["eager"].wall_ms.median
        cells = [f"{time_of(row)} ({eager / row.wall_ms.median:.2f})" for row in map(rows.get, runtimes)]
        lines.append(f"| `{model}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *left_out(data), "", setting(report)])


def sources(file: str) -> str:
    """Where the published figures of the models of a report are printed."""
    report, _ = opened(file)
    found: dict[str, list[str]] = {}
    for model in ordered(report):
        name = name_and_size(model)[0]
        if figure := published().get(name):
            found.setdefault(figure.source, []).append(f"`{name}`" + (f" ({figure.weights})" if figure.weights else ""))
    return "\n".join(f"* {', '.join(names)}: {source}." for source, names in found.items())


def ordered(report: Report) -> list[str]:
    """Ours first, by family; in a family by published accuracy."""
    names = dict.fromkeys(row.model for row in report.rows)

    def key(model: str) -> tuple:
        figure = published().get(name_and_size(model)[0])
        known = figure is not None and not figure.ours
        return known, family_of(model).lower(), 0 if figure is None else figure.top1

    return sorted(names, key=key)


def rows_of(report: Report, model: str) -> dict[str, Row]:
    return {row.runtime: row for row in report.rows if row.model == model}


def family_of(model: str) -> str:
    import timm

    name = name_and_size(model)[0]
    figure = published().get(name)
    if figure is not None:
        return NAMES.get(figure.family, figure.family)
    return next((title for family, title in NAMES.items() if name in timm.list_models(module=family)), "other")


def where(point: Point) -> str:
    return f"{point.row.wall_ms.median:.1f} ms ({point.row.runtime})"


def time_of(row: Row) -> str:
    return f"{row.wall_ms.median:.1f} ±{row.wall_ms.spread:.0%}"


def cost(row: Row | None) -> str:
    found = [] if row is None else figures(row)
    return ", ".join(found) if set(found) - {NOT_RUN} else NOT_RUN


def figures(row: Row) -> list[str]:
    """Start-up, memory, file."""
    each = ((row.start_up_s, 1, 2, "s"), (row.resident_bytes, 1e6, 0, "MB"), (row.artefact_bytes, 1e6, 1, "MB"))
    return [NOT_RUN if value is None else f"{value / unit:.{digits}f} {word}" for value, unit, digits, word in each]


def left_out(data: dict) -> list[str]:
    if not data.get("left_out"):
        return []
    reasons = [f"`{name}` ({next(iter(why.values()))})" for name, why in data["left_out"].items()]
    return ["", f"Not run: {', '.join(reasons)}."]


def setting(report: Report) -> str:
    machine, settings = report.machine, report.settings
    load = machine["load_before"], machine.get("load_after")
    busy = f"; load {load[0][0]:.1f} before, {load[1][0]:.1f} after" if load[0] and load[1] else ""
    return (
        f"Inference, batch {settings.batch}, {settings.size[0]}x{settings.size[1]} unless the name says otherwise, "
        f"{settings.threads} thread in every runtime, median and inter-quartile range of the wall time of "
        f"{machine['rounds_completed']} interleaved rounds; {machine['cpu']}, {machine['cores']} cores{busy}; "
        f"torch {machine['versions']['torch'].partition('+')[0]}, timm {machine['versions']['timm']}."
    )
