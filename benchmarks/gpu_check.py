"""Whether everything is right and fast on a GPU: ten minutes, one table, one JSON file for the docs.

    python benchmarks/gpu_check.py [--json results/gpu.json] [--batch 64] [--rounds 15]
    python benchmarks/gpu_check.py --device cpu --quick        # a rehearsal without a GPU

Right: outputs and gradients of every family, pool and kind of broadcasting, of two dense models and their losses, in
float32 (without TF32), and in bfloat16 and float16 by autocast, against the CPU in float64. An error may be some times
that of the CPU in float32 or bfloat16. Fast: elapsed time and memory beside the published formulations
(`against_reference.py`) and timm's models (`broadsight bench`), interleaved.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from against_reference import REFERENCES, compare
from dense.heads.small import small, two_images  # of the tests, as the references are
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from broadsight import add_context_broadcast, swap_pool
from broadsight.benchmark.run import Settings, describe_machine, fixed_threads, measure, write_json
from broadsight.errors import first_line
from broadsight.inspection.precision import DTYPES
from broadsight.layers.context_broadcast import KINDS
from broadsight.losses import MultiTokenLoss
from broadsight.surgery.pooling import POOLS

FAMILIES = (*REFERENCES, "pvt_tiny")
OURS = ("stvit_small", "partialformer_b1", "mat_2", "emsnet_xxtiny", "map_resnet50", "deit_tiny_distilled_cb_s")
PEERS = ("resnet50", "swin_tiny_patch4_window7_224", "pvt_v2_b1", "efficientnet_b0", "mobilenetv4_conv_small")
COMPILED = ("resnet50", "stvit_small", "partialformer_b1", "mat_2", "emsnet_xxtiny")
LOSS_SCALE = 1024.0  # in fp16, as a GradScaler has it
# How many times the CPU's error another device may have, in which other sums are rounded, and what is never an error.
ALLOWED = {"fp32": (10, 1e-4), "bf16": (3, 1e-2), "fp16": (3, 1e-2)}
EXACT = "float64"


class Case(NamedTuple):
    title: str
    model: nn.Module
    images: Any
    target: Any


class Found(NamedTuple):
    """Of eval mode, and of train mode without dropout, which draws other numbers on other devices; in float64."""

    outputs: Tensor
    gradients: Tensor


def cases(size: int, quick: bool) -> Iterator[Case]:
    """What is compared with the CPU; small models, or quick ones of one block a stage."""
    backbone, vit = ("test_resnet", "test_vit") if quick else ("resnet18", "deit_tiny_patch16_224")
    images, labels = torch.randn(4, 3, size, size), torch.tensor([0, 1, 2, 3])
    for name in FAMILIES:
        options = dict(depths=(1, 1, 1, 1)) if quick else {}
        yield Case(name, timm.create_model(name, num_classes=10, **options), images, labels)
    for pool in POOLS:
        yield Case(f"{backbone}, {pool}", swap_pool(backbone, pool, num_classes=10), images, labels)
    for kind in KINDS:
        model = timm.create_model(vit, num_classes=10, img_size=size)
        yield Case(f"{vit}, {kind}", add_context_broadcast(model, kind, branch="both"), images, labels)
    for head in ("semantic_fpn", "retinanet"):
        model = small(head, backbone=backbone)
        yield Case(f"{backbone}, {head}", model, *two_images(model))


def found(case: Case, device: str, precision: str) -> Found:
    """Outputs and gradients of a case on a device, computed in a precision."""
    place: dict[str, Any] = {"device": device, "dtype": torch.float64 if precision == EXACT else torch.float32}
    model = deepcopy(case.model).to(**place)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    images = tree_map_only(Tensor, lambda x: x.to(**place), case.images)
    target = tree_map_only(Tensor, lambda x: x.to(device), case.target)
    scale = LOSS_SCALE if precision == "fp16" else 1.0
    with torch.autocast(torch.device(device).type, DTYPES.get(precision), enabled=precision in ("bf16", "fp16")):
        with torch.no_grad():
            model.eval()
            outputs = torch.cat([one.flatten() for one in (model(images), *raw(model, images)) if torch.is_tensor(one)])
        loss = scale * loss_of(model.train(), images, target)
    learned = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, learned, allow_unused=True, materialize_grads=True)
    flat = torch.cat([one.flatten().cpu().double() for one in gradients]) / scale
    return Found(outputs.cpu().double(), flat)


def raw(model: Any, images: Any) -> Sequence[Tensor]:
    """Outputs of a detector before it chooses boxes, of which there are others after the least rounding."""
    return tuple(model.raw(torch.stack([one[:, :48, :48] for one in images])).values()) if hasattr(model, "raw") else ()


def loss_of(model: Any, images: Any, target: Any) -> Tensor:
    if hasattr(model, "task"):
        return torch.stack(list(model(images, target).values())).sum()
    if getattr(model, "has_groups", False) and not model.head.light:
        return MultiTokenLoss("bce")(model(images, groups=True), target)
    return F.cross_entropy(model(images).float(), target)


def check(case: Case, device: str) -> Iterator[dict[str, Any]]:
    """A row for each precision: errors of outputs and gradients, here and of the CPU, relative to what is right."""
    exact = found(case, "cpu", EXACT)
    beside = {precision: errors(found(case, "cpu", precision), exact) for precision in ("fp32", "bf16")}
    for precision, (times, floor) in ALLOWED.items():
        row: dict[str, Any] = {"what": case.title, "precision": precision}
        cpu = beside["fp32" if precision == "fp32" else "bf16"]
        try:
            ours = errors(found(case, device, precision), exact)
            right = all(one <= times * other + floor for one, other in zip(ours, cpu, strict=True))
            row |= {"outputs": ours[0], "gradients": ours[1], "cpu": cpu, "right": right}
        except Exception as error:  # the next may work
            row |= {"right": False, "failure": f"{type(error).__name__}: {first_line(error)}"}
        yield row


def errors(one: Found, exact: Found) -> tuple[float, float]:
    return tuple(float((x - y).norm() / y.norm()) for x, y in zip(one, exact, strict=True))  # ty: ignore[invalid-return-type]


def peers(names: Sequence[str], settings: Settings) -> Iterator[dict[str, Any]]:
    """Rows of a benchmark in which a model that fails, for want of memory or support, is left out and named."""
    names = list(names)
    while names:
        try:
            report = measure(names, settings)
        except RuntimeError as error:
            failed = next((name for name in names if str(error).startswith(name)), names[-1])
            names.remove(failed)
            yield {"model": failed, "failure": first_line(error), "settings": asdict(settings)}
            continue
        yield from ({**asdict(row), "settings": asdict(settings)} for row in report.rows)
        return


def setups(quick: bool) -> Iterator[tuple[Sequence[str], dict[str, Any]]]:
    """Models and settings that are timed together."""
    every = ("mat_1", "mobilenetv4_conv_small") if quick else (*PEERS, *OURS)
    for train in (False, True):
        yield every, dict(train=train)
        yield every, dict(train=train, precisions=("bf16",))
        yield every, dict(train=train, precisions=("bf16",), channels_last=True)
    if not quick:
        yield COMPILED, dict(precisions=("bf16",), channels_last=True, runtimes=("eager", "compile"))


def how(settings: dict[str, Any]) -> str:
    layout = ", channels last" if settings["channels_last"] else ""
    return f"{'training' if settings['train'] else 'inference'}, {'/'.join(settings['precisions'])}{layout}"


def cells(part: str, row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table: part, model, how it ran, result, memory, remark."""
    failure = row.get("failure", "")
    if part == "right":
        if failure:
            return part, row["what"], row["precision"], "-", "", f"WRONG: {failure}"
        shown = f"{row['outputs']:.0e}, {row['gradients']:.0e}"
        remark = f"CPU {row['cpu'][0]:.0e}, {row['cpu'][1]:.0e}"
        return part, row["what"], row["precision"], shown, "", remark if row["right"] else f"WRONG: {remark}"
    if failure:
        return part, row["model"], how(row["settings"]), "-", "", failure
    seconds = row.get("wall_s") or row.get("cpu_s") or {"median": row.get("wall_ms", {"median": 0})["median"] / 1e3}
    ratio = f"{row['speedup']['median']:.2f}x ±{row['speedup']['spread']:.0%}"
    form = row.get("form") or row["runtime"]
    shown = f"{1e3 * seconds['median']:.1f} ms, {ratio}"
    return part, f"{row['model']}, {form}", how(row["settings"]), shown, f"{row['peak_bytes'] / 1e6:.0f} MB", ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu for a rehearsal")
    parser.add_argument("--quick", action="store_true", help="small models, images and batches")
    parser.add_argument("--batch", type=int, default=64, help="images per call of what is timed")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(arguments)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device here; rehearse with --device cpu --quick", file=sys.stderr)
        return 2
    common: dict[str, Any] = dict(device=args.device, batch=args.batch, rounds=args.rounds, warmup=3)
    if args.quick:
        common |= dict(batch=2, rounds=1, warmup=1, size=64)
    torch.manual_seed(0)
    record: dict[str, Any] = {"machine": {}, "right": [], "published": [], "peers": []}
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, title="error of outputs, gradients; or time, speed-up over the first"
    )
    for heading in ("part", "model", "how", "result", "memory", "remark"):
        table.add_column(heading, overflow="fold")
    began = time.time()

    def add(part: str, rows: Callable[[], Iterator[dict[str, Any]]]) -> None:
        for row in rows():
            record[part].append(row)
            table.add_row(*cells(part, row))
        print(f"{time.time() - began:5.0f} s  {part}: {len(record[part])} rows", file=sys.stderr)

    def published(name: str, settings: Settings) -> Iterator[dict[str, Any]]:
        try:
            yield from ({**row, "settings": asdict(settings)} for row in compare(name, settings))
        except Exception as error:
            yield {"model": name, "failure": first_line(error), "settings": asdict(settings)}

    with fixed_threads(torch.get_num_threads()), torch.backends.cudnn.flags(allow_tf32=False):
        record["machine"] = describe_machine(Settings(**common))
        for case in cases(64 if args.quick else 96, args.quick):
            add("right", lambda case=case: check(case, args.device))
    for name in ["mat_2"] if args.quick else REFERENCES:
        for train, precision in product((False, True), ("fp32", "bf16")):
            settings = Settings(**common, train=train, precisions=(precision,))
            add("published", lambda settings=settings, name=name: published(name, settings))
    for names, options in setups(args.quick):
        add("peers", lambda names=names, options=options: peers(names, Settings(**common, **options)))
    record["minutes"] = (time.time() - began) / 60
    Console(width=150).print(table)
    if args.json:
        write_json(record, args.json)
    wrong = [f"{row['what']} in {row['precision']}" for row in record["right"] if not row["right"]]
    print(f"wrong: {', '.join(wrong)}" if wrong else f"all {len(record['right'])} comparisons are right")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
