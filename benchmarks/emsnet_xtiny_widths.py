"""Searches the widths of EMSNet-XTiny: which come closest to all tables that print it, at its depths and ratios.

    python benchmarks/emsnet_xtiny_widths.py [--json results/emsnet_xtiny_widths.json]

Six tables of the thesis print XTiny: 3.1, 3.2, 3.6 and 3.8 its 3.0 M parameters and 0.7 G, 3.3 and 3.4 a detector on
it. The printed widths (32, 64, 96, 128) give 2.3 M. The first two are kept, since XXTiny has them too and fits; the
others are multiples of 8. The best widths reproduce most figures, each once for every table that prints it; of equals
those with the least distance, summed over all figures, relative to the range that prints the figure. Figures of this
chapter are cut off, those of operations perhaps rounded. Everything is counted on our layers: blocks and convolutions
one by one, and what a detector adds, which is linear in the widths, at five of them.
"""

import argparse
import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from broadsight.dense import HEADS
from broadsight.dense.counting import CLASSES, Counted
from broadsight.dense.stages import open_stages
from broadsight.files import write_json
from broadsight.models.emsnet import EMSBlock, EMSNet, MultiScaleInteraction
from broadsight.papers.macs import OLD_PROFILER, count
from broadsight.provenance import header

PRINTED = (32, 64, 96, 128)
DEPTHS, RATIOS = (3, 3, 10, 2), (8, 8, 4, 4)
IMAGE, DETECTION = (224, 224), (800, 1280)
# Figure: the range of values that are printed so, and how many tables print it. Parameters in M, operations in G.
FIGURES = {
    "parameters": (3.0, 3.1, 4),
    "operations": (0.65, 0.8, 4),
    "retinanet parameters": (12.4, 12.5, 1),
    "retinanet operations": (167.85, 168.0, 1),
    "mask_rcnn parameters": (23.0, 24.0, 1),
    "mask_rcnn operations": (185.5, 187.0, 1),
}
NAMED = (PRINTED, (32, 64, 112, 160), (32, 64, 120, 160))  # always in the result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pairs = itertools.product(range(72, 161, 8), range(96, 289, 8))
    candidates = [(*PRINTED[:2], a, b) for a, b in pairs if a <= b and all(map(splits, (a, b)))]
    rows = sorted((judge(widths) for widths in candidates), key=lambda row: (-row["reproduced"], row["distance"]))
    shown = rows[:5] + [row for row in rows[5:] if tuple(row["widths"]) in NAMED]
    for row in shown:
        print(row)
    if args.json:
        write_json({**header(), "candidates": len(rows), "figures": FIGURES, "rows": shown}, args.json)


def splits(width: int) -> bool:
    """Whether both attentions of a block divide into heads of 32 channels or a little more."""
    return all(part % max(1, part // 32) == 0 for part in (width // 2, width // 4))


def judge(widths: Sequence[int]) -> dict[str, Any]:
    """What the tables would print for these widths, how many of their figures that is, and how far off it is."""
    found = np.array(backbone(widths, IMAGE, classes=1000))
    values = [*found]
    for task in ("retinanet", "mask_rcnn"):
        values += [*(np.array(backbone(widths, DETECTION)) + added(task) @ [1, *widths])]
    figures = {name: float(value / unit) for name, value, unit in zip(FIGURES, values, [1e6, 1e9] * 3, strict=True)}
    fits = {name: low <= figures[name] < high for name, (low, high, _) in FIGURES.items()}
    limits = ((name, low if figures[name] < low else high) for name, (low, high, _) in FIGURES.items())
    distance = sum(abs(figures[name] / limit - 1) for name, limit in limits if not fits[name])
    reproduced = sum(tables for name, (*_, tables) in FIGURES.items() if fits[name])
    return dict(widths=[*widths], figures=figures, reproduced=reproduced, distance=distance)


def backbone(widths: Sequence[int], size: tuple[int, int], classes: int = 0) -> tuple[int, int]:
    """Parameters and operations of the model."""
    parts, grid = [], tuple(-(-side // 2) for side in size)
    parts += [convolution(3, widths[0], grid, gelu=True)]
    for i, (width, depth, ratio) in enumerate(zip(widths, DEPTHS, RATIOS, strict=True)):
        grid = tuple(-(-side // 2) for side in grid)
        parts += [convolution(widths[max(0, i - 1)], width, grid), *[block(width, ratio, grid)] * depth]
    if classes:
        norm, cells = 2 * widths[-1], grid[0] * grid[1]
        parts += [(norm, norm * cells), ((widths[-1] + 1) * classes, widths[-1] * classes)]
    return sum(p for p, _ in parts), sum(m for _, m in parts)


@cache
def convolution(before: int, width: int, grid: tuple[int, int], gelu: bool = False) -> tuple[int, int]:
    """A 3x3 convolution and its norm."""
    layers = nn.Sequential(nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
    return measured(nn.Sequential(*layers, nn.GELU()) if gelu else layers, (1, before, *grid))


@cache
def block(width: int, ratio: int, grid: tuple[int, int]) -> tuple[int, int]:
    """A block of a stage."""
    return measured(EMSBlock(MultiScaleInteraction(width), width, width * ratio), (1, *grid, width))


@cache
def added(task: str) -> np.ndarray:
    """What a detector has beyond the model: constant and slopes (5) of parameters and of operations."""
    at = [PRINTED, *([w + 8 * (i == j) for j, w in enumerate(PRINTED)] for i in range(4))]
    over = [np.subtract(detector(task, widths), backbone(widths, DETECTION)) for widths in at]
    slopes = [(one - over[0]) / 8 for one in over[1:]]
    return np.stack([over[0] - np.dot(PRINTED, slopes), *slopes], 1)


def detector(task: str, widths: Sequence[int]) -> tuple[int, int]:
    with torch.device("meta"):
        stages = open_stages(EMSNet(tuple(widths), DEPTHS, RATIOS))
        model = Counted(HEADS[task].build(stages, CLASSES["detect"]))
    return measured(model, (1, 3, *DETECTION))


def measured(module: nn.Module, shape: Sequence[int]) -> tuple[int, int]:
    """Parameters, and operations as the thesis counts them."""
    total = sum(count(module.eval(), shape, convention=OLD_PROFILER))
    return sum(p.numel() for p in module.parameters()), total


if __name__ == "__main__":
    main()
