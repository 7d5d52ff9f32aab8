"""Writes the generated tables of the README and the docs: `python docs/generate.py`; `--check` only compares.

`--fast` leaves out those for which models are counted. `--plots` draws, from the same
files, the images that are plots as well.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import json
import re
import runpy
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"(<!-- generated: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    stale = []
    if "--plots" in sys.argv:
        draw_performance()
    for name in FILES:
        path = ROOT / name
        text = path.read_text("utf-8")
        fresh = MARKED.sub(lambda m: m[0] if left_out(m[2]) else m[1] + table(*m[2].split()) + "\n" + m[3], text)
        if fresh != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(fresh, "utf-8")
    if stale:
        print(("stale: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return 1 if stale and "--check" in sys.argv else 0


def left_out(what: str) -> bool:
    return "--fast" in sys.argv and what.split()[0] in ("sizes", "dense-tables", "readings", "claims")


def table(kind: str, *arguments: str) -> str:
    kinds = {"sizes": sizes, "bench": bench, "reference": reference, "pools": pools, "map-head": map_head}
    kinds |= {"broadcast": broadcast, "density": density, "recipes": recipes, "training-speed": training_speed}
    kinds |= {"cifar10-pools": cifar10_pools, "transfer": transfer, "study": study}
    kinds |= {"growth-families": growth_families, "growth-sizes": growth_sizes, "growth-cells": growth_cells}
    kinds |= {"by-heart": by_heart, "unseen-scenes": unseen_scenes}
    kinds |= {"readings": readings, "xtiny-widths": xtiny_widths, "claims": claims}
    kinds |= {"dense-tables": dense_tables, "captures": captures, "rooms": rooms, "loss-shares": loss_shares}
    if kind.startswith("performance-"):
        return performance()[kind.removeprefix("performance-")](*arguments)
    return kinds[kind](*arguments)


def rooms() -> str:
    """The imports between rooms as a Mermaid chart, without arrows that a longer way replaces."""
    import ast

    package = ROOT / "broadsight"
    everybodys = {"files", "errors", "options", "provenance", "visual"}
    names = {path.parent.name for path in package.glob("*/__init__.py")} | {"losses", "api"} - everybodys
    names -= everybodys
    arrows: dict[str, set[str]] = {name: set() for name in sorted(names)}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text("utf-8"))) if parts[0] in names else ():
            if isinstance(node, ast.ImportFrom) and node.level == len(parts):
                whole = [node.module] if node.module else [alias.name for alias in node.names]
                arrows[parts[0]] |= {name.split(".")[0] for name in whole} & names - {parts[0]}

    def reaches(start: str, end: str, seen: frozenset[str] = frozenset()) -> bool:
        return any(one == end or (one not in seen and reaches(one, end, seen | {one})) for one in arrows[start])

    lines = ["```mermaid", "flowchart TD"]
    for room, found in arrows.items():
        for one in sorted(found):
            ways = [other for other in found - {one} if reaches(other, one)]
            if all(reaches(one, other) or reaches(other, room) for other in ways):  # none, or rooms of one level
                lines.append(f"  {room} --> {one}")
    return "\n".join([*lines, "```"])


def loss_shares(images: int = 256, groups: int = 2, deviation: float = 3.0) -> str:
    """Norms of the gradients of the weighted divergences by the logits, over that of the label loss."""
    import warnings

    import torch

    from broadsight.layers import GroupLogits
    from broadsight.layers.checks import READINGS
    from broadsight.losses import CRITERIA, MultiTokenLoss

    header = [f"{term}, {criterion.upper()}" for criterion in CRITERIA for term in ("intra", "inter")]
    lines = [f"| reading | classes | {' | '.join(header)} |", "|---|---|---|---|---|---|"]
    for reading in READINGS:
        for classes in (10, 100, 1000):
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(2, images, groups, classes, generator=generator, dtype=torch.float64)
            logits = list((deviation * drawn).requires_grad_().unbind())
            labels = torch.randint(classes, (images,), generator=generator)
            shares = []
            for criterion in CRITERIA:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    loss = MultiTokenLoss(criterion, reading=reading)
                parts = loss.parts(GroupLogits(*logits), labels)
                options = dict(retain_graph=True, allow_unused=True, materialize_grads=True)
                base, intra, inter = (
                    torch.cat(torch.autograd.grad(parts[name], logits, **options)).norm().item()
                    for name in ("base", "intra", "inter")
                )
                shares += [abs(loss.intra) * intra / base, abs(loss.inter) * inter / base]
            lines.append(f"| {reading} | {classes} | {' | '.join(f'{share:.2g}' for share in shares)} |")
    return "\n".join(lines)


@cache
def performance() -> dict:
    """What the file beside this one defines."""
    return runpy.run_path(str(ROOT / "docs" / "performance_tables.py"))


def draw_performance(file: str = "results/performance.json", image: str = "docs/images/accuracy-latency.svg") -> None:
    from broadsight.benchmark.accuracy_plot import plot

    plot([performance()["opened"](file)[0]], ROOT / image)


@cache
def models(family: str) -> list[dict]:
    from broadsight.papers.verify import catalogue

    return catalogue(families=[family])


def sizes(*families: str) -> str:
    lines = ["| model | parameters | executed MACs at 224 | paper: params, MACs | paper: top-1 |"]
    lines.append("|---|---|---|---|---|")
    for family in families:
        for row in (row for row in models(family) if "faster_vit" not in row["model"]):  # whose package few have
            figures = ((row["paper_params_m"], "M"), (row["paper_macs_g"], "G"))
            paper = ", ".join("-" if value is None else f"{value:g} {unit}" for value, unit in figures)
            top1 = "[recipes](recipes.md)" if row["paper_top1"] is None else f"{row['paper_top1']:g} %"
            lines.append(f"| `{row['model']}` | {row['params']:,} | {row['macs'] / 1e9:.3f} G | {paper} | {top1} |")
    return "\n".join(lines)


def readings(*names: str) -> str:
    """Sizes of both readings of some models."""
    from broadsight.inspection.macs import blank_model, executed_macs
    from broadsight.layers.checks import READINGS

    lines = [
        f"| model | {' | '.join(f'parameters, `{one}` | executed MACs' for one in READINGS)} |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        cells = []
        for model in (blank_model(name, reading=one) for one in READINGS):
            parameters, macs = sum(p.numel() for p in model.parameters()), executed_macs(model, (224, 224))
            cells += [f"{parameters:,}", f"{macs / 1e9:.4f} G"]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def xtiny_widths(file: str = "results/emsnet_xtiny_widths.json") -> str:
    """Figures of widths of EMSNet-XTiny, those that the tables print in bold."""
    study = json.loads((ROOT / file).read_text("utf-8"))
    lines = [
        f"| widths | {' | '.join(study['figures'])} | in tables | distance |",
        "|---" * (len(study["figures"]) + 3) + "|",
    ]
    for row in study["rows"]:
        cells = []
        for name, (low, high, _) in study["figures"].items():
            text = f"{row['figures'][name]:.{1 if low > 99 else 2}f}"
            cells.append(f"**{text}**" if low <= row["figures"][name] < high else text)
        widths = ", ".join(map(str, row["widths"]))
        lines.append(f"| {widths} | {' | '.join(cells)} | {row['reproduced']} | {row['distance']:.1%} |")
    ranges = "; ".join(
        f"{name} {low:g} to {high:g}, {tables}" for name, (low, high, tables) in study["figures"].items()
    )
    about = (
        f"What prints as the tables do, and how many tables print it: {ranges}. Distance: how far all figures together"
    )
    return "\n".join(
        [*lines, "", f"{about} are from there. The first of {study['candidates']} widths, and some others."]
    )


def claims(file: str = "results/reference-inference.json") -> str:
    """How many of the published figures are reproduced, and how fast our layers are beside the published ones."""
    from collections import Counter

    from broadsight.papers.verify import verify

    count = Counter(check.status for check in verify())
    assert not count["miss"], "a figure is missed; see broadsight verify"
    report = json.loads((ROOT / file).read_text("utf-8"))
    ratios = {row["model"]: row["speedup"]["median"] for row in report["rows"] if row["form"] == "ours"}
    slow, fast = min(ratios, key=lambda name: ratios[name]), max(ratios, key=lambda name: ratios[name])
    return (
        f"Of {count.total()} published static figures, `broadsight verify` finds {count['match']} reproduced at the "
        f"printed precision and {count['explained']} not, with the reason; {count['not run']} are of models that we do "
        f"not have. Inference on a CPU takes the published formulations {ratios[slow]:.2f} (`{slow}`) to "
        f"{ratios[fast]:.2f} times (`{fast}`) as long as ours ([measured](docs/performance.md#"
        "against-the-published-formulations)).\n"
    )


def dense_tables() -> str:
    """Every figure of the papers' dense tables beside ours, and below it why some differ."""
    from broadsight.papers.verify import verify

    rows: dict[str, list] = {}
    for check in verify(["dense"]):
        rows.setdefault(check.row, []).append(check)
    lines = ["| table | model | M parameters: paper, ours | G MACs: paper, ours | match |", "|---|---|---|---|---|"]
    notes: dict[str, int] = {}
    for row, checks in rows.items():
        where, _, model = row.rpartition(": ")
        name, _, backbone = model.partition(" on ")
        cells = [f"{check.paper}, " + ("-" if check.ours is None else f"{check.ours:.3f}") for check in checks]
        marks = []
        for check in checks:
            note = f" ({notes.setdefault(check.note, len(notes) + 1)})" if check.note else ""
            marks.append({"match": "yes", "explained": "no", "miss": "**no**"}.get(check.status, check.status) + note)
        mark = marks[0] if marks[0] == marks[1] else ", ".join(marks)
        lines.append(f"| {where} | {name}, `{backbone}` | " + " | ".join(cells) + f" | {mark} |")
    return "\n".join([*lines, "", *(f"{number}. {note}." for note, number in notes.items())])


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


