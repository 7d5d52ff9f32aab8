"""The command that lists recipes: recipes."""

import json as json_
from dataclasses import asdict
from typing import Annotated

from ..errors import nearest
from .parser import DONE, Arg
from .terminal import show


def recipes(
    pattern: Annotated[str | None, Arg("name or wildcard such as 'stvit-*'", True, "PATTERN")] = None,
    json: Annotated[bool, Arg("print JSON, with all settings")] = False,
) -> int:
    """List recipes: what each is for, what it costs to compute, what its paper reports."""
    from fnmatch import fnmatch

    from ..training.recipes import find, names

    chosen = [find(name) for name in names() if pattern is None or fnmatch(name, pattern)]
    if not chosen:
        raise ValueError(
            f"no recipe matches {pattern!r}; nearest: {', '.join(nearest(pattern or '', names(), alike=0))}"
        )
    if json:
        print(json_.dumps([asdict(entry) for entry in chosen], indent=2))
        return DONE
    from rich.table import Table

    table = Table()
    for name in ("recipe", "model", "data"):
        table.add_column(name, no_wrap=True)
    for name in ("epochs", "pixels", "cost", "paper"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("about")
    for entry in chosen:
        recipe = entry.recipe
        model = " + ".join(filter(None, [entry.model or "any", entry.pool, entry.neck, entry.head]))
        figures = [str(recipe.epochs + recipe.cooldown_epochs), str(recipe.image_size or "-"), entry.cost or "-"]
        table.add_row(
            entry.name,
            model,
            entry.data or "any",
            *figures,
            entry.reported() or "-",
            entry.about,
        )
    show(table)
    return DONE
