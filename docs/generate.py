"""Writes the generated tables of the README and the docs: `python docs/generate.py`; `--check` only compares.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("README.md", "docs/models.md", "docs/performance.md")
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
    return {"sizes": sizes, "bench": bench, "reference": reference}[kind](*arguments)


@cache
def models() -> list[dict]:
    from broadsight.verify import catalogue

    return catalogue()


def sizes(family: str | None = None) -> str:
    lines = ["| model | parameters | executed MACs at 224 | paper: params, MACs | paper: top-1 |"]
    lines.append("|---|---|---|---|---|")
    for row in models():
        if family in (None, row["family"]):
            paper = f"{row['paper_params_m']:g} M, {row['paper_macs_g']:g} G"
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