def broadcast(file: str) -> str:
    from broadsight.benchmark.run import median_interval

    study = json.loads((ROOT / file).read_text("utf-8"))
    reports = study["reports"]
    shares = {(found["kind"], found["train"]): found["share"] for found in study["shares"]}
    lines = ["| ViT-S with | inference | training step | kept for backward |", "|---|---|---|---|"]
    for place, kind in enumerate(reports[0]["settings"]["broadcasts"]):
        cells = []
        for report in reports:
            row, base = report["rows"][place], report["rows"][0]
            low, high = median_interval(
                [a / b for a, b in zip(row["cpu_samples_ms"], base["cpu_samples_ms"], strict=True)]
            )
            ratio = f"{row['cpu_ratio']['median'] - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"
            share = shares.get((kind, report["settings"]["train"]))
            cells.append(ratio if share is None else f"{share:.2%} of it; {ratio}")
        cells.append(f"{reports[1]['rows'][place]['saved_ratio']:.2f}")
        if place:
            lines.append(f"| {'nothing (noise)' if kind == 'none' else f'`{kind}`'} | " + " | ".join(cells) + " |")
    machine, settings, batch = reports[0]["machine"], reports[0]["settings"], study["shares"][0]["batch"]
    note = (
        f"First: share of the time spent in the broadcasts, batch {batch}. Then: change of CPU time against the plain "
        f"model (`broadsight bench`), batch {settings['batch']}, median of {settings['rounds']} interleaved rounds "
        f"with a 95 % confidence interval. The first row compares the plain model with itself. "
        f"224x224, float32, 1 thread; {machine['cpu']}, "
        f"torch {machine['versions']['torch']}, timm {machine['versions']['timm']}."
    )
    return "\n".join([*lines, "", note])


