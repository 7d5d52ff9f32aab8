"""Computes what every recipe costs and writes it into `broadsight/training/recipes.yaml`; `--check` only compares.

The multiply-accumulates of a whole training: three times the forward pass at the training size, since the backward pass
takes two, for every image of every epoch, cool-down included; with a teacher, its forward pass as well.

    python benchmarks/recipe_costs.py [--check] [NAME ...]
"""

import re
import sys
from functools import cache
from pathlib import Path

import timm
import torch
import yaml

import broadsight.models  # noqa: F401  registers the models
from broadsight import swap_pool
from broadsight.inspection.macs import blank_model, executed_macs
from broadsight.training.recipes import Entry, find, names

FILE = Path(__file__).parents[1] / "broadsight" / "training" / "recipes.yaml"
IMAGES = {"imagenet-1k": 1_281_167, "cifar10": 50_000, "cifar100": 50_000, "cars": 8_144}
CLASSES = {"imagenet-1k": 1000, "cifar10": 10, "cifar100": 100, "cars": 196}


def main() -> int:
    chosen = [name for name in sys.argv[1:] if not name.startswith("-")] or names()
    stale, text = [], FILE.read_text("utf-8")
    for name in chosen:
        found = cost(find(name))
        if found != find(name).cost:
            stale.append(name)
            start = text.index(f"\n{name}:\n")
            block = re.compile(r"\n\n|\Z").search(text, start + 2)
            entry = text[start : block.start() if block else len(text)]
            line = f"\\n  cost: {found}" if found else ""
            fresh = re.sub(r"\n  cost: .*", "", entry)
            fresh = re.sub(r"(\n  data: .*)", rf"\1{line}", fresh, count=1)
            text = text.replace(entry, fresh)
    if stale and "--check" in sys.argv:
        print(f"stale: {', '.join(stale)}")
        return 1
    FILE.write_text(text, "utf-8")
    return 0


def cost(entry: Entry) -> str | None:
    """In words, such as 5.0 EMAC; None for a recipe without a model or data, and for dense tasks.

    What detectors compute depends on what they find, and images differ in size.
    """
    recipe = entry.recipe
    if entry.task != "classify" or entry.model is None or entry.data is None or recipe.image_size is None:
        return None
    classes, size = CLASSES[entry.data], recipe.image_size
    one = 3 * macs(entry.model, entry.pool, yaml.safe_dump(dict(entry.model_args)), classes, size)
    if recipe.teacher:
        one += macs(recipe.teacher, None, "{}", classes, size)
    exa = one * IMAGES[entry.data] * (recipe.epochs + recipe.cooldown_epochs) / 1e18
    return f"{exa:.0f} EMAC" if exa >= 10 else f"{exa:#.2g} EMAC"


@cache
def macs(model: str, pool: str | None, arguments: str, classes: int, size: int) -> int:
    """Of a forward pass, counted without arithmetic."""
    given = {**yaml.safe_load(arguments), "num_classes": classes}
    if pool is None and "pool_options" not in given:
        return executed_macs(blank_model(model, **given), (size, size))
    with torch.device("meta"):
        built = swap_pool(model, pool, **given) if pool else timm.create_model(model, **given)
    return executed_macs(built, (size, size))


if __name__ == "__main__":
    sys.exit(main())
