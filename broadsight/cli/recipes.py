"""The command that lists recipes: recipes."""

import json
from dataclasses import asdict
from fnmatch import fnmatch

from ..errors import nearest
from ..training.request import RecipesRequest
from ..visual.terminal import show
from .parser import DONE
from .tables import NAME, NUMBER, TEXT, columns, table


def recipes(request: RecipesRequest) -> int:
    """Show the recipes whose names match."""
    from ..training.recipes import find, names

    pattern = request.pattern
    chosen = [find(name) for name in names() if pattern is None or fnmatch(name, pattern)]
    if not chosen:
        raise ValueError(
            f"no recipe matches {pattern!r}; nearest: {', '.join(nearest(pattern or '', names(), alike=0))}"
        )
    if request.json:
        print(json.dumps([asdict(entry) for entry in chosen], indent=2))
        return DONE
    rows = []
    for entry in chosen:
        recipe = entry.recipe
        model = " + ".join(filter(None, [entry.model or "any", entry.pool, entry.neck, entry.head]))
        figures = [str(recipe.epochs + recipe.cooldown_epochs), str(recipe.image_size or "-"), entry.cost or "-"]
        rows.append([entry.name, model, entry.data or "any", *figures, entry.reported() or "-", entry.about])
    figures = columns(NUMBER, "epochs", "pixels", "cost", "paper")
    show(table({**columns(NAME, "recipe", "model", "data"), **figures, "about": TEXT}, rows))
    return DONE