def density(file: str) -> str:
    study = json.loads((ROOT / file).read_text("utf-8"))
    kinds = dict.fromkeys(run["kind"] for run in study["runs"])
    layers = range(len(study["runs"][0]["keys"]))
    lines = ["| | top-1 | " + " | ".join(f"layer {i + 1}" for i in layers) + " |", "|---" * (len(layers) + 2) + "|"]
    for kind in kinds:
        runs = [run for run in study["runs"] if run["kind"] == kind]
        columns = [[run["top1"] for run in runs], *zip(*(run["entropy"].values() for run in runs), strict=True)]
        cells = [" / ".join(f"{x:.{1 if i == 0 else 2}f}" for x in column) for i, column in enumerate(columns)]
        lines.append(f"| {'plain' if kind == 'none' else f'`{kind}`'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plus_minus(summary: dict) -> str:
    return f"{summary['median']:.2f} ±{summary['spread']:.0%}"


def precision(settings: dict) -> str:
    return settings["dtype"] if "dtype" in settings else "/".join(settings["precisions"])


def setting(report: dict) -> str:
    machine, settings = report["machine"], report["settings"]
    peak = machine.get("gemm_flops", {})
    peaks = {f"{name} ": one for name, one in peak.items()} if isinstance(peak, dict) else {"": peak}
    peak = "".join(f", matrix products {name}{one / 1e9:.0f} GFLOP/s" for name, one in peaks.items())
    return (
        f"{'Training step' if settings['train'] else 'Inference'}, batch {settings['batch']}, "
        f"{settings['size'][0]}x{settings['size'][1]}, {precision(settings)}, {settings['threads']} thread, "
        f"{settings['rounds']} interleaved rounds, process CPU time, default allocator; {machine['cpu']}, "
        f"torch {machine['versions']['torch']}, timm {machine['versions']['timm']}{peak}."
    )


def recipes() -> str:
    """One row for all recipes of one kind of model that train alike, each with the paper's figure and its cost."""
    from broadsight.training.recipes import find, names

    rows: dict[tuple, list[str]] = {}
    for entry in map(find, names()):
        recipe = entry.recipe
        length = f"{recipe.epochs} + {recipe.cooldown_epochs}" if recipe.cooldown_epochs else f"{recipe.epochs}"
        length += " epochs"
        if recipe.epoch_updates:
            length = f"{recipe.epochs * recipe.epoch_updates:,} updates"
        size = "size by the data" if recipe.image_size is None else f"{recipe.image_size} px"
        if recipe.eval_size not in (None, recipe.image_size):
            size += f", evaluated at {recipe.eval_size}"
        how = f"{length} of {recipe.batch_size}, {recipe.optimizer} {recipe.lr:g}, {size}"
        paper = "" if entry.model is None or entry.data is None else (entry.reported() or "-").removesuffix(" top-1")
        words = [word.removesuffix(" EMAC") for word in (paper, entry.cost) if word]
        kind = (entry.data or "yours", entry.head or "", (entry.model or "").partition("_")[0], how)
        rows.setdefault(kind, []).append(f"`{entry.name}`" + (f" {', '.join(words)}" if words else ""))
    lines = ["| data | training | recipes: paper, cost in EMAC | ours |", "|---|---|---|---|"]
    for (data, head, _, how), recipes in rows.items():
        lines.append(f"| {data} | {f'`{head}`, ' if head else ''}{how} | {'; '.join(recipes)} | not run |")
    return "\n".join(lines)


def training_speed(file: str) -> str:
    report = json.loads((ROOT / file).read_text("utf-8"))
    lines = ["| what | ours | beside it | ratio | 95 % of the median |", "|---|---|---|---|---|"]
    for row in report["steps"]:
        times = row["ms"]
        lines.append(
            f"| step of `{row['model']}`, {row['size']} px, batch {row['batch']} | {times['ours']:.0f} ms "
            f"| bare loop {times['theirs']:.0f} ms | {row['ratio']:.3f} | {row['low']:.3f} to {row['high']:.3f} |"
        )
    for row in report["data"]:
        rates = row["images_a_second"]
        what = "RandAugment" if row["augment"] else "crops, flips, colours"
        lines.append(
            f"| data: {what}, workers: {row['workers']} | {rates['ours']:.0f} images/s | timm's loader "
            f"{rates['theirs']:.0f} images/s | {row['ratio']:.3f} | {row['low']:.3f} to {row['high']:.3f} |"
        )
    return "\n".join(lines)


POOL_NAMES = {"gap": "GAP", "cap": "CAP", "map-light": "MAP-light", "map": "MAP"}


def mean_spread(row: dict, name: str, digits: int, sign: str = "") -> str:
    return f"{row[f'{name}_mean']:{sign}.{digits}f} ± {row[f'{name}_spread']:.{digits}f}"


def cifar10_pools(file: str) -> str:
    report = json.loads((ROOT / file).read_text("utf-8"))
    lines = ["| pooling | parameters | MACs | top-1, % | over GAP, seed by seed | loss | CPU minutes a run |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in report["summary"]:
        over = "-" if row["pool"] == "gap" else mean_spread(row, "over_gap", 2, "+")
        minutes = f"{row['cpu_seconds_mean'] / 60:.1f}" if "cpu_seconds_mean" in row else "as MAP"
        lines.append(
            f"| {POOL_NAMES[row['pool']]} | {row['parameters']:,} | {row['macs'] / 1e6:.2f} M | "
            f"{mean_spread(row, 'top1', 2)} | {over} | {mean_spread(row, 'val_loss', 3)} | {minutes} |"
        )
    lines += ["", "| pooling | " + " | ".join(f"seed {seed}" for seed in range(report["seeds"])) + " |"]
    lines.append("|---" * (report["seeds"] + 1) + "|")
    for pool, name in POOL_NAMES.items():
        found = [f"{row['top1']:.2f}" for row in report["runs"] if row["pool"] == pool]
        lines.append(f"| {name} | " + " | ".join(found) + " |")
    gap, most = (next(row for row in report["summary"] if row["pool"] == pool) for pool in ("gap", "map"))
    products, time = most["macs"] / gap["macs"], most["cpu_seconds_mean"] / gap["cpu_seconds_mean"]
    lines += ["", f"MAP takes {products:.1f} times the multiply-accumulates and {time:.1f} times the CPU time of GAP."]
    return "\n".join(lines)


def transfer(file: str) -> str:
    report = json.loads((ROOT / file).read_text("utf-8"))
    starts = {"imagenet": "ImageNet", "random": "random"}
    lines = ["| how | weights | pooling | AUC, % | accuracy, % | AUC over GAP, seed by seed |"]
    lines.append("|---|---|---|---|---|---|")
    for row in report["summary"]:
        hundred = {key: 100 * value for key, value in row.items() if key.startswith("auc")}
        over = "-" if row["pool"] == "gap" else mean_spread(hundred, "auc_over_gap", 2, "+")
        lines.append(
            f"| {row['how']} | {starts[row['start']]} | {POOL_NAMES[row['pool']]} | {mean_spread(hundred, 'auc', 2)} | "
            f"{mean_spread(row, 'accuracy', 2)} | {over} |"
        )
    lines += ["", f"Calling every cell sound gives {report['majority']:.1f} % accuracy."]
    return "\n".join(lines)


GROWTH = {"cpu_time": "CPU time", "time": "wall time", "memory": "peak memory", "macs": "MACs"}


def by_heart(file: str) -> str:
    report = json.loads((ROOT / file).read_text("utf-8"))
    lines = ["| task | head | images, objects | pixels | updates of | figure | of these images, % | minutes |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, row in report["rows"].items():
        if name == "scenes":
            continue
        figure = row["figure"].replace("_ap50", " AP50").replace("miou", "mIoU")
        more = {"mask_ap50": "box_ap50", "miou": "aacc", "keypoint_ap50": "keypoint_ap", "box_ap50": "box_ap"}
        other = more[row["figure"]]
        words = other.replace("_ap", " AP").replace("aacc", "aAcc")
        value = f"**{row['figures'][row['figure']]:.1f}** ({words} {row['figures'][other]:.1f})"
        held = f"{row['images']}" + (f", {row['objects']}" if row["objects"] else "")
        lines.append(
            f"| {row['task']} | `{row['head']}` | {held} | {row['pixels']} | {row['updates']} of {row['batch']} "
            f"| {figure} | {value} | {row['minutes']:.0f} |"
        )
    versions = report["versions"]
    lines += ["", f"`{report['model']}`, {report['threads']} thread, torch {versions['torch'].partition('+')[0]}."]
    return "\n".join(lines)


def unseen_scenes(file: str) -> str:
    row = json.loads((ROOT / file).read_text("utf-8"))["rows"]["scenes"]
    lines = ["| | AP | AP50 | AP75 |", "|---|---|---|---|"]
    for name, figures in (("untrained", row["untrained"]), (f"after {row['updates']} updates", row["figures"])):
        lines.append(
            f"| {name} | " + " | ".join(f"{figures[f'box_{key}']:.1f}" for key in ("ap", "ap50", "ap75")) + " |"
        )
    lines += ["", f"`{row['head']}`, {row['images']} training scenes of {row['pixels']} pixels, "]
    lines[-1] += f"a quarter as many for validation; {row['minutes']:.0f} minutes."
    return "\n".join(lines)


def captures(file: str) -> str:
    """What looking costs, as multiples of a plain pass: models down, captures across."""
    report = json.loads((ROOT / file).read_text("utf-8"))
    names = list(dict.fromkeys(row["capture"] for row in report["rows"]))
    lines = ["| model | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for model in dict.fromkeys(row["model"] for row in report["rows"]):
        found = {row["capture"]: row["ratio"] for row in report["rows"] if row["model"] == model}
        cells = [f"{found[name]:.2f}" if name in found else "-" for name in names]
        lines.append(f"| `{model}` | " + " | ".join(cells) + " |")
    size, torch = report["rows"][0]["size"], report["versions"]["torch"].partition("+")[0]
    about = f"{size} pixels, {report['batch']} images at once (one for look-inside), {report['threads']} thread"
    lines += [
        "",
        f"CPU time over that of a plain pass, median of {report['rounds']} interleaved rounds; {about}, torch {torch}.",
    ]
    return "\n".join(lines)


def growth_families(file: str) -> str:
    """The range of the exponents of each family, the yardsticks one by one."""
    models = json.loads((ROOT / file).read_text("utf-8"))["models"]
    groups: dict[str, list[dict]] = {}
    for row in models:
        one_by_one = row["family"] in ("yardsticks", "map", "broadcast")
        groups.setdefault(f"`{row['model']}`" if one_by_one else f"`{row['family']}_*`", []).append(row)
    kept = {key: name for key, name in GROWTH.items() if key != "time"}
    lines = ["| | " + " | ".join(kept.values()) + " | CPU time below 1.25 |", "|---" * (len(kept) + 2) + "|"]
    for name, rows in groups.items():
        cells = []
        for key in kept:
            low, high = (f"{pick(row[key]['value'] for row in rows):.2f}" for pick in (min, max))
            cells.append(low if low == high else f"{low} to {high}")
        below = sum(row["cpu_time"]["value"] < 1.25 for row in rows)
        answer = "yes" if below == len(rows) else "**no**" if below == 0 else f"{below} of {len(rows)}"
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {answer} |")
    return "\n".join(lines)


def growth_sizes(file: str) -> str:
    """CPU time and peak memory of every model at the sizes of classifiers, segmenters and detectors."""
    report = json.loads((ROOT / file).read_text("utf-8"))
    sizes = ["{}x{}".format(*size) for size in report["sizes"]]
    shown = [sizes.index(size) for size in ("256x256", "512x512", "1024x1024", "1333x800")]
    lines = ["| model | parameters | " + " | ".join(sizes[place] for place in shown) + " |"]
    lines.append("|---" * (len(shown) + 2) + "|")
    for row in report["models"]:
        at = [row["at"][place] for place in shown]
        cells = [f"{one['cpu_ms']['median']:,.0f} ms, {one['peak_bytes'] / 2**20:.0f} MB" for one in at]
        lines.append(f"| `{row['model']}` | {row['params'] / 1e6:.1f} M | " + " | ".join(cells) + " |")
    machine, settings = report["machine"], report["settings"]
    loads = [row["load_before"][0] for row in report["models"]]
    load = f"{min(loads):.1f} to {max(loads):.1f}"
    note = (
        f"Inference, batch {settings['batch']}, {precision(settings)}, {settings['threads']} thread, "
        f"default allocator; {machine['cpu']}, {machine['cores']} cores under a load of {load}; "
        f"torch {machine['versions']['torch']}, timm {machine['versions']['timm']}."
    )
    return "\n".join([*lines, "", note])


def growth_cells(file: str) -> str:
    """Exponents of multiply-accumulates of STViT with other cells."""
    found = json.loads((ROOT / file).read_text("utf-8"))["stvit_cells"]
    lines = ["| `stvit_small` with `cells=` | exponent of MACs |", "|---|---|"]
    lines += [f"| `({', '.join(map(str, row['cells']))})` | {row['macs']:.2f} |" for row in found]
    return "\n".join(lines)


def study(file: str) -> str:
    """What a study was, from its own record."""
    report = json.loads((ROOT / file).read_text("utf-8"))
    changed = ", ".join(f"{key} {value}" for key, value in report["changes"].items())
    counts = report["data"]["counts"]
    made = report["versions"]
    return (
        f"`{report['model']}`, recipe `{report['recipe']}` with {changed}; {counts['train']:,} training images, "
        f"{counts['val']:,} validation images; {report['seeds']} seeds; {report['cores']} cores, {report['jobs']} "
        f"runs at a time, {report['seconds'] / 60:.0f} minutes in all on a busy machine; torch {made['torch']}, "
        f"timm {made['timm']}. ± is the {report['spread']}."
    )


if __name__ == "__main__":
    sys.exit(main())
