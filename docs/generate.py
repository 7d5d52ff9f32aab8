"""Writes the generated tables of the README and the docs: `python docs/generate.py`; `--check` only compares.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"(<!-- generated: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    stale = []
    for name in FILES:
        path = ROOT / name
        text = path.read_text("utf-8")
        fresh = MARKED.sub(lambda m: m[1] + table(*m[2].split()) + "\n" + m[3], text)
        if fresh != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(fresh, "utf-8")
    if stale:
        print(("stale: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return 1 if stale and "--check" in sys.argv else 0


def table(kind: str, *arguments: str) -> str:
    kinds = {"sizes": sizes, "bench": bench, "reference": reference, "pools": pools, "map-head": map_head}
    return kinds[kind](*arguments)


@cache
def models(family: str) -> list[dict]:
    from broadsight.verify import catalogue

    return catalogue(families=[family])


def sizes(*families: str) -> str:
    lines = ["| model | parameters | executed MACs at 224 | paper: params, MACs | paper: top-1 |"]
    lines.append("|---|---|---|---|---|")
    for family in families:
        for row in models(family):
            figures = ((row["paper_params_m"], "M"), (row["paper_macs_g"], "G"))
            paper = ", ".join("-" if value is None else f"{value:g} {unit}" for value, unit in figures)
            top1 = "not printed here" if row["paper_top1"] is None else f"{row['paper_top1']:g} %"
            lines.append(f"| `{row['model']}` | {row['params']:,} | {row['macs'] / 1e9:.3f} G | {paper} | {top1} |")
    return "\n".join(lines)


def bench(file: str) -> str:
    report = json.loads((ROOT / file).read_text("utf-8"))
    lines = [
        "| model | MACs | CPU time per batch | images/s | ratio to the first | of GEMM peak | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        wall, ratio = row["cpu_ms"], row["cpu_ratio"]
        lines.append(
            f"| `{row['model']}` | {row['macs'] / 1e9:.2f} G | {wall['median']:.0f} ms ±{wall['spread']:.0%} "
            f"| {row['throughput']:.1f} | {ratio['median']:.2f} ±{ratio['spread']:.0%} | {row['peak_fraction']:.0%} "
            f"| {row['peak_bytes'] / 2**20:.0f} MB |"
        )
    return "\n".join([*lines, "", setting(report)])


def reference(file: str) -> str:
    report = json.loads((ROOT / file).read_text("utf-8"))
    train = report["settings"]["train"]
    lines = [f"| model | form | CPU time | speed-up |{' kept for backward |' if train else ''}"]
    lines.append("|---" * (5 if train else 4) + "|")
    for row in report["rows"]:
        time, speedup = row["cpu_s"], row["speedup"]
        kept = f" {row['saved_bytes'] / 2**20:.0f} MB |" if train else ""
        lines.append(
            f"| `{row['model']}` | {row['form']} | {1e3 * time['median']:.0f} ms ±{time['spread']:.0%} "
            f"| {speedup['median']:.2f} ±{speedup['spread']:.0%} |{kept}"
        )
    return "\n".join([*lines, "", setting(report)])


def pools(file: str = "results/pools.json") -> str:
    report = json.loads((ROOT / file).read_text("utf-8"))
    backbones: dict[str, dict[str, dict]] = {}
    for row in report["rows"]:
        backbone, _, pool = row["model"].partition(" + ")
        backbones.setdefault(backbone, {})[pool] = row
    lines = ["| pool | " + " | ".join(f"`{backbone}`" for backbone in backbones) + " |"]
    lines.append("|---" * (len(backbones) + 1) + "|")
    for pool in report["settings"]["pools"]:
        cells = []
        for rows in backbones.values():
            row = rows[pool]
            time, size = row["cpu_ms"], f"{row['params'] / 1e6:.1f} M, {row['macs'] / 1e9:.2f} G"
            cells.append(f"{size}, {time['median']:.0f} ms ±{time['spread']:.0%}")
        lines.append(f"| `{pool}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Parameters, executed multiply-accumulates, CPU time. {setting(report)}"])


def map_head(file: str = "results/map_head.json") -> str:
    reports = json.loads((ROOT / file).read_text("utf-8"))["reports"]
    heads = [row["model"] for row in reports[0]["rows"][1::2]]
    lines = ["| times faster | " + " | ".join(f"`{head}`" for head in heads) + " |"]
    lines.append("|---" * (len(heads) + 1) + "|")
    kept, launches = [], []
    for report in reports:
        settings, rows = report["settings"], report["rows"]
        what = "training step" if settings["train"] else "light inference" if settings["light"] else "inference"
        what += ", folded" if settings["fuse"] else ""
        pairs = list(zip(rows[::2], rows[1::2], strict=True))  # the loop over groups, ours
        cells = [plus_minus(ours["speedup"]) for _, ours in pairs]
        lines.append(f"| {what}, batch {settings['batch']} | " + " | ".join(cells) + " |")
        if settings["batch"] == 8:
            cells = [f"{theirs['launches']} → {ours['launches']}" for theirs, ours in pairs]
            launches.append(f"| kernel launches, {what}, batch 8 | " + " | ".join(cells) + " |")
        if settings["train"]:
            unit = 2**20 * settings["batch"]
            sizes = [(theirs["saved_bytes"] / unit, ours["saved_bytes"] / unit) for theirs, ours in pairs]
            cells = [f"{a:.1f} → {b:.1f} MB ({b / a:.2f})" for a, b in sizes]
            kept.append("| kept for backward, per image | " + " | ".join(cells) + " |")
    machine, rounds = reports[0]["machine"], min(report["settings"]["rounds"] for report in reports)
    note = (
        f"Pools alone on the maps of 224x224 images, float32, 1 thread, process CPU time, {rounds} interleaved rounds "
        f"or more; {machine['cpu']}, torch {machine['versions']['torch']}, timm {machine['versions']['timm']}."
    )
    return "\n".join([*lines, *kept, *launches, "", note])


def plus_minus(summary: dict) -> str:
    return f"{summary['median']:.2f} ±{summary['spread']:.0%}"


def setting(report: dict) -> str:
    machine, settings = report["machine"], report["settings"]
    peak = f", matrix products {machine['gemm_flops'] / 1e9:.0f} GFLOP/s" if "gemm_flops" in machine else ""
    return (
        f"{'Training step' if settings['train'] else 'Inference'}, batch {settings['batch']}, "
        f"{settings['size'][0]}x{settings['size'][1]}, {settings['dtype']}, {settings['threads']} thread, "
        f"{settings['rounds']} interleaved rounds, process CPU time, default allocator; {machine['cpu']}, "
        f"torch {machine['versions']['torch']}, timm {machine['versions']['timm']}{peak}."
    )


if __name__ == "__main__":
    sys.exit(main())
